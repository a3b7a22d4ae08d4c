"""The coordinator of a run with several workers: starts them, looks after them, trains around losses, reports.

A process of its own. Each turn it hears what has come in, decides, writes down what it knows and what it is about to
do, and does it; killed at any moment, another goes on from there (`cluster/journal.py`).
"""

from __future__ import annotations

import itertools
import logging
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from cordee.assembly import bare_strategy
from cordee.cluster.control import Control, NotYetError, check_far, write_control
from cordee.cluster.coordinator import Coordinator, State
from cordee.cluster.fork_server import Exited, Started
from cordee.cluster.launcher_link import CoordinatorOrder, LauncherLink, lead_run, open_channel
from cordee.cluster.local import ProcessorWatch, describe_exit, is_alive
from cordee.cluster.membership import ACTIVE, Membership, Record, Trouble
from cordee.cluster.restarts import Restarts
from cordee.cluster.scaling import Scaling
from cordee.cluster.shortage import Lack, Shortage
from cordee.cluster.stragglers import Stragglers
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import COORDINATION, Enlist
from cordee.communication.this_host import find_listening, host_id, own_address
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import JobError, TrainingError
from cordee.meeting import COULD_NOT_MEET
from cordee.monitoring import Summary
from cordee.worker import WorkerOrder

log = logging.getLogger("cordee.coordinator")

# Importing torch in the fork server takes seconds on a busy machine.
STARTUP_TIMEOUT_S = 120.0
TICK_S = 0.02


class TeamOrder(CoordinatorOrder, frozen=True, kw_only=True):
    """What the launcher tells the coordinator. Travels through a private socket."""

    store: str  # folder where the groups find themselves


