"""The workers of a team: starts them, takes those that come by themselves, changes how many there are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cordee.cluster.control import NotYetError
from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.engine import ProcessSpec
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import WORKER_PREFIX, Membership, Process, Roster, check_join_request
from cordee.cluster.processes import ProcessorWatch, is_stopped
from cordee.communication.messages import JoinRequest
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.monitoring import events
from cordee.runs.team.member_channel import MemberChannel
from cordee.runs.team.state import WorkersState


class Workers:
    """Those that take part in one run. `check_size` raises JobError for numbers that the strategy cannot do."""

    def __init__(
        self,
        order: CoordinatorSpec,
        job: Job,
        launcher: LauncherLink,
        channel: MemberChannel,
        memory: WorkersState,
        addresses: Addresses,
        check_size: Callable[[int], None],
    ) -> None:
        self.run_dir = Path(order.run_dir)
        self._job = job
        self._launcher = launcher
        self._channel = channel
        self._memory = memory
        self._addresses = addresses
        self._check_size = check_size
        self._watch = ProcessorWatch()
        self._order = order

    def _tell(self, process: Process) -> MemberSpec:
        order = self._order
        return order.tell(self._job, self._addresses, process, resume=order.resume, store=order.launcher.folder)

    @property
    def roster(self) -> Roster:
        return self._memory.roster

    @property
    def threads(self) -> int:
        """With how many each worker computes; 0 is what the job says."""
        return self._memory.threads

    @property
    def is_reform_wanted(self) -> bool:
        """Whether the same workers are to form another generation, to go on with other numbers of threads."""
        return self._memory.is_reform_wanted

    def note_formed(self) -> None:
        """Take note that a generation is formed with the numbers that are wanted."""
        self._memory.is_reform_wanted = False

    def note_data(self, fingerprint: str) -> None:
        """Take note of what is known of the data: workers of other hosts are told."""
        self._memory.data = fingerprint

    def log_file(self, index: int) -> Path:
        return self.run_dir / "logs" / f"worker-{index}.log"

    def start(self, index: int) -> None:
        """Start a process for a worker, and listen to no earlier one."""
        self._expect(index)
        process = Process(role="worker", index=index, number=index)
        told = self._tell(process)
        argument, log = msgspec.to_builtins(told), str(told.log_file)
        spec = ProcessSpec.new(index, "cordee.runs.team.worker:main", argument, log=log)
        self._launcher.start(spec)
        process.incarnation = spec.incarnation
        self.roster.add(process)

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
        before = membership.active
        for index in sorted(before, key=lambda i: (membership.records[i].is_remote, i))[num_workers:]:
            membership.records[index].is_leaving = True
        for _ in range(num_workers - len(before)):
            self.start(self._unused_number())
        membership.num_workers = num_workers
        if threads:
            self._memory.threads, self._memory.is_reform_wanted = threads, True
        self._launcher.emit(
            events.Scale(
                workers=num_workers,
                before=len(before),
                threads=threads or None,
                step=membership.step,
                reason=reason or None,
            )
        )
        reach("staff.scaled")
        each = f", {threads} threads each" if threads else ""
        return f"from {len(before)} to {num_workers} workers{each}"

    def enlist(self, wish: JoinRequest) -> str:
        """Take a worker that somebody else started; return what it is told. It takes part when it has said hello.

        Raises JobError if it cannot be taken.
        """
        membership, memory = self._membership, self._memory
        if not membership.is_elastic:
            raise JobError(f"strategy '{self._job.strategy.name}' has a fixed number of workers: nobody can join it")
        is_remote = check_join_request(wish, self._addresses.public)
        if is_remote and not (memory.data and membership.generation):
            raise NotYetError("the run is still starting: try again when it trains")
        self._check_size(len(membership.active) + 1)
        index = self._unused_number()
        self._expect(index)
        record = membership.records[index]
        record.is_external, record.is_remote = True, is_remote
        process = Process(role="worker", index=index, pid=wish.pid, is_remote=is_remote)
        self.roster.add(process)
        own = self._order.tell_external(self._tell(process), self._addresses, memory.data, is_remote=is_remote)
        reach("staff.enlisted")
        return msgspec.json.encode(own).decode()

    def is_working(self, index: int) -> bool:
        """Whether a worker is getting processor time. Of those on other hosts nobody can tell: they are not."""
        return self._watch.is_working(self._pid_of(index))

    def is_stopped(self, index: int) -> bool:
        """Whether a signal has stopped a process of this host."""
        return is_stopped(self._pid_of(index))

    def _pid_of(self, index: int) -> int:
        return self.roster.pid_of(f"{WORKER_PREFIX}{index}")

    def set_aside(self, index: int) -> None:
        """Go on without a frozen worker that nobody takes the place of; when it wakes up it may join again."""
        record = self._membership.records[index]
        self._channel.fence(index)
        self._membership.exit(index, record.fate, time.monotonic(), is_killed=True)
        record.is_away = True

    @property
    def _membership(self) -> Membership:
        return self._channel.membership

    def _expect(self, index: int) -> None:
        """Make room for another process of a worker."""
        self._channel.fence(index)
        self._membership.expect(index, time.monotonic())
        self.roster.remove(f"{WORKER_PREFIX}{index}")

    def _unused_number(self) -> int:
        return next(index for index in itertools.count() if self._membership.is_free(index))
