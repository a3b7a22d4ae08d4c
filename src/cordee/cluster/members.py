"""The registry of members: who takes part in a run, who is silent, and who has ended. Decided without I/O."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from cordee.cluster.control import check_remote
from cordee.cluster.engine import Exited, ProcessReport, Started, Working
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S
from cordee.communication.messages import Directive, JoinRequest
from cordee.communication.this_host import host_id
from cordee.core.errors import StorageError

WORKER_PREFIX = "worker-"
REPLACED = "replaced"  # why a process that was taken for lost is not let in again
NOT_JOINED, UNKNOWN = "not-joined", "unknown-member"  # why messages of others than members are refused
GIVEN_UP = ("stale-incarnation", NOT_JOINED, UNKNOWN)  # what a member that was given up hears

MOST_RETURNS = 1 << 20  # of one process: its incarnations are below those of the process that takes its place
MOST_TIMEOUTS = 4  # that a process of another host may be silent while its agent says that it works

# starting: a process was asked for, or is expected. joined: the process has said so. In a team, ready: it waits for a
# generation; member: it trains. finished, gone, left: it does not take part any more.
Phase = Literal["starting", "joined", "ready", "member", "finished", "gone", "left"]
ACTIVE: tuple[Phase, ...] = ("starting", "joined", "ready", "member")


class MemberRecord(msgspec.Struct, kw_only=True):
    """What is known of one member: its process, from when it was asked for or came by itself, and what it has said."""

    role: str = "worker"
    index: int  # among those of its role
    replica: int = 0  # of a server: those of one index have the same parameters
    serial: int = 0  # counts the processes that were expected, in the order in which they were
    # Its process.
    number: int = -1  # at the engine; -1 for an external worker, which somebody else started
    started: int = 0  # incarnation at the engine; 0 when the process has ended
    pid: int = 0  # on its own host; 0 until it is known, and when the process has ended
    is_remote: bool = False  # on another host: nothing is known of it but what it, and its agent, say
    worked_s: float = -math.inf  # when its agent last said that it had processor time
    is_stopped: bool = False  # what its agent says
    # What it has said.
    phase: Phase = "starting"
    incarnation: int = 0  # of what it says; 0 until it has joined
    fenced: int = 0  # incarnations up to this one are refused
    host: str = ""
    host_id: str = ""
    storage_problem: str = ""  # why it cannot read the storage of the run
    address: str = ""  # of a server
    public: str = ""  # the same, for workers of other hosts
    heard_s: float = 0.0  # the last sign of life, or when it was asked for
    step: int = 0  # that it has got to
    num_acknowledged: int = 0  # of its numbered messages
    is_leaving: bool = False  # it was told to go, or the run is to have fewer
    is_released: bool = False  # it was told that it may go
    is_away: bool = False  # given up, but not killed: it may come back
    loss_reason: str = ""  # why it is being killed, or was given up
    # In a team: what it waits with, and what it was told.
    ready: int = 0  # the number of its last `Ready`
    ready_step: int = -1  # steps it can continue from; -1 for none
    has_dropped: bool = False
    reason: str = ""  # why its last generation ended, unless it was asked to halt
    answer: Directive | None = None  # to the last `Ready` that was answered

    @property
    def name(self) -> str:
        return member_name(self.role, self.index, self.replica)

    @property
    def is_external(self) -> bool:
        """Whether somebody else started it: it is not replaced, and its failures are its own."""
        return self.number < 0

    @property
    def is_active(self) -> bool:
        """Whether it takes part, or is on its way."""
        return self.phase in ACTIVE

    @property
    def is_done(self) -> bool:
        """Whether it has said goodbye."""
        return self.phase in ("finished", "left")

    @property
    def may_send(self) -> bool:
        """Whether it has joined and is not fenced. The last words of a process that has ended still count."""
        return self.incarnation > self.fenced

    @property
    def may_join(self) -> bool:
        """Whether a process that says that it is this member is expected: it was asked for, or comes back."""
        return self.phase == "starting" or self.is_away

    @property
    def place(self) -> str:
        """Where the member runs, to be appended to what is said of it; empty on this host."""
        return f" on host {self.host}" if self.is_remote else ""

    @property
    def local_pid(self) -> int:
        """The process on this host; 0 if there is none that is known."""
        return 0 if self.is_remote else self.pid


class Members(msgspec.Struct, kw_only=True):
    """The members of a run, by name. Written down by the coordinator.

    An external worker of the run's own host is watched by its process. Nobody takes the place of one that is lost.
    """

    failure_timeout_s: float
    startup_timeout_s: float = STARTUP_TIMEOUT_S
    num_started: int = 0  # processes that were asked for
    num_expected: int = 0  # these, and those that came by themselves
    is_staffed: bool = False  # all that the run begins with have joined
    records: dict[str, MemberRecord] = {}

    def expect(self, record: MemberRecord, now_s: float) -> MemberRecord:
        """Expect a process for a member, in the place of an earlier one of its name if there was.

        What the earlier one still says is refused.
        """
        earlier = self.records.get(record.name)
        self.num_expected += 1
        record.serial = self.num_expected
        if earlier is not None:  # its process may still live: on a host that cannot be reached
            record.step, record.fenced = earlier.step, incarnation_of(record.serial, 0) - 1
        record.heard_s = now_s
        self.records[record.name] = record
        return record

    def join(self, record: MemberRecord, incarnation: int, now_s: float) -> None:
        """Record that a process has joined, or has come back."""
        record.phase, record.heard_s, record.is_away, record.loss_reason = "joined", now_s, False, ""
        record.incarnation, record.fenced = incarnation, max(record.fenced, incarnation - 1)
        record.num_acknowledged, record.ready, record.answer = 0, 0, None

    def is_current(self, name: str, incarnation: int) -> bool:
        """Whether a process is the member of that name, and was not given up."""
        record = self.records.get(name)
        return record is not None and record.may_send and record.incarnation == incarnation

    def check_storage(self, url: str) -> None:
        """Raise StorageError when all that the run begins with have joined, and some cannot read its storage."""
        if self.is_staffed or any(record.phase == "starting" for record in self.records.values()):
            return
        self.is_staffed = True
        unable = [record for record in self.records.values() if record.storage_problem and not record.is_external]
        if unable:
            told = "; ".join(f"{record.name} on host {record.host}: {record.storage_problem}" for record in unable)
            raise StorageError(
                f"checkpoint.storage = {url!r} must be readable for every member of the run, and {len(unable)} of "
                f"{len(self.records)} cannot read it: {told}. Mount the folder on that host, or give its processes the "
                "credentials"
            )

    def lose(self, record: MemberRecord, *, is_away: bool = False) -> None:
        """Continue without a member: nothing that it said counts any more. One that is away may join again."""
        record.phase, record.is_away = "gone", is_away
        record.fenced = max(record.fenced, record.incarnation)

    def resume(self, now_s: float, fence: Callable[[str, int], None]) -> None:
        """Continue for another coordinator: nobody could be heard meanwhile, and who was refused still is."""
        for record in self.records.values():
            record.heard_s = now_s
            if record.fenced:
                fence(record.name, record.fenced)

    @property
    def started(self) -> list[MemberRecord]:
        """Those whose processes were asked for, and have not ended."""
        return [record for record in self.records.values() if record.started]

    @property
    def staying_workers(self) -> list[MemberRecord]:
        """The workers that take part, or are on their way, but those that are leaving; the oldest first."""
        workers = [r for r in self.records.values() if r.role == "worker" and r.is_active and not r.is_leaving]
        return sorted(workers, key=lambda record: record.index)

    def take(self, report: ProcessReport, now_s: float) -> MemberRecord | None:
        """Take a report of the engine; return the member whose process has ended."""
        for record in self.started:
            if (record.number, record.started) == (report.index, report.incarnation):
                if isinstance(report, Exited):
                    record.started, record.pid, record.is_away = 0, 0, False
                    return record
                if isinstance(report, Started):
                    record.pid, record.is_remote = report.pid, report.host not in ("", host_id())
                elif isinstance(report, Working):
                    record.worked_s = now_s if report.has_worked else record.worked_s
                    record.is_stopped = report.is_stopped
                else:  # it waits for a slot
                    record.heard_s = now_s
        return None

    def take_ended(self, is_alive: Callable[[int], bool]) -> list[MemberRecord]:
        """Return the external workers of this host whose processes have ended since this was last asked."""
        external = [record for record in self.records.values() if record.is_external and record.local_pid]
        ended = [record for record in external if not is_alive(record.pid)]
        for record in ended:
            record.pid, record.is_away = 0, False
        return ended

    def check_silence(
        self,
        now_s: float,
        is_working: Callable[[int], bool] = lambda pid: False,
        is_stopped: Callable[[int], bool] = lambda pid: False,
    ) -> list[MemberRecord]:
        """Return the members that were not heard of for too long, each once; `loss_reason` says what is wrong with it.

        `is_working` and `is_stopped` look at a process of this host; of others their agents say it. A process that gets
        processor time is too busy to speak, not frozen: it has as much time again. One that has not joined has long,
        unless a signal stopped it.
        """
        silent = []
        for record in self.records.values():
            silent_s, pid = now_s - record.heard_s, record.local_pid
            if silent_s <= self.failure_timeout_s or not record.is_active or record.loss_reason:
                continue
            has_stopped = record.is_stopped if record.is_remote else is_stopped(pid)
            if record.phase != "starting":
                if is_working(pid):
                    record.heard_s = now_s
                    continue
                has_worked = now_s - record.worked_s <= self.failure_timeout_s and not has_stopped
                if has_worked and silent_s <= MOST_TIMEOUTS * self.failure_timeout_s:
                    continue
                what = "is out of reach" if record.is_remote else "is frozen"
                record.loss_reason = f"{what}: no sign of life for {silent_s:.1f} s"
            elif has_stopped:
                record.loss_reason = f"is frozen: no sign of life for {silent_s:.1f} s"
            elif silent_s > self.startup_timeout_s:
                record.loss_reason = f"did not start for {silent_s:.1f} s"
            else:
                continue
            silent.append(record)
        return silent


def incarnation_of(serial: int, num_returns: int) -> int:
    """Return the incarnation of a process that was given up and has come back so often."""
    return serial * MOST_RETURNS + num_returns


def member_name(role: str, index: int, replica: int = 0) -> str:
    return f"{role}-{index}" + (f".{replica}" if replica else "")


def check_join_request(request: JoinRequest, public: str) -> bool:
    """Return whether who wants to join is on another host.

    Raises JobError if it cannot take part in a run that listens for other hosts at `public`, or nowhere.
    """
    is_remote = request.host_id != host_id()
    if is_remote:
        check_remote(request, public)
    return is_remote