def main(argument: dict[str, Any]) -> int:
    """Lead the run to its end; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, TeamOrder)
    return lead_run(order, lambda launcher: TeamCoordinator(order, launcher).lead())


class _Recovery(msgspec.Struct, frozen=True):
    """What is under way between a loss and the first step of those left."""

    lost: list[int]
    started_s: float
    reached_step: int  # steps that were taken or under way when the team was lost


class _Memory(msgspec.Struct, kw_only=True):
    """What a coordinator must know to take up where another was."""

    address: str
    public: str = ""  # the address for other hosts, if there is one
    data: str = ""  # what is known of the data, for workers of other hosts
    membership: Membership
    restarts: Restarts
    workers: State = msgspec.field(default_factory=State)
    pids: dict[int, int] = {}
    guests: dict[int, int] = {}  # worker -> pid, of those that somebody else started
    met: list[int] = []  # members of the last generation that took a step
    summaries: dict[int, Summary] = {}
    lost: list[Trouble] = []  # since the last generation was formed
    recovery: _Recovery | None = None  # that is not complete
    num_recoveries: int = 0  # that are
    steps_redone: int = 0
    stall_s: float = 0.0  # that training stood still for checkpoints
    shortage: Shortage | None = None  # too few are left, and others are waited for
    verdict: str | None = None  # why the run ends early although its workers end well
    is_stop_told: bool = False
    is_pause_told: bool = False
    threads: int = 0  # of each worker; 0 is what the job says
    is_reform_wanted: bool = False  # the same workers are to form another generation


class TeamCoordinator:
    """One run with local workers. `lead` takes it from where it is to its end."""

    def __init__(self, order: TeamOrder, launcher: LauncherLink) -> None:
        self._team = order
        self._launcher = launcher
        self._run_dir = Path(order.run_dir)
        self._watch = ProcessorWatch()  # over guests
        job = self._job = Job.load(self._run_dir / "job.toml")
        self._strategy = bare_strategy(job)
        self._is_new = launcher.restored is None
        if launcher.restored is not None:
            self._memory = msgspec.msgpack.decode(launcher.restored, type=_Memory)
            for record in self._memory.membership.records.values():
                record.heard_s = time.monotonic()  # nobody could be heard meanwhile
        else:
            membership = Membership(
                num_workers=job.strategy.workers,
                failure_timeout_s=job.cluster.failure_timeout_s,
                startup_timeout_s=STARTUP_TIMEOUT_S,
                started_s=time.monotonic(),
                min_workers=job.cluster.min_workers,
                is_elastic=self._strategy.requirements(job).is_elastic,
            )
            restarts = Restarts(job.cluster.max_restarts)
            self._memory = _Memory(
                address="tcp://127.0.0.1:*",
                public=find_listening(job.cluster.address).address if job.cluster.address else "",
                membership=membership,
                restarts=restarts,
            )
        self._membership = self._memory.membership
        self._restarts = self._memory.restarts
        self._disbanded = 0  # the last generation whose members were told that it is over; heartbeats tell again
        self._stragglers = Stragglers()  # not remembered: it is soon known again
        self._scaling = Scaling(job, self._scale) if job.cluster.autoscale else None

    def lead(self) -> Summary:
        """Return the summary of the worker that spoke for the last team.

        Raises TrainingError that names the worker that failed first, its step and its error.
        """
        memory, team, job = self._memory, self._team, self._job
        keys = ServerKeys.from_text(team.server_keys)
        with open_channel(memory.address, team.run_id, Codec(COORDINATION), keys, memory.public) as channel:
            memory.address, memory.public = channel.address, channel.public
            self._order = WorkerOrder(
                run_dir=team.run_dir,
                run_id=team.run_id,
                worker_index=0,
                num_workers=job.strategy.workers,
                address=channel.address,
                keys=team.client_keys,
                store=team.store,
                resume=team.resume,
                failure_timeout_s=job.cluster.failure_timeout_s,
                join_timeout_s=STARTUP_TIMEOUT_S,
                host_address=own_address(memory.public) if memory.public else "",
            )
            self._coordinator = Coordinator(
                channel, self._membership, self._take_event, self._scale, self._enlist, memory.workers
            )
            if self._is_new:
                for index in range(job.strategy.workers):
                    self._start(index)
            else:
                self._tell_again()
            self._commit()
            control = Control.of(memory.address, team.run_id, team.control_keys, memory.public)
            write_control(self._run_dir, control)
            while not self._membership.is_over:
                self._coordinator.serve(TICK_S)
                self._look_after()
                self._direct()
                if self._scaling is not None:
                    self._scaling.look(self._membership, self._memory.threads, time.monotonic())
                self._commit()
        return self._settle()

    def _commit(self) -> None:
        """Write down what is known and what follows, then do it."""
        if self._launcher.has_pending or self._coordinator.has_pending:
            self._launcher.commit(msgspec.msgpack.encode(self._memory))
            self._coordinator.flush()

    def _tell_again(self) -> None:
        """Repeat what workers do not ask for again by themselves, and may not have heard."""
        memory, members = self._memory, self._membership.members
        log.warning("taking up at step %d, generation %d", self._membership.step, self._membership.generation)
        memory.is_pause_told = False
        if memory.is_stop_told:
            memory.is_stop_told = not members  # those that have halted are told to finish

    def _worker_log(self, index: int) -> Path:
        return self._run_dir / "logs" / f"worker-{index}.log"

    def _scale(self, num_workers: int, threads: int = 0, reason: str = "") -> str:
        """Change the number of workers: start new ones, or let the last ones go. Returns at once what will happen.

        With `threads` their number for each worker is changed, too.
        """
        membership, job = self._membership, self._job
        if threads and job.training.reproducible:
            raise JobError("training.reproducible = true fixes the number of threads: leave --threads out")
        if not membership.is_elastic:
            raise JobError(f"strategy '{job.strategy.name}' has a fixed number of workers: end the run and --resume it")
        if num_workers < job.cluster.min_workers:
            raise JobError(f"cluster.min_workers = {job.cluster.min_workers} is more than {num_workers}")
        wanted = msgspec.structs.replace(job.strategy, workers=num_workers)
        self._strategy.requirements(msgspec.structs.replace(job, strategy=wanted))  # raises what it cannot do
        before = membership.active
        for index in sorted(before, key=lambda i: (membership.records[i].is_far, i))[num_workers:]:
            membership.records[index].is_leaving = True
        unused = (index for index in itertools.count() if membership.is_free(index))
        for index in itertools.islice(unused, max(0, num_workers - len(before))):
            self._start(index)
        membership.num_workers = num_workers
        if threads:
            self._memory.threads, self._memory.is_reform_wanted = threads, True
        self._launcher.emit(
            "scale",
            workers=num_workers,
            before=len(before),
            threads=threads or None,
            step=membership.step,
            reason=reason or None,
        )
        each = f", {threads} threads each" if threads else ""
        return f"from {len(before)} to {num_workers} workers{each}"

    def _enlist(self, wish: Enlist) -> str:
        """Take a worker that somebody else started; return what it is told. It takes part when it has said hello."""
        membership, job = self._membership, self._job
        if not membership.is_elastic:
            raise JobError(f"strategy '{job.strategy.name}' has a fixed number of workers: nobody can join it")
        is_far = wish.host_id != host_id()
        if is_far:
            check_far(wish, self._memory.public)
            if not self._memory.data or not membership.generation:
                raise NotYetError("the run is still starting: try again when it trains")
        wanted = msgspec.structs.replace(job.strategy, workers=len(membership.active) + 1)
        self._strategy.requirements(msgspec.structs.replace(job, strategy=wanted))  # raises what it cannot do
        index = next(index for index in itertools.count() if membership.is_free(index))
        self._coordinator.fence(index)
        membership.expect(index, time.monotonic())
        record = membership.records[index]
        record.is_guest, record.is_far = True, is_far
        self._memory.pids.pop(index, None)
        self._memory.guests[index] = wish.pid
        own = msgspec.structs.replace(self._order, worker_index=index, launcher_pid=self._team.launcher_pid)
        if is_far:
            own = msgspec.structs.replace(
                own,
                launcher_pid=0,
                address=self._memory.public,
                resume=False,
                job=(self._run_dir / "job.toml").read_text(encoding="utf-8"),
                data=self._memory.data,
            )
        return msgspec.json.encode(own).decode()

    def _start(self, index: int) -> None:
        """Start a process for a worker, and listen to no earlier one."""
        own = msgspec.structs.replace(self._order, worker_index=index)
        self._coordinator.fence(index)
        self._membership.expect(index, time.monotonic())
        self._memory.pids.pop(index, None)
        self._memory.guests.pop(index, None)
        self._launcher.start(index, "cordee.worker:main", msgspec.to_builtins(own), {}, self._worker_log(index))

    def _look_after(self) -> None:
        """Hear who ended, end who is frozen, replace who is lost; raise for what the run cannot go on after."""
        now_s, membership = time.monotonic(), self._membership
        for report in self._launcher.reports():
            if isinstance(report, Started):
                self._memory.pids[report.index] = report.pid
            elif isinstance(report, Exited) and self._memory.pids.get(report.index) == report.pid:
                membership.exit(report.index, describe_exit(report), now_s, is_killed=report.status < 0)
        for index, pid in self._memory.guests.items():
            record = membership.records[index]
            if record.state in ACTIVE and not record.is_far and not is_alive(pid):
                membership.exit(index, "ended without a word", now_s, is_killed=True)
        for index in membership.check_silence(now_s, self._is_working):
            if membership.records[index].is_guest or (membership.is_elastic and not self._restarts.can_replace):
                self._set_aside(index)
            else:
                self._launcher.signal(index, signal.SIGKILL)
        if (culprit := membership.culprit(now_s)) is not None:
            self._fail(culprit)
        for loss in membership.take_losses():
            self._bear(loss)

    def _is_working(self, index: int) -> bool:
        guest = self._memory.guests.get(index)
        if self._membership.records[index].is_far:
            return False  # nobody can look at it
        return self._launcher.is_working(index) if guest is None else self._watch.is_working(guest)

    def _set_aside(self, index: int) -> None:
        """Go on without a frozen worker that nobody takes the place of; when it wakes up it may join again."""
        record = self._membership.records[index]
        self._coordinator.fence(index)
        self._membership.exit(index, record.fate, time.monotonic(), is_killed=True)
        record.is_away = True

    def _bear(self, loss: Trouble) -> None:
        """Take a loss: start a replacement if there is one left; otherwise go on with fewer, or give up."""
        membership = self._membership
        if loss.worker_index in self._memory.met or not membership.records[loss.worker_index].is_guest:
            self._memory.lost.append(loss)  # a guest that never took part leaves nothing to recover from
        self._launcher.emit("worker_lost", worker=loss.worker_index, step=membership.step, reason=loss.reason)
        record = membership.records[loss.worker_index]
        is_replaced = not record.is_guest and self._restarts.may_replace()
        if is_replaced and membership.is_elastic:
            self._start(loss.worker_index)
            what = "it is being replaced"
        elif is_replaced:
            for index, record in list(membership.records.items()):
                if record.state in ACTIVE:
                    self._launcher.signal(index, signal.SIGKILL)
                self._start(index)
            what = "the team starts again from the last checkpoint"
        elif membership.is_too_small:
            self._bear_shortage(loss)
            return
        elif record.is_guest:
            what = "it had joined by itself and is not replaced"
        else:
            what = f"no replacement is left (cluster.max_restarts = {self._restarts.max_restarts})"
        if record.is_away:
            what += "; if it can be heard again it joins again" if record.is_far else "; if it wakes up it joins again"
        self._launcher.emit("warning", message=f"{loss.describe()}; {what}")

    def _expel_unreachable(self) -> None:
        """Go on without workers of other hosts that the others cannot connect to: they would keep them for ever."""
        membership = self._membership
        far = [i for i in membership.active if membership.records[i].is_far]
        late = [i for i in far if i not in self._memory.met] or far
        where = ", ".join(f"{self._coordinator.state.workers[i].member.host} (worker {i})" for i in late)
        message = (
            f"the run and {where} could not connect to each other: workers exchange gradients over TCP at ports that "
            "the system chooses, which a firewall between the hosts must let through"
        )
        self._coordinator.direct("leave", late, message)
        for index in late:
            membership.records[index].is_leaving = True
            membership.finish(index)
        self._launcher.emit("warning", message=message)

    def _bear_shortage(self, loss: Trouble) -> None:
        """Too few workers are left: wait for others, if those left have something to save afterwards."""
        membership, cluster = self._membership, self._job.cluster
        needed = cluster.min_workers if membership.is_elastic else membership.num_workers
        lack = Lack(loss.describe(), len(membership.active), needed)
        verdict = f"{lack.verdict(cluster)}; its log is {self._worker_log(loss.worker_index)}"
        has_near = any(not membership.records[index].is_far for index in membership.active)  # who can save
        if not (has_near and membership.is_elastic and membership.generation):
            raise TrainingError(verdict)
        self._memory.shortage = Shortage.begin(verdict, cluster, time.monotonic())
        if warning := lack.describe_wait(cluster, self._run_dir):
            self._launcher.emit("warning", message=warning)

    def _check_shortage(self) -> None:
        """Go on when there are enough again; when nobody came in time, have those that are left save and end."""
        shortage, membership = self._memory.shortage, self._membership
        if shortage is None:
            return
        if not membership.is_too_small:
            self._memory.shortage = None
        elif self._launcher.should_stop():
            self._memory.shortage, membership.min_workers = None, 1
        elif shortage.is_past(time.monotonic()):
            self._memory.shortage, self._memory.verdict, membership.min_workers = None, shortage.verdict, 1
            self._launcher.emit("warning", message=f"{shortage.verdict}; saving and ending")

    def _direct(self) -> None:
        """Tell the workers what to do next."""
        membership = self._membership
        if membership.troubles:
            return  # the run is about to fail
        self._check_shortage()
        for index in membership.dismiss_late():
            self._launcher.signal(index, signal.SIGKILL)
            if membership.records[index].is_guest and index in self._coordinator.state.workers:
                self._coordinator.direct("leave", [index])
        if membership.why_broken and self._disbanded < membership.generation:
            self._disbanded = membership.generation
            self._coordinator.direct("disband", membership.members, membership.why_broken)
        leaving = membership.dispensable
        if leaving and not membership.is_complete:
            self._let_go(leaving)
        members = membership.next_members()
        if members is not None:
            self._form(members)
        elif (membership.needs_pause or self._wants_reform) and not (
            self._memory.is_pause_told or membership.why_broken  # then they halt without being told
        ):
            self._memory.is_pause_told = True
            self._coordinator.direct("pause", membership.members)
        wants_stop = self._launcher.should_stop() or self._memory.verdict is not None
        if wants_stop and membership.is_complete and not self._memory.is_stop_told:
            self._memory.is_stop_told = True
            self._coordinator.direct("stop", membership.members, "interrupted")

    @property
    def _wants_reform(self) -> bool:
        """Whether members should stop for a moment to go on with other numbers of threads."""
        return self._memory.is_reform_wanted and self._membership.is_complete

    def _let_go(self, leaving: list[int]) -> None:
        membership = self._membership
        if membership.is_too_small and self._memory.verdict is None:
            # Nobody could go on: the leaving ones stay for as long as it takes to save.
            self._memory.verdict = f"workers {leaving} were told to leave, and too few are left to go on"
            for index in leaving:
                membership.records[index].is_leaving = False
            membership.min_workers = 1
            return
        self._coordinator.direct("leave", leaving)
        for index in leaving:
            membership.finish(index)
            self._launcher.emit("worker_left", worker=index, step=membership.step)

    def _form(self, members: list[int]) -> None:
        """Begin the next generation, or end the run if that is what the members halted for."""
        membership = self._membership
        first = membership.records[members[0]]
        is_halt = all(
            (r := membership.records[i]).ready_step == first.ready_step >= 0 and not r.has_dropped for i in members
        )
        if self._memory.is_stop_told and is_halt and not self._memory.lost and self._memory.recovery is None:
            self._coordinator.direct("finish", members)
            for index in members:
                membership.records[index].state = "member"
            return
        reason = next((r.reason for i in members if (r := membership.records[i]).reason), "")
        if COULD_NOT_MEET in reason and membership.has_far and not self._memory.lost:
            self._expel_unreachable()
            for index in members:
                membership.records[index].reason = ""
            return
        if self._memory.lost or reason:
            self._recover(first, reason)
        self._coordinator.form(members, self._memory.threads)
        self._memory.is_reform_wanted = False
        if self._scaling is not None:
            self._scaling.begin(membership.step, time.monotonic())
        self._stragglers.forget()
        self._memory.is_pause_told = self._memory.is_stop_told = False
        self._launcher.emit(
            "generation",
            generation=membership.generation,
            members=members,
            step=first.ready_step if first.ready_step >= 0 else None,
        )

    def _recover(self, first: Record, reason: str) -> None:
        """Take note that a team was lost; raise if that happens again and again in one step."""
        reached = first.ready_step + first.has_dropped if first.ready_step >= 0 else self._membership.step
        verdict = self._restarts.recover(first.ready_step, self._memory.lost, reason)
        if verdict is not None:
            where = f"; its log is {self._worker_log(self._memory.lost[-1].worker_index)}" if self._memory.lost else ""
            raise TrainingError(f"{verdict}{where}")
        lost = [loss.worker_index for loss in self._memory.lost]
        started_s = min([time.monotonic(), *(loss.at_s for loss in self._memory.lost)])
        if (earlier := self._memory.recovery) is not None:  # nobody has taken a step since
            lost = earlier.lost + lost
            started_s, reached = min(started_s, earlier.started_s), max(reached, earlier.reached_step)
        self._memory.recovery = _Recovery(lost, started_s, reached)
        self._memory.lost = []

    def _take_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("progress", "step"):
            self._membership.told_step = max(self._membership.told_step, fields["step"])
        self._memory.stall_s += fields.get("stall_s", 0.0)
        if kind == "progress":
            self._launcher.progress(step=fields["step"], loss=fields["loss"])
        elif kind == "outcome":
            self._memory.summaries[fields["worker"]] = msgspec.convert(fields["summary"], Summary)
        elif kind == "pace":
            self._note_pace(fields["worker"], fields["step"], fields["seconds"])
        elif kind == "commit" and fields["generation"] < self._membership.generation:
            pass  # of one that was given up, is back, and had not noticed: its generation is over
        elif kind == "data":
            self._memory.data = fields["fingerprint"]
        elif kind == "first_step":
            self._memory.met = list(self._membership.members)
            self._complete_recovery(fields["step"])
        else:
            self._launcher.emit(kind, **fields)

    def _note_pace(self, worker: int, step: int, seconds: float) -> None:
        if self._scaling is not None:
            self._scaling.hear(worker, seconds)
        if (slow := self._stragglers.hear(f"worker {worker}", step, seconds)) is not None:
            self._launcher.emit(
                "straggler", worker=worker, step=step, seconds=slow.seconds, median_seconds=slow.median_s
            )
            self._launcher.emit("warning", message=slow.describe())

    def _complete_recovery(self, step: int) -> None:
        recovery, self._memory.recovery = self._memory.recovery, None
        if recovery is None:
            return
        redone = max(0, recovery.reached_step - (step - 1))
        self._memory.num_recoveries += 1
        self._memory.steps_redone += redone
        self._launcher.emit(
            "recovery",
            generation=self._membership.generation,
            lost=recovery.lost,
            seconds=time.monotonic() - recovery.started_s,
            step=step,
            steps_redone=redone,
        )

    def _fail(self, trouble: Trouble) -> None:
        log_file = self._worker_log(trouble.worker_index)
        self._launcher.emit("worker_lost", worker=trouble.worker_index, step=trouble.step, reason=trouble.reason)
        if trouble.traceback:
            log.error("worker %d failed:\n%s", trouble.worker_index, trouble.traceback)
        raise TrainingError(f"{trouble.describe()}; its log is {log_file}")

    def _settle(self) -> Summary:
        """Return the summary, having checked that all workers ended with the same weights."""
        hashes = {summary.weights_sha256 for summary in self._memory.summaries.values()}
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights: {sorted(map(str, hashes))}")
        summary = next(iter(self._memory.summaries.values()))
        if self._memory.verdict is not None:
            raise TrainingError(f"{self._memory.verdict}. Step {summary.steps} is saved: --resume goes on from it")
        peaks = [summary.peak_memory_bytes or 0 for summary in self._memory.summaries.values()]
        return msgspec.structs.replace(
            summary,
            peak_memory_bytes=max(peaks) or None,
            recoveries=self._memory.num_recoveries,
            steps_redone=self._memory.steps_redone,
            checkpoint_stall_seconds=self._memory.stall_s,
        )
