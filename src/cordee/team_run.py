"""The launcher's side of a run with several workers: start them, look after them, train around losses, report."""

from __future__ import annotations

import itertools
import logging
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cordee.assembly import Assembly
from cordee.cluster.control import Control, remove_control, write_control
from cordee.cluster.coordinator import Coordinator
from cordee.cluster.fork_server import Exited, Started
from cordee.cluster.local import LocalEngine, describe_exit
from cordee.cluster.membership import ACTIVE, Membership, Record, Trouble
from cordee.cluster.restarts import Restarts
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import COORDINATION
from cordee.communication.wire import Codec
from cordee.core.errors import JobError, TrainingError
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.worker import WorkerOrder

log = logging.getLogger("cordee.team_run")

# Importing torch in the fork server takes seconds on a busy machine.
STARTUP_TIMEOUT_S = 120.0
TICK_S = 0.02


class TeamRun:
    """One run with local workers, seen from the launcher."""

    _engine: LocalEngine
    _coordinator: Coordinator
    _order: WorkerOrder  # what all workers are told alike

    def __init__(
        self, parts: Assembly, directory: RunDirectory, monitor: Monitor, should_stop: Callable[[], bool]
    ) -> None:
        self._parts = parts
        job = self._job = parts.job
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop
        self._summaries: dict[int, Summary] = {}
        self._restarts = Restarts(job.cluster.max_restarts)
        self._lost: list[Trouble] = []  # since the last generation was formed
        self._recovery: _Recovery | None = None  # that is not complete
        self._steps_redone = 0
        self._stall_s = 0.0  # that training stood still for checkpoints
        self._verdict: str | None = None  # why the run ends early although its workers end well
        self._is_stop_told = False
        self._is_pause_told = False
        self._pids: dict[int, int] = {}
        self._membership = Membership(
            num_workers=job.strategy.workers,
            failure_timeout_s=job.cluster.failure_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            started_s=time.monotonic(),
            min_workers=job.cluster.min_workers,
            is_elastic=parts.strategy.requirements(job).is_elastic,
        )

    def lead(self, engine: LocalEngine, *, resume: bool) -> Summary:
        """Train on the engine's workers and return the summary of the one that spoke for the last team.

        Raises TrainingError that names the worker that failed first, its step and its error. Ending the workers
        that are left is the engine's part.
        """
        with tempfile.TemporaryDirectory(prefix="cordee-") as folder:
            return self._lead(engine, Path(folder), resume=resume)

    def _lead(self, engine: LocalEngine, folder: Path, *, resume: bool) -> Summary:
        run_id = secrets.token_hex(8)
        server_keys, (client_keys, control_keys) = make_keys(2)
        speaker = Speaker(run=run_id, name="coordinator", incarnation=time.time_ns())
        with ServerChannel("tcp://127.0.0.1:*", speaker, Codec(COORDINATION), server_keys) as channel:
            order = WorkerOrder(
                run_dir=str(self._directory.path.absolute()),
                run_id=run_id,
                worker_index=0,
                num_workers=self._job.strategy.workers,
                address=channel.address,
                keys=client_keys.to_text(),
                store=str(folder),
                resume=resume,
                failure_timeout_s=self._job.cluster.failure_timeout_s,
                join_timeout_s=STARTUP_TIMEOUT_S,
            )
            self._coordinator = Coordinator(channel, self._membership, self._take_event, self._scale)
            self._engine, self._order = engine, order
            for index in range(self._job.strategy.workers):
                self._start(index)
            write_control(self._directory.path, Control(channel.address, run_id, control_keys.to_text()))
            try:
                while not self._membership.is_over:
                    self._coordinator.serve(TICK_S)
                    self._look_after()
                    self._direct()
            finally:
                remove_control(self._directory.path)
        return self._settle()

    def _scale(self, num_workers: int) -> str:
        """Change the number of workers: start new ones, or let the last ones go. Returns at once what will happen."""
        membership, job = self._membership, self._job
        if not membership.is_elastic:
            raise JobError(f"strategy '{job.strategy.name}' has a fixed number of workers: end the run and --resume it")
        if num_workers < job.cluster.min_workers:
            raise JobError(f"cluster.min_workers = {job.cluster.min_workers} is more than {num_workers}")
        wanted = msgspec.structs.replace(job.strategy, workers=num_workers)
        self._parts.strategy.requirements(msgspec.structs.replace(job, strategy=wanted))  # raises what it cannot do
        before = membership.active
        for index in sorted(before)[num_workers:]:
            membership.records[index].is_leaving = True
        unused = (index for index in itertools.count() if membership.is_free(index))
        for index in itertools.islice(unused, max(0, num_workers - len(before))):
            self._start(index)
        membership.num_workers = num_workers
        self._monitor.emit("scale", workers=num_workers, before=len(before), step=membership.step)
        return f"from {len(before)} to {num_workers} workers"

    def _start(self, index: int) -> None:
        """Start a process for a worker, and listen to no earlier one."""
        own = msgspec.structs.replace(self._order, worker_index=index)
        self._coordinator.fence(index)
        self._membership.expect(index, time.monotonic())
        self._pids.pop(index, None)
        self._engine.start(index, "cordee.worker:main", msgspec.to_builtins(own), {}, self._directory.worker_log(index))

    def _look_after(self) -> None:
        """Hear who ended, end who is frozen, replace who is lost; raise for what the run cannot go on after."""
        now_s, membership = time.monotonic(), self._membership
        for report in self._engine.reports():
            if isinstance(report, Started):
                self._pids[report.index] = report.pid
            elif isinstance(report, Exited) and self._pids.get(report.index) == report.pid:
                membership.exit(report.index, describe_exit(report), now_s, is_killed=report.status < 0)
        for index in membership.check_silence(now_s, self._engine.is_working):
            self._engine.signal(index, signal.SIGKILL)
        if (culprit := membership.culprit(now_s)) is not None:
            self._fail(culprit)
        for loss in membership.take_losses():
            self._bear(loss)

    def _bear(self, loss: Trouble) -> None:
        """Take a loss: start a replacement if there is one left; otherwise go on with fewer, or give up."""
        membership = self._membership
        self._lost.append(loss)
        self._monitor.emit("worker_lost", worker=loss.worker_index, step=membership.step, reason=loss.reason)
        is_replaced = self._restarts.may_replace()
        if is_replaced and membership.is_elastic:
            self._start(loss.worker_index)
            what = "it is being replaced"
        elif is_replaced:
            for index, record in list(membership.records.items()):
                if record.state in ACTIVE:
                    self._engine.signal(index, signal.SIGKILL)
                self._start(index)
            what = "the team starts again from the last checkpoint"
        elif membership.is_too_small:
            self._give_up(loss)
            return
        else:
            what = f"no replacement is left (cluster.max_restarts = {self._restarts.max_restarts})"
        self._monitor.emit("warning", message=f"{loss.describe()}; {what}")

    def _give_up(self, loss: Trouble) -> None:
        """End the run because too few workers are left; those that are left save what they have."""
        cluster = self._job.cluster
        left = len(self._membership.active)
        needed = cluster.min_workers if self._membership.is_elastic else self._membership.num_workers
        self._verdict = (
            f"{loss.describe()}; {left} of at least {needed} workers are left, and all "
            f"{cluster.max_restarts} replacements are used up (cluster.max_restarts); "
            f"its log is {self._directory.worker_log(loss.worker_index)}"
        )
        if not (left and self._membership.is_elastic and self._membership.generation):
            raise TrainingError(self._verdict)
        self._membership.min_workers = 1
        self._monitor.emit("warning", message=f"{self._verdict}; saving and ending")

    def _direct(self) -> None:
        """Tell the workers what to do next."""
        membership = self._membership
        if membership.troubles:
            return  # the run is about to fail
        for index in membership.dismiss_late():
            self._engine.signal(index, signal.SIGKILL)
        leaving = [i for i, r in membership.records.items() if r.is_leaving and r.state == "ready"]
        if leaving and not membership.is_complete:
            self._let_go(leaving)
        members = membership.next_members()
        if members is not None:
            self._form(members)
        elif membership.needs_pause and not self._is_pause_told:
            self._is_pause_told = True
            self._coordinator.direct("pause", membership.members)
        wants_stop = self._should_stop() or self._verdict is not None
        if wants_stop and membership.is_complete and not self._is_stop_told:
            self._is_stop_told = True
            self._coordinator.direct("stop", membership.members, "interrupted")

    def _let_go(self, leaving: list[int]) -> None:
        membership = self._membership
        if membership.is_too_small and self._verdict is None:
            # Nobody could go on: the leaving ones stay for as long as it takes to save.
            self._verdict = f"workers {leaving} were told to leave, and too few are left to go on"
            for index in leaving:
                membership.records[index].is_leaving = False
            membership.min_workers = 1
            return
        self._coordinator.direct("leave", leaving)
        for index in leaving:
            membership.finish(index)
            self._monitor.emit("worker_left", worker=index, step=membership.step)

    def _form(self, members: list[int]) -> None:
        """Begin the next generation, or end the run if that is what the members halted for."""
        membership = self._membership
        first = membership.records[members[0]]
        is_halt = all(
            (r := membership.records[i]).ready_step == first.ready_step >= 0 and not r.has_dropped for i in members
        )
        if self._is_stop_told and is_halt and not self._lost and self._recovery is None:
            self._coordinator.direct("finish", members)
            for index in members:
                membership.records[index].state = "member"
            return
        reason = next((r.reason for i in members if (r := membership.records[i]).reason), "")
        if self._lost or reason:
            self._recover(first, reason)
        self._coordinator.form(members)
        self._is_pause_told = self._is_stop_told = False
        self._monitor.emit(
            "generation",
            generation=membership.generation,
            members=members,
            step=first.ready_step if first.ready_step >= 0 else None,
        )

    def _recover(self, first: Record, reason: str) -> None:
        """Take note that a team was lost; raise if that happens again and again in one step."""
        reached = first.ready_step + first.has_dropped if first.ready_step >= 0 else self._membership.step
        verdict = self._restarts.recover(first.ready_step, self._lost, reason)
        if verdict is not None:
            where = f"; its log is {self._directory.worker_log(self._lost[-1].worker_index)}" if self._lost else ""
            raise TrainingError(f"{verdict}{where}")
        now_s = time.monotonic()
        started_s = min([now_s, *(loss.at_s for loss in self._lost)])
        self._recovery = _Recovery([loss.worker_index for loss in self._lost], started_s, reached)
        self._lost = []

    def _take_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("progress", "step"):
            self._membership.told_step = max(self._membership.told_step, fields["step"])
        self._stall_s += fields.get("stall_s", 0.0)
        if kind == "progress":
            self._monitor.progress(step=fields["step"], loss=fields["loss"])
        elif kind == "outcome":
            self._summaries[fields["worker"]] = msgspec.convert(fields["summary"], Summary)
        elif kind == "first_step":
            self._complete_recovery(fields["step"])
        else:
            self._monitor.emit(kind, **fields)

    def _complete_recovery(self, step: int) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        redone = max(0, recovery.reached_step - (step - 1))
        self._steps_redone += redone
        self._monitor.emit(
            "recovery",
            generation=self._membership.generation,
            lost=recovery.lost,
            seconds=time.monotonic() - recovery.started_s,
            step=step,
            steps_redone=redone,
        )

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
        summary = next(iter(self._summaries.values()))
        if self._verdict is not None:
            raise TrainingError(f"{self._verdict}. Step {summary.steps} is saved: --resume goes on from it")
        return msgspec.structs.replace(
            summary,
            recoveries=self._restarts.num_recoveries,
            steps_redone=self._steps_redone,
            checkpoint_stall_seconds=self._stall_s,
        )


class _Recovery(msgspec.Struct, frozen=True):
    """What is under way between a loss and the first step of those left."""

    lost: list[int]
    started_s: float
    reached_step: int  # steps that were taken or under way when the team was lost
