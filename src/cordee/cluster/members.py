"""Who takes part in a run, who is silent, who failed first, and who forms the next generation: decided without I/O.

The roster has the processes of every kind of run. `Membership` is for teams.

A worker that is killed or frozen is a loss: the others go on without it. One that raises or exits by itself is a
failure that would come again: the run ends. A failing worker makes others fail: they lose a peer in the middle of
an exchange and say so, often before the failing one was heard of. `culprit` tells the cause from the consequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import msgspec

from cordee.cluster.control import check_remote
from cordee.cluster.engine import Exited, Started
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id

WORKER_PREFIX = "worker-"
SETTLING_S = 1.0  # how long the first sign of a failure waits for what the workers themselves say of it

# starting: a process was asked for. preparing: it has said hello and builds its parts. ready: it waits for a
# generation. member: it trains. finished, gone, left: it does not take part any more.
Phase = Literal["starting", "preparing", "ready", "member", "finished", "gone", "left"]
ACTIVE: tuple[Phase, ...] = ("starting", "preparing", "ready", "member")


@dataclass(frozen=True)
class Trouble:
    """Why a worker cannot go on. A consequence is the loss of a peer, which was somebody else's doing."""

    worker_index: int
    step: int
    reason: str
    traceback: str = ""
    is_consequence: bool = False
    is_final: bool = True  # nothing better will be heard of it; an exit is followed by the worker's own account
    at_s: float = 0.0

    def describe(self) -> str:
        return f"worker {self.worker_index} {self.reason} (in step {self.step + 1})"


@dataclass
class Record:
    """What is known of one worker."""

    state: Phase = "starting"
    step: int = 0  # steps it has taken
    heard_s: float = 0.0
    ready_step: int = -1  # when it became ready: steps it can go on from; -1 for none
    has_dropped: bool = False
    reason: str = ""  # why its last generation ended, unless it was asked to halt
    is_leaving: bool = False
    fate: str = ""  # why it is being killed
    is_external: bool = False  # somebody else started it: it is not replaced, and its troubles are its own
    is_remote: bool = False  # on another host: the run directory is not there, nor can its process be looked at
    is_away: bool = False  # frozen and given up, but not killed: it may come back


