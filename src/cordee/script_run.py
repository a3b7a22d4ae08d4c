"""`cordee run`: the user's own script on N local workers."""

from __future__ import annotations

import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cordee.cluster.fork_server import Exited
from cordee.cluster.local import LocalEngine, describe_exit
from cordee.compute import share_threads
from cordee.core.env import Place, script_environment
from cordee.core.errors import CommunicationError, JobError, TrainingError
from cordee.interrupts import InterruptFlag

INTERRUPT_GRACE_S = 3.0  # for a script to end by itself after Ctrl-C
SETTLING_S = 0.3  # for the cause to be known when its consequence was noticed first
CONSEQUENCE = 86  # exit code of a script that only lost a peer


def run_script(script: Path, args: list[str], num_workers: int) -> bool:
    """Run `script` on `num_workers` processes; return whether it came to its end (False: Ctrl-C).

    The first worker that fails ends the others. Raises TrainingError that names it. Leaves no process.
    """
    if not script.is_file():
        raise JobError(f"no script {str(script)!r}")
    if num_workers < 1:
        raise JobError(f"-n {num_workers} must be at least 1")
    # The launcher keeps the meeting point, on a port of the system's choice, so that none can be taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    flag = InterruptFlag(lambda: None)
    with LocalEngine() as engine, flag:
        for rank in range(num_workers):
            environment = script_environment(Place(rank, num_workers, rank, num_workers), store.port)
            argument = {"script": str(script), "args": args, "num_local_workers": num_workers}
            engine.start(rank, "cordee.script_run:main", argument, environment, None)
        return _attend(engine, num_workers, flag)


def _attend(engine: LocalEngine, num_workers: int, was_interrupted: Callable[[], bool]) -> bool:
    ended: dict[int, Exited] = {}
    failed_s = interrupted_s = float("inf")
    while len(ended) < num_workers:
        for report in engine.reports(timeout_s=0.05):
            if isinstance(report, Exited):
                ended[report.index] = report
                if report.status and failed_s == float("inf"):
                    failed_s = time.monotonic()
        now_s = time.monotonic()
        if was_interrupted():
            if interrupted_s == float("inf"):
                interrupted_s = now_s
                for index in range(num_workers):
                    engine.signal(index, signal.SIGINT)
            if now_s - interrupted_s > INTERRUPT_GRACE_S:
                return False
        elif any(r.status not in (0, CONSEQUENCE) for r in ended.values()) or now_s - failed_s > SETTLING_S + 5.0:
            break
    if was_interrupted():
        return False
    failures = [report for report in ended.values() if report.status]
    causes = [report for report in failures if report.status != CONSEQUENCE] or failures
    if causes:
        raise TrainingError(f"worker {causes[0].index} {describe_exit(causes[0])}; the others were ended")
    return True


def main(argument: dict[str, Any]) -> int:
    """Run the script in a fresh fork of the fork server."""
    script = str(argument["script"])
    sys.argv = [script, *argument["args"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    share_threads(0, int(argument["num_local_workers"]))
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - whatever the script raises is reported here
        # One traceback for one failure: who merely lost a peer says so in a line.
        lost = _lost_peer(error)
        if lost is None:
            traceback.print_exc()
            return 1
        sys.stderr.write(f"cordee: {lost}\n")
        return CONSEQUENCE
    return 0


def _lost_peer(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, CommunicationError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None
