"""The dispatcher of a run: hears its processes, hands out work as the staleness allows, decides when to stop.

Workers ask for work and wait for the answer, which comes when they may continue. At certain steps nothing is handed out
until all that was is committed; then the evaluator reads a snapshot that holds exactly those steps.

Nothing is sent before `flush`, so that what it follows from can be written down first. A dispatcher that comes back
is given the `DispatcherState` of the dispatcher before; whoever had no answer asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cordee.cluster.members import MemberRecord
from cordee.cluster.messages import CheckpointRequest
from cordee.cluster.policies import Stragglers
from cordee.communication.channel import Received
from cordee.communication.messages import Accepted, Join, Message, Refused
from cordee.core.fault_points import reach
from cordee.data import Ledger, Unit
from cordee.monitoring import events
from cordee.parameters.messages import FollowerLost
from cordee.parameters.server_slots import ServerSlot, ServerSlots
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.dispatched.messages import (
    AskEvaluatorTask,
    AskServers,
    EvaluatorTaskDone,
    HandOver,
    Leave,
    SaveResiduals,
    SnapshotTaken,
    TakeWork,
    Work,
)
from cordee.runs.dispatched.on_demand_dispatcher import OnDemandDispatcher
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.server_registry import ServerRegistry
from cordee.runs.dispatched.snapshot_scheduler import SnapshotScheduler
from cordee.runs.dispatched.state import DispatcherState, Outcome, StepMetricsState
from cordee.runs.dispatched.step_metrics import Emit, StepMetrics
from cordee.training.progress import Progress


@dataclass
class Dispatcher(OnDemandDispatcher):
    """Answers the processes of one run."""

    plan: RunPlan
    ledger: Ledger
    progress: Progress
    show: Callable[[int, float], None]  # step and loss for the progress bar
    elapsed_s: Callable[[], float]
    rate: Callable[[int], float]
    checkpoints: CheckpointReceiver  # of members that do not have the run directory
    restored: DispatcherState | None = None  # of the coordinator before this one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restored is None:
            committed = self.ledger.committed_steps
            barrier = self.plan.next_barrier(committed)
            slots = ServerSlots([ServerSlot() for _ in range(self.plan.settings.servers)])
            metrics = StepMetricsState(counted=committed)
            self._state = DispatcherState(progress=self.progress, slots=slots, metrics=metrics, barrier=barrier)
        else:
            self._state = self.restored
            self.progress = self._state.progress
            self.plan.policy.patience = self.progress.patience
            assert self._state.ledger is not None
            self.ledger.restore(self._state.ledger)
        state, wants_followers = self._state, self.plan.settings.replicas > 1
        self.servers = ServerRegistry(state.slots, self.members.records, self._reply, wants_followers=wants_followers)
        self.metrics = StepMetrics(self.plan, self.progress, state.metrics, self.emit, self.show, self.rate)
        self._snapshots = SnapshotScheduler(
            self.plan, self.progress, state.snapshots, state.outcome, self._reply, self.emit
        )
        self._timing = UnitTiming(self.emit)

    def current_state(self) -> DispatcherState:
        """Return what the next dispatcher must know."""
        self._state.ledger = self.ledger.state
        return self._state

    @property
    def outcome(self) -> Outcome:
        return self._state.outcome

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def min_workers(self) -> int:
        return self.plan.job.cluster.min_workers

    @property
    def is_final(self) -> bool:
        return self._state.is_final

    @property
    def is_over(self) -> bool:
        return self._state.is_over

    def serve(self, timeout_s: float) -> None:
        super().serve(timeout_s)
        self._drop_late()
        if not self.is_over:
            self._release_leaving()
            for name in [name for name in self._state.feeding_back if self.members.records[name].is_released]:
                self._lose_residual(name)
        self._advance()

    def stop(self, reason: str) -> None:
        """End the run after the steps that were begun."""
        if self._state.is_final:
            return
        self.outcome.stopped_by = reason
        self._state.is_final = True
        ledger = self.ledger
        begun = ledger.highest_step_taken
        if ledger.next_share:
            begun += 1
        self._state.barrier = min(self._state.barrier, max(begun, ledger.committed_steps))

    def give_up(self, end_reason: str) -> None:
        self.outcome.end_reason = end_reason
        self.stop("interrupt")

    @property
    def is_ending(self) -> bool:
        """Whether the run ends with the steps that are begun: there is no more work to hand out."""
        return self._state.is_final or self.ledger.is_complete

    @property
    def has_done_all(self) -> bool:
        """Whether all work is done: what is left is to measure and to save it."""
        return self.is_ending and self.ledger.committed_steps >= self._state.barrier

    def lose(self, record: MemberRecord, *, is_away: bool = False) -> list[Unit]:
        """Continue without a process; return the units of work it had in hand. One that is away may join again."""
        name, has_joined = record.name, record.may_send
        self.members.lose(record, is_away=is_away)
        self._timing.forget(name)
        self._waiting.pop(name, None)
        self._lose_residual(name)
        units = self.ledger.requeue(name)
        self.servers.lose(name)
        if has_joined and record.role == "evaluator":
            self._snapshots.lose()
        return units

    def _handle_own(self, received: Received, record: MemberRecord) -> None:
        name = record.name
        match received.message:
            case AskServers():
                self.servers.ask(received)
            case FollowerLost(address=address, reason=reason):
                if self.servers.drop_follower(name, address):
                    self.emit(events.Warned(message=f"{reason}: continuing alone until there is another"))
                self._reply(received, Accepted())
            case HandOver(has_retired=has_retired):
                self._hand_over(received, record, has_retired=has_retired)
            case TakeWork() as work:
                if work.done >= 0:
                    self._commit(name, work)
                self.ledger.requeue(name)  # who asks has nothing in hand: it did not hear the last answer
                record.is_leaving |= work.leaves
                self._waiting[name] = received
                if name in self._state.residuals:  # else it did not hear that it is to do so
                    self._state.residuals[name] |= work.kept == self._state.residuals_step
            case AskEvaluatorTask():
                self._snapshots.arrive(received)
            case SnapshotTaken(ages=ages):
                self._reply(received, Accepted())
                self._snapshots.take_snapshot(ages)
            case EvaluatorTaskDone() as done:
                if self._snapshots.is_open(done.number):
                    self._finish_task(done)
                self._reply(received, Accepted())
            case other:
                self._reply(received, Refused("unexpected", type(other).__name__))

    def _handle_unknown(self, received: Received) -> None:
        if isinstance(received.message, CheckpointRequest):
            self._reply_unwritten(received, self.checkpoints.handle(received.message))
        else:
            super()._handle_unknown(received)

    def _take_join(self, record: MemberRecord, join: Join) -> None:
        if record.role == "server":
            record.address, record.public = join.address, join.public
            has_worked = self.servers.has_been_ready
            self.servers.join(record.index, record.name, has_state=join.has_state)
            if has_worked and self.servers.serves(record.name):
                self._restart_from(record.index, join.step)
        self.servers.answer_waiting()

    def _reach(self, message: Message) -> None:
        reach(f"dispatch.answer.{type(message).__name__.lower()}")

    def _hand_over(self, received: Received, record: MemberRecord, *, has_retired: bool) -> None:
        """Let a server leave that was told to, once another has its part. Until then there is one on its way."""
        name = received.envelope.sender
        if not (self.is_over or self.servers.can_leave(name, has_retired=has_retired)):
            if not record.is_leaving:
                self.emit(events.Warned(message=f"{name} was told to leave: it stays until another has its part"))
            record.is_leaving = True
            self._reply(received, Accepted())
            return
        if not record.is_released:
            record.is_released, record.phase = True, "finished"
            self.emit(events.WorkerLeft(worker=record.index, role="server", step=self.progress.step))
            self.servers.lose(name)
        self._reply(received, Leave())
        self.servers.answer_waiting()

    def _restart_from(self, index: int, step: int) -> None:
        """Record that a server serves with parameters of an earlier step: nobody had what its predecessor had."""
        # Parts of steps that are not complete went to the predecessor as well. All are done again: the other servers
        # know them, and the new one gets every update from here on.
        self._state.attempt += 1
        self._state.residuals_step = -1
        self.ledger.reopen()
        self.metrics.reopen()
        now = self.progress.step
        lost = now - step
        if lost > 0:
            self.progress.updates_lost += lost
            self.emit(events.UpdatesLost(server=index, updates=lost, step=now, from_step=step))
            message = f"server {index} continues from step {step}: its slice lacks the updates of {lost} steps"
            advice = "With strategy.replicas = 2 none would be lost"
            if self.plan.settings.replicas > 1:
                advice = f"All {self.plan.settings.replicas} of its processes were lost before there was another"
            self.emit(events.Warned(message=f"{message}. {advice}"))

    def _commit(self, worker: str, done: TakeWork) -> None:
        if done.attempt != self._state.attempt or not self.ledger.commit(done.done):
            return
        if self.plan.settings.compression != "none":
            self._state.feeding_back.add(worker)
        step = done.done // self.ledger.num_shares
        self.metrics.add(step, done)
        self._timing.end(done.done, worker, self.members.records[worker].index, self.plan.steps_before(step + 1))
        self.metrics.close(self.ledger.committed_steps)

    def _advance(self) -> None:
        """Order a snapshot where one is due, move on where that is allowed, and hand out work."""
        ledger, snapshots, barrier = self.ledger, self._snapshots, self._state.barrier
        if self.is_over or not self.servers.is_ready:
            return
        if ledger.committed_steps >= barrier:
            snapshots.pause()
            is_last = self.is_ending
            has_task = snapshots.has_task_for(barrier, is_last=is_last)
            if not has_task and not self._has_residuals(barrier, is_last=is_last):
                return
            is_due = snapshots.is_free and not has_task
            if is_due and not snapshots.start_task(barrier, self.elapsed_s(), self.metrics.to_apply, is_last=is_last):
                self._end()
            if is_last:  # there is no more work, and the evaluator can use the cores
                self._release_waiting()
            if is_last or not snapshots.may_continue(barrier):
                return
            self._state.barrier = self.plan.next_barrier(ledger.committed_steps)
            snapshots.resume()
        self._hand_out()

    def _has_residuals(self, barrier: int, *, is_last: bool) -> bool:
        """Have waiting workers give servers what compression left out, for a checkpoint; return whether it is done.

        One that is late with work that another has done is not waited for: what it left out is not saved.
        """
        if not self.plan.saves_residuals(barrier, is_last=is_last):
            return True
        state, step = self._state, self.progress.step
        if state.residuals_step != step:
            state.residuals_step, state.residuals = step, {}
        for name in [name for name in self._waiting if not state.residuals.get(name)]:
            state.residuals[name] = False
            self._reply(self._waiting.pop(name), SaveResiduals(step))
        return all(state.residuals.values())

    def _lose_residual(self, worker: str) -> None:
        """Count what compression left out of the gradients of a worker that is gone: nobody knows it."""
        state = self._state
        is_saved = state.residuals.pop(worker, False) and state.residuals_step == self.progress.step
        if worker in state.feeding_back:
            state.feeding_back.discard(worker)
            if not (self.has_done_all and is_saved):
                self.progress.residuals_lost += 1
                self.emit(
                    events.Warned(message=f"what compression has left out of the gradients of {worker} is lost with it")
                )

    def _hand_out(self) -> None:
        ledger, staleness = self.ledger, self.plan.max_staleness
        limit = self._state.barrier
        if self.has_too_few_workers:
            return  # others are waited for
        if staleness is not None:
            limit = min(limit, ledger.committed_steps + staleness + 1)
        names, waits = list(self._waiting), False
        if self.plan.settings.keeps_order:  # what a run leaves out is then the same in another that is like it
            names.sort(key=lambda name: self.members.records[name].index)
            has_begun = self.metrics.training_s is not None
            waits = any(
                record.name not in self._waiting and (record.phase == "joined" or not has_begun)
                for record in self.members.staying_workers
            )
        for name in names:
            if waits and not ledger.has_returned:
                return
            unit = ledger.take(name, limit_step=limit)
            if unit is None:
                return
            received = self._waiting.pop(name)
            self.metrics.begin()
            self._timing.begin(unit.number)
            apply_step, scale = self.metrics.to_apply
            work = Work(
                unit=unit.number,
                step=unit.step,
                share=unit.share,
                num_shares=unit.num_shares,
                epoch=unit.epoch,
                start=unit.start,
                stop=unit.stop,
                first_batch=unit.first_batch,
                num_batches=unit.num_batches,
                floor=ledger.committed_steps * ledger.num_shares,
                apply_step=apply_step,
                scale=scale,
                attempt=self._state.attempt,
                level=int(self.progress.plateau.get("level", 0)),
            )
            self._reply(received, work)

    def _finish_task(self, done: EvaluatorTaskDone) -> None:
        reason = self._snapshots.finish(done)
        if reason is not None and not self.is_ending:
            self.stop(reason)  # what is begun meanwhile is finished; where training waited, nothing is
        elif reason is not None and self._snapshots.has_last_task and self.outcome.stopped_by != "interrupt":
            self.outcome.stopped_by = reason  # a rule that the last evaluation meets is named as well
        if self._snapshots.has_last_task:
            self._end()

    def _end(self) -> None:
        self._state.is_over = True
        self._release_waiting()

    def shut_down(self) -> None:
        """Tell whoever asks that there is nothing more to do."""
        self._release_waiting()
        self._snapshots.shut_down()

    def _drop_late(self) -> None:
        limit_s = self.plan.drop_late_s
        if not limit_s:
            return
        for number, wait_s in self._timing.late(limit_s):
            if number in self.ledger.taken:
                worker, unit = self.ledger.taken[number]
                self.ledger.give_up(number)
                self._timing.give_up(number)
                late = f"{worker} is late with its part of step {unit.first_batch + 1} ({wait_s:.1f} s)"
                self.emit(events.Warned(message=f"{late}: another does it"))


class UnitTiming:
    """Not remembered by coordinators that come back: how long units were in hand before is not known."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._taken_s: dict[int, float] = {}  # unit -> since when somebody has it
        self._stragglers = Stragglers()

    def begin(self, unit: int) -> None:
        """Record that a unit is handed out."""
        self._taken_s[unit] = time.monotonic()

    def end(self, unit: int, worker: str, worker_index: int, step: int) -> None:
        """Record that a worker is done with a unit of `step`, and tell if that took it much longer than others."""
        taken_s = self._taken_s.pop(unit, None)
        if taken_s is None:
            return
        slow = self._stragglers.record(worker, step, time.monotonic() - taken_s)
        if slow is not None:
            self._emit(
                events.Straggler(worker=worker_index, step=step, seconds=slow.seconds, median_seconds=slow.median_s)
            )
            self._emit(events.Warned(message=slow.describe()))

    def forget(self, worker: str) -> None:
        """Compare nobody with a worker that is gone."""
        self._stragglers.forget(worker)

    def late(self, limit_s: float) -> list[tuple[int, float]]:
        """Return the units that have been in hand for longer, and for how long."""
        now_s = time.monotonic()
        waits = [(unit, now_s - taken_s) for unit, taken_s in self._taken_s.items()]
        return [(unit, wait_s) for unit, wait_s in waits if wait_s > limit_s]

    def give_up(self, unit: int) -> None:
        """Record that a unit was taken away from who had it."""
        del self._taken_s[unit]