@dataclass
class Membership:
    """The workers of a run, from the first sign of life to the last."""

    num_workers: int  # how many there are to be
    failure_timeout_s: float
    startup_timeout_s: float
    started_s: float
    min_workers: int = 1
    is_elastic: bool = False  # every worker has all that is needed to go on, so that a team can lose some
    generation: int = 0
    broken: tuple[int, str] = (0, "")  # the last generation that cannot go on as it is, and why
    told_step: int = 0  # of the last step that was reported as such
    records: dict[int, Record] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    losses: list[Trouble] = field(default_factory=list)  # not yet taken care of

    def __post_init__(self) -> None:
        for index in range(0 if self.records else self.num_workers):
            self.expect(index, self.started_s)

    def expect(self, index: int, now_s: float) -> None:
        """Take note that a process for worker `index` was asked for, in the place of an earlier one if there was."""
        step = self.records[index].step if index in self.records else 0
        self.records[index] = Record(heard_s=now_s, step=step)

    def may_register(self, index: int) -> bool:
        """Whether a process that says it is this worker is expected: it was asked for, or comes back."""
        return self.records[index].state == "starting" or self.records[index].is_away

    def register(self, index: int, now_s: float) -> None:
        record = self.records[index]
        record.state, record.heard_s, record.is_away, record.fate = "preparing", now_s, False, ""

    def hear(self, index: int, now_s: float, step: int | None = None) -> None:
        """Take note of a sign of life."""
        record = self.records[index]
        record.heard_s = now_s
        if step is not None:
            record.step = max(record.step, step)

    def wait(self, index: int, step: int, *, has_dropped: bool, reason: str = "") -> None:
        """Take note that a worker waits for a generation, with `step` steps taken or -1 for nothing at all."""
        record = self.records[index]
        if record.state == "member" and reason:
            self.broken = (self.generation, f"worker {index}: {reason}")
        record.state, record.ready_step, record.has_dropped, record.reason = "ready", step, has_dropped, reason
        record.step = max(record.step, step)

    def finish(self, index: int) -> None:
        record = self.records[index]
        record.state = "left" if record.is_leaving else "finished"

    def report(self, trouble: Trouble) -> None:
        """Take note of a failure; the first of each worker counts, but its own account more than its exit."""
        if self.records[trouble.worker_index].is_external:
            self.exit(trouble.worker_index, trouble.reason, trouble.at_s, is_killed=True)
            return
        for at, known in enumerate(self.troubles):
            if known.worker_index == trouble.worker_index:
                if trouble.is_final and not known.is_final:
                    self.troubles[at] = replace(trouble, at_s=known.at_s)
                return
        self.troubles.append(trouble)

    def exit(self, index: int, how: str, now_s: float, *, is_killed: bool = False) -> None:
        """Take note that the process of a worker has ended. One that was killed is a loss, others a failure."""
        record = self.records[index]
        if record.state not in ACTIVE:
            return
        trouble = Trouble(index, record.step, record.fate or how, is_final=is_killed, at_s=now_s)
        if record.state == "member":
            self.broken = (self.generation, f"worker {index} {trouble.reason}")
        record.state = "gone"
        if not is_killed and not record.is_external:
            self.report(trouble)
        elif any(known.worker_index == index for known in self.troubles):
            pass  # it had said what was wrong
        elif not any(other.state == "finished" for other in self.records.values()):
            self.losses.append(trouble)  # nobody finishes before all have done their last step

    def check_silence(
        self,
        now_s: float,
        is_working: Callable[[int], bool] = lambda index: False,
        is_stopped: Callable[[int], bool] = lambda index: False,
    ) -> list[int]:
        """Return the workers that were not heard of for too long: they are to be killed, which makes them a loss."""
        silent = []
        for index, record in self.records.items():
            if record.state not in ACTIVE or record.fate:
                continue
            silent_s = now_s - record.heard_s
            silence = judge_silence(
                silent_s,
                (self.failure_timeout_s, self.startup_timeout_s),
                has_joined=record.state != "starting",
                is_working=partial(is_working, index),
                is_stopped=partial(is_stopped, index),
            )
            if silence == "busy":
                record.heard_s = now_s
            elif silence != "none":
                what = "is out of reach: no sign of life" if record.is_remote else "is frozen: no sign of life"
                what = "did not start" if silence == "late" else what
                record.fate = f"{what} for {silent_s:.1f} s"
                silent.append(index)
        return silent

    def take_losses(self) -> list[Trouble]:
        """Return the workers lost since this was last asked."""
        losses, self.losses = self.losses, []
        return losses

    @property
    def active(self) -> list[int]:
        """The workers that are or will be members, but those that are leaving."""
        return [i for i, record in self.records.items() if record.state in ACTIVE and not record.is_leaving]

    def is_free(self, index: int) -> bool:
        """Whether a new worker may have this number."""
        known = self.records.get(index)
        return known is None or (known.state in ("gone", "left") and not known.is_away)

    @property
    def num_pending(self) -> int:
        """How many are on their way to being ready for the first time."""
        return sum(self.records[i].state in ("starting", "preparing") for i in self.active)

    @property
    def members(self) -> list[int]:
        """Those who train in the present generation."""
        return [index for index, record in self.records.items() if record.state == "member"]

    @property
    def has_remote(self) -> bool:
        """Whether a worker of another host takes part, or has just been lost."""
        return any(record.is_remote for record in self.records.values())

    @property
    def is_complete(self) -> bool:
        """Whether a generation is training."""
        return bool(self.members)

    @property
    def why_broken(self) -> str:
        """Why the present generation cannot go on; nothing if it can."""
        generation, reason = self.broken
        return reason if generation == self.generation > 0 else ""

    def dismiss_late(self) -> list[int]:
        """Return those who were to join a run that has ended for others: they are of no use any more."""
        if not any(record.state == "finished" for record in self.records.values()):
            return []
        late = [i for i, record in self.records.items() if record.state in ("starting", "preparing", "ready")]
        for index in late:
            self.records[index].state = "left"
        return late

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended well."""
        states = {record.state for record in self.records.values()}
        return "finished" in states and not states & set(ACTIVE)

    @property
    def needs_pause(self) -> bool:
        """Whether the members should stop for a moment: somebody waits to join, or wants to leave."""
        states = {(record.state, record.is_leaving) for record in self.records.values()}
        has_members, has_heirs = bool(self.members), ("ready", False) in states
        return (has_members and has_heirs) or (
            ("member", True) in states and (("member", False) in states or self.is_too_small)
        )

    @property
    def dispensable(self) -> list[int]:
        """Those who wait, want to leave, and may: somebody who stays is as far as they are, or nobody is to stay."""
        stays = [r.ready_step for r in self.records.values() if r.state == "ready" and not r.is_leaving]
        furthest = max(stays, default=-1)
        leaving = [(i, r) for i, r in self.records.items() if r.state == "ready" and r.is_leaving]
        return [i for i, record in leaving if record.ready_step <= furthest or self.is_too_small]

    def next_members(self) -> list[int] | None:
        """Return who forms the next generation; None while it is too early for one.

        Those of the run's own host come first, and of those the ones that are furthest.
        """
        leaves = self.dispensable
        ready = [i for i, record in self.records.items() if record.state == "ready" and i not in leaves]
        if self.is_complete or not ready:
            return None
        has_survivor = any(self.records[i].ready_step >= 0 for i in ready)
        is_whole_needed = self.generation == 0 or not has_survivor or not self.is_elastic
        if (is_whole_needed and self.num_pending) or len(ready) < self.min_workers:
            return None
        if not self.is_elastic and len(ready) != self.num_workers:
            return None
        if all(self.records[i].is_remote for i in ready):
            return None  # the first writes checkpoints, which is of use on the run's own host alone
        return sorted(ready, key=lambda i: (self.records[i].is_remote, -self.records[i].ready_step, i))

    @property
    def is_too_small(self) -> bool:
        """Whether those left are fewer than can go on, and nobody is on the way."""
        if all(self.records[i].is_remote for i in self.active):
            return True
        return len(self.active) < (self.min_workers if self.is_elastic else self.num_workers)

    def form(self, members: list[int]) -> None:
        """Begin the next generation."""
        self.generation += 1
        for index in members:
            self.records[index].state = "member"

    @property
    def step(self) -> int:
        """The highest step that any worker is known to have taken."""
        return max([self.told_step, *(record.step for record in self.records.values())])

    def culprit(self, now_s: float) -> Trouble | None:
        """Return the failure to report, once it is known: a cause at once, a consequence after some time."""
        causes = [trouble for trouble in self.troubles if not trouble.is_consequence]
        if causes:
            first = min(causes, key=lambda trouble: trouble.at_s)
            if first.traceback:
                return first
            if now_s - first.at_s <= SETTLING_S and not self._has_all_accounts:
                return None
            # What it was last heard of is old; those who lost it in the same step know better.
            return replace(first, step=max([self.step, *(trouble.step for trouble in self.troubles)]))
        is_anybody_left = any(record.state in ACTIVE for record in self.records.values())
        limit_s = SETTLING_S + (self.failure_timeout_s if is_anybody_left else 0.0)
        if self.troubles and now_s - self.troubles[0].at_s > limit_s:
            return self.troubles[0]
        return None

    @property
    def _has_all_accounts(self) -> bool:
        """Whether every worker has ended well, waits, or said what is wrong: nobody's account is awaited."""
        known = {trouble.worker_index for trouble in self.troubles if trouble.is_final}
        return all(
            index in known or record.state in ("finished", "left", "ready") for index, record in self.records.items()
        )


