"""What somebody with the control file of a served run may want: another number of workers, or to be one."""

from __future__ import annotations

import time

import msgspec

from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import check_join_request
from cordee.communication.messages import JoinRequest, Scale
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.process_starter import ProcessStarter


class ControlRequests:
    """Carries out wishes, one at a time. `data` is what is known of the run's data, for workers of other hosts."""

    def __init__(
        self, job: Job, launcher: LauncherLink, dispatcher: Dispatcher, starter: ProcessStarter, data: str
    ) -> None:
        self._job = job
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._starter = starter
        self._data = data

    def handle_request(self, wish: Scale | JoinRequest) -> str:
        """Do what is wanted; return what is said to who wants it. Raises JobError."""
        if isinstance(wish, JoinRequest):
            is_remote = check_join_request(wish, self._starter.public)
            order = self._starter.enlist(wish.pid, time.monotonic(), self._data, is_remote=is_remote)
            return msgspec.json.encode(order).decode()
        if wish.threads:
            raise JobError("workers of parameter servers keep their threads: leave --threads out")
        return self._scale(wish.num_workers)

    def _scale(self, num_workers: int) -> str:
        """Start workers, or have the last ones leave. Returns at once what will happen."""
        dispatcher, min_workers = self._dispatcher, self._job.cluster.min_workers
        if num_workers < min_workers:
            raise JobError(f"cluster.min_workers = {min_workers} is more than {num_workers}")
        before = dispatcher.staying(self._starter.workers)
        for name in before[num_workers:]:
            if name not in dispatcher.process_records:
                raise JobError(f"{name} is still starting: try again in a moment")
            dispatcher.process_records[name].is_leaving = True
        for _ in range(num_workers - len(before)):
            self._starter.start_worker()
        self._launcher.emit("scale", workers=num_workers, before=len(before), step=dispatcher.progress.step)
        return f"from {len(before)} to {num_workers} workers"
