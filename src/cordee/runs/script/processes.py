"""Python processes of this host that a call starts and waits for: `cordee run` without --elastic, `horovod.run`.

Does without torch until the fork server has begun to import it: both take seconds, and so run side by side.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cordee.cluster.engine import AgentLost, CannotStart, Engine, Exited, ProcessSpec
from cordee.cluster.engines import open_engine
from cordee.core.env import Place, script_environment
from cordee.core.errors import TrainingError
from cordee.core.interrupts import InterruptFlag

INTERRUPT_GRACE_S = 3.0  # for a worker to end by itself after Ctrl-C
CONSEQUENCE = 86  # exit code of a worker that only lost a peer
CAUSE_WAIT_S = 5.0  # for the cause to be known when its consequence was noticed first


def run_workers(
    main: str,
    job: Mapping[str, Any],
    num_workers: int,
    folder: Path,
    *,
    preload: str,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Run `main`, as "module:function", on `num_workers` processes; return whether all ended (False: Ctrl-C).

    Each is given the job with its `rank`, `num_workers` and a `failure_file` in `folder`, for `attempt`.
    `environment` are more variables of the workers. `preload` is imported before they are started.

    The first worker that fails ends the others. Raises TrainingError that names it, having printed its traceback and
    nobody else's. Leaves no process.
    """
    flag = InterruptFlag(lambda: None)
    with open_engine([preload]) as engine, flag:
        import torch.distributed as dist

        # The launcher keeps the rendezvous store, on a port of the system's choice, so that none can be taken. Left to
        # itself the store would listen on all interfaces.
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, num_workers)) as listener:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1",
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        failure_files = [folder / f"worker-{rank}" for rank in range(num_workers)]
        for rank, file in enumerate(failure_files):
            own_place = Place(rank, num_workers, rank, num_workers)
            variables = {**script_environment(own_place, store.port), **(environment or {})}
            own_job = {**job, "rank": rank, "num_workers": num_workers, "failure_file": str(file)}
            engine.start(ProcessSpec.new(rank, main, own_job, environment=variables))
        ended = _await_workers(engine, num_workers, flag)
        if flag():
            return False
        if (failure := find_cause(ended)) is not None:
            file = failure_files[failure.index]
            text = file.read_text() if file.exists() else ""
            if failure.status != CONSEQUENCE:
                sys.stderr.write(text)
            raise TrainingError(_describe(failure, text.strip()))
        return True


def attempt(function: Callable[[], object], failure_file: Path, source: str) -> int:
    """Call a function as a worker, note how it failed, and return the exit code. `source` is the user's file."""
    from cordee.communication.exchange import find_lost_peer
    from cordee.runs.script.program import format_error

    try:
        function()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - whatever the user's program raises is reported
        # The launcher prints one traceback: N of the same failure, or of its consequences, would hide it.
        lost = find_lost_peer(error)
        failure_file.write_text(format_error(error, source) if lost is None else str(lost))
        return 1 if lost is None else CONSEQUENCE
    return 0


def _await_workers(engine: Engine, num_workers: int, was_interrupted: Callable[[], bool]) -> list[Exited]:
    """Wait for the workers, or for the first failure; return those that ended, in the order they did."""
    ended: list[Exited] = []
    failed_s = interrupted_s = float("inf")
    while len(ended) < num_workers:
        for report in engine.reports(timeout_s=0.05):
            if isinstance(report, AgentLost):
                sys.stderr.write(f"warning: {report.how} (pid {report.pid})\n")
            elif isinstance(report, CannotStart):
                raise TrainingError(f"worker {report.index} cannot be started: {report.reason}")
            elif isinstance(report, Exited):
                ended.append(report)
                if report.status and failed_s == float("inf"):
                    failed_s = time.monotonic()
        now_s = time.monotonic()
        if was_interrupted():
            if interrupted_s == float("inf"):
                interrupted_s = now_s
                for index in range(num_workers):
                    engine.signal(index, "interrupt")
            if now_s - interrupted_s > INTERRUPT_GRACE_S:
                break
        elif any(r.status not in (0, CONSEQUENCE) for r in ended) or now_s - failed_s > CAUSE_WAIT_S:
            break
    return ended


def find_cause(ended: Sequence[Exited]) -> Exited | None:
    """Return the exit to report of those given in their order: a failure before the loss of a peer."""
    failures = [report for report in ended if report.status]
    causes = [report for report in failures if report.status != CONSEQUENCE]
    # With nothing but losses, one that came to its end while the others needed it is to blame.
    leavers = [report for report in ended if not report.status] if failures else []
    return next(iter(causes or leavers or failures), None)


def _describe(failure: Exited, text: str) -> str:
    if failure.status == CONSEQUENCE:
        return f"worker {failure.index} could not continue: {text}; all were ended"
    if failure.status == 0:
        return f"worker {failure.index} came to its end while the others still needed it; they were ended"
    return f"worker {failure.index} {failure.describe()}; the others were ended"