@dataclass
class ProcessRecord:
    """What is known of one process."""

    role: str
    index: int
    pid: int
    incarnation: int
    heard_s: float
    address: str = ""  # of a server
    public: str = ""  # the same, for workers of other hosts
    step: int = 0
    is_done: bool = False
    num_events: int = 0  # heard of it
    is_leaving: bool = False  # gets no more work: it was told to go, or the run is to have fewer
    has_left: bool = False  # was let go


def member_name(role: str, index: int, replica: int = 0) -> str:
    return f"{role}-{index}" + (f".{replica}" if replica else "")


class Process(msgspec.Struct, kw_only=True):
    """A process of a run, from when it was asked for, or came by itself, until it has ended."""

    role: str
    index: int  # among those of its role
    replica: int = 0  # of a server: those of one index have the same parameters
    number: int = -1  # at the engine; -1 for an external worker, which somebody else started
    incarnation: int = 0  # at the engine
    pid: int = 0  # on its own host; 0 until it is known
    since_s: float = 0.0  # when it was taken
    is_remote: bool = False  # on another host: nothing is known of it but what it says
    is_away: bool = False  # given up, but not killed: it may come back

    @property
    def name(self) -> str:
        return member_name(self.role, self.index, self.replica)

    @property
    def is_external(self) -> bool:
        return self.number < 0


