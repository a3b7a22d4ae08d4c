"""The workers of a team: starts them, takes those that come by themselves, changes how many there are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from cordee.cluster.control import NotYetError
from cordee.cluster.coordinator import MemberStarter
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord, check_join_request
from cordee.communication.messages import JoinRequest
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.monitoring import events
from cordee.runs.team.member_channel import TeamChannel
from cordee.runs.team.membership import Membership
from cordee.runs.team.state import WorkersState


class Workers:
    """Those that take part in one run. `check_size` raises JobError for numbers that the strategy cannot do."""

    def __init__(
        self,
        job: Job,
        launcher: LauncherLink,
        channel: TeamChannel,
        starter: MemberStarter,
        state: WorkersState,
        check_size: Callable[[int], None],
    ) -> None:
        self._job = job
        self._launcher = launcher
        self._channel = channel
        self._starter = starter
        self._state = state
        self._check_size = check_size
        starter.data = state.data

    @property
    def run_dir(self) -> Path:
        return self._starter.run_dir

    @property
    def threads(self) -> int:
        """With how many each worker computes; 0 is what the job says."""
        return self._state.threads

    @property
    def is_reform_wanted(self) -> bool:
        """Whether the same workers are to form another generation, to continue with other numbers of threads."""
        return self._state.is_reform_wanted

    def record_formed(self) -> None:
        """Record that a generation is formed with the numbers that are wanted."""
        self._state.is_reform_wanted = False

    def log_file(self, index: int) -> Path:
        return self._starter.log_file(self._membership.of(index))

    def start(self, index: int) -> None:
        """Start a process for a worker, and listen to no earlier one."""
        self._starter.start("worker", index)

    def kill(self, index: int) -> None:
        """Have the process of a worker killed, if the engine has started it."""
        record = self._membership.of(index)
        if not record.is_external:
            self._launcher.signal(record.number, "kill")

    def scale(self, num_workers: int, threads: int = 0, reason: str = "") -> str:
        """Change the number of workers: start new ones, or let the last ones go. Returns at once what will happen.

        With `threads` their number for each worker is changed, too. Raises JobError for what cannot be.
        """
        membership, job = self._membership, self._job
        if threads and job.training.reproducible:
            raise JobError("training.reproducible = true fixes the number of threads: leave --threads out")
        if not membership.is_elastic:
            raise JobError(f"strategy '{job.strategy.name}' has a fixed number of workers: end the run and --resume it")
        if num_workers < job.cluster.min_workers:
            raise JobError(f"cluster.min_workers = {job.cluster.min_workers} is more than {num_workers}")
        self._check_size(num_workers)
        self._starter.check_room(num_workers)
        before = membership.staying_workers
        for record in before[num_workers:]:
            record.is_leaving = True
        for _ in range(num_workers - len(before)):
            self.start(self._unused_number())
        membership.num_workers = num_workers
        if threads:
            self._state.threads, self._state.is_reform_wanted = threads, True
        self._launcher.emit(
            events.Scale(
                workers=num_workers,
                before=len(before),
                threads=threads or None,
                step=membership.step,
                reason=reason or None,
            )
        )
        reach("workers.scaled")
        each = f", {threads} threads each" if threads else ""
        return f"from {len(before)} to {num_workers} workers{each}"

    def admit(self, request: JoinRequest, public: str) -> str:
        """Take a worker that somebody else started; return what it is told. Raises JobError if it cannot be taken.

        `public` is where the run listens for other hosts.
        """
        membership, data = self._membership, self._state.data
        if not membership.is_elastic:
            raise JobError(f"strategy '{self._job.strategy.name}' has a fixed number of workers: nobody can join it")
        is_remote = check_join_request(request, public)
        if is_remote and not (data and membership.generation):
            raise NotYetError("the run is still starting: try again when it trains")
        self._check_size(len(membership.active) + 1)
        return self._starter.admit(self._unused_number(), request)

    def mark_away(self, record: MemberRecord) -> None:
        """Continue without a silent worker that nobody takes the place of; when it can be heard it may join again."""
        self._membership.exit(record.index, record.loss_reason, time.monotonic(), is_killed=True)
        self._membership.lose(record, is_away=True)
        self._channel.fence(record)

    @property
    def _membership(self) -> Membership:
        return self._channel.members

    def _unused_number(self) -> int:
        return next(index for index in itertools.count() if self._membership.is_free(index))
