"""The launcher's side of a run with several workers: start them, look after them, report how it ended."""

from __future__ import annotations

import logging
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cordee.cluster.coordinator import Coordinator
from cordee.cluster.fork_server import Exited
from cordee.cluster.local import LocalEngine, describe_exit
from cordee.cluster.membership import Membership, Trouble
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import COORDINATION
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import TrainingError
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.worker import WorkerOrder

log = logging.getLogger("cordee.team_run")

# Importing torch in the fork server takes seconds on a busy machine, and loading the data comes after.
STARTUP_TIMEOUT_S = 120.0
TICK_S = 0.05


class TeamRun:
    """One run with local workers, seen from the launcher."""

    def __init__(self, job: Job, directory: RunDirectory, monitor: Monitor, should_stop: Callable[[], bool]) -> None:
        self._job = job
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop
        self._summaries: dict[int, Summary] = {}
        self._membership = Membership(
            num_workers=job.strategy.workers,
            failure_timeout_s=job.cluster.failure_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            started_s=time.monotonic(),
        )

    def lead(self, engine: LocalEngine, *, resume: bool) -> Summary:
        """Train on the engine's workers and return the first worker's summary.

        Raises TrainingError that names the worker that failed first, its step and its error. Ending the workers
        that are left is the engine's part.
        """
        with tempfile.TemporaryDirectory(prefix="cordee-") as folder:
            return self._lead(engine, Path(folder), resume=resume)

    def _lead(self, engine: LocalEngine, folder: Path, *, resume: bool) -> Summary:
        run_id = secrets.token_hex(8)
        server_keys, (client_keys,) = make_keys()
        speaker = Speaker(run=run_id, name="coordinator", incarnation=time.time_ns())
        with ServerChannel("tcp://127.0.0.1:*", speaker, Codec(COORDINATION), server_keys) as channel:
            for index in range(self._job.strategy.workers):
                order = WorkerOrder(
                    run_dir=str(self._directory.path.absolute()),
                    run_id=run_id,
                    worker_index=index,
                    num_workers=self._job.strategy.workers,
                    address=channel.address,
                    keys=client_keys.to_text(),
                    store=str(folder / "store"),
                    resume=resume,
                    failure_timeout_s=self._job.cluster.failure_timeout_s,
                    join_timeout_s=STARTUP_TIMEOUT_S,
                )
                log_file = self._directory.worker_log(index)
                engine.start(index, "cordee.worker:main", msgspec.to_builtins(order), {}, log_file)
            self._attend(engine, Coordinator(channel, self._membership, self._take_event))
        return self._settle()

    def _attend(self, engine: LocalEngine, coordinator: Coordinator) -> None:
        """Look after the workers until all have ended well; raise for the one that did not."""
        is_asked_to_stop = False
        while not self._membership.is_over:
            coordinator.serve(TICK_S)
            now_s = time.monotonic()
            for report in engine.reports():
                if isinstance(report, Exited):
                    self._membership.exit(report.index, describe_exit(report), now_s, is_killed=report.status < 0)
            for index in self._membership.check_silence(now_s, engine.is_working):
                engine.signal(index, signal.SIGKILL)
            if self._should_stop() and self._membership.is_complete and not is_asked_to_stop:
                is_asked_to_stop = True
                coordinator.direct("stop", "interrupted")
            if (culprit := self._membership.culprit(now_s)) is not None:
                self._fail(culprit)

    def _take_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "progress":
            self._monitor.progress(step=fields["step"], loss=fields["loss"])
        elif kind == "outcome":
            self._summaries[fields["worker"]] = msgspec.convert(fields["summary"], Summary)
        else:
            self._monitor.emit(kind, **fields)

    def _fail(self, trouble: Trouble) -> None:
        log_file = self._directory.worker_log(trouble.worker_index)
        self._monitor.emit("worker_lost", worker=trouble.worker_index, step=trouble.step, reason=trouble.reason)
        if trouble.traceback:
            log.error("worker %d failed:\n%s", trouble.worker_index, trouble.traceback)
        raise TrainingError(f"{trouble.describe()}; its log is {log_file}")

    def _settle(self) -> Summary:
        """Return the summary, having checked that all workers ended with the same weights."""
        hashes = {summary.weights_sha256 for summary in self._summaries.values()}
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights: {sorted(map(str, hashes))}")
        return self._summaries[0]