class Roster(msgspec.Struct):
    """The processes of a run: those that were asked for, and external workers. Written down by the coordinator.

    An external worker of the run's own host is watched by its process. Nobody takes the place of one that is lost.
    """

    processes: dict[str, Process] = {}  # by name

    def add(self, process: Process) -> None:
        """Take note of a process, in the place of an earlier one of its name if there was."""
        self.processes[process.name] = process

    def remove(self, name: str) -> None:
        """Forget a process, which may not be there."""
        self.processes.pop(name, None)

    def is_external(self, name: str) -> bool:
        return name in self.processes and self.processes[name].is_external

    def pid_of(self, name: str) -> int:
        """Return the process on this host; 0 if there is none that is known."""
        process = self.processes.get(name)
        return process.pid if process is not None and not process.is_remote else 0

    @property
    def started(self) -> list[Process]:
        """Those that were asked for, and have not ended."""
        return [process for process in self.processes.values() if not process.is_external]

    @property
    def local_workers(self) -> list[Process]:
        """The external workers of this host."""
        return [process for process in self.processes.values() if process.is_external and not process.is_remote]

    @property
    def remote_workers(self) -> list[Process]:
        """The external workers of other hosts."""
        return [process for process in self.processes.values() if process.is_remote]

    def take(self, report: Started | Exited) -> Process | None:
        """Take a report of the engine; return the process that has ended, and forget it."""
        for process in self.started:
            if (process.number, process.incarnation) == (report.index, report.incarnation):
                if isinstance(report, Exited):
                    return self.processes.pop(process.name)
                process.pid = report.pid
        return None

    def take_ended(self, is_alive: Callable[[int], bool]) -> list[Process]:
        """Return the external workers of this host whose processes have ended, and forget them."""
        ended = [process for process in self.local_workers if not is_alive(process.pid)]
        for process in ended:
            self.remove(process.name)
        return ended


Silence = Literal["none", "busy", "late", "frozen"]


def judge_silence(
    silent_s: float,
    timeouts: tuple[float, float],
    *,
    has_joined: bool,
    is_working: Callable[[], bool],
    is_stopped: Callable[[], bool],
) -> Silence:
    """Return what it means that a process was not heard of for so long; `timeouts` are to fail, and to start.

    One that gets processor time is too busy to speak, not frozen: it has as much time again. One that has not joined
    has long, unless a signal stopped it.
    """
    failure_timeout_s, startup_timeout_s = timeouts
    if silent_s <= failure_timeout_s:
        return "none"
    if has_joined:
        return "busy" if is_working() else "frozen"
    if is_stopped():
        return "frozen"
    return "late" if silent_s > startup_timeout_s else "none"


def check_join_request(wish: JoinRequest, public: str) -> bool:
    """Return whether who wants to join is on another host.

    Raises JobError if it cannot take part in a run that listens for other hosts at `public`, or nowhere.
    """
    is_remote = wish.host_id != host_id()
    if is_remote:
        check_remote(wish, public)
    return is_remote
