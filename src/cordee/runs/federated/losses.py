"""Who of a federated run was lost, and what follows: its task goes to another, and another worker takes its place."""

from __future__ import annotations

import logging
import time

from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.policies import MOST_LOSSES_IN_ONE_STEP, RemainingWorkers, Shortage
from cordee.cluster.processes import ProcessorWatch, is_alive, is_stopped
from cordee.core.errors import TrainingError
from cordee.core.settings import Cluster
from cordee.monitoring import events
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.federated.board import TaskKey
from cordee.runs.federated.dispatcher import RoundDispatcher
from cordee.runs.federated.state import FederatedState

log = logging.getLogger("cordee.coordinator")


class WorkerLosses:
    """Finds out which workers were lost, and handles it. Raises TrainingError where the run cannot continue."""

    def __init__(
        self, cluster: Cluster, launcher: LauncherLink, dispatcher: RoundDispatcher, starter: ProcessStarter
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._starter = starter
        self._processors = ProcessorWatch()

    @property
    def _members(self) -> Members:
        return self._dispatcher.members

    @property
    def _state(self) -> FederatedState:
        return self._dispatcher.state

    def check_members(self, now_s: float) -> None:
        """Hear who ended, and end who is frozen."""
        for report in self._launcher.reports():
            ended = self._members.take(report, now_s)
            if ended is not None and isinstance(report, Exited) and ended.is_active and not self._dispatcher.is_over:
                self._replace(ended, report.describe(), report.status)
        for ended in self._members.take_ended(is_alive):
            if ended.is_active:
                self._give_up(ended, "ended without notice")
        for silent in self._members.check_silence(now_s, self._processors.is_working, is_stopped):
            limit_s = self._members.startup_timeout_s
            if silent.phase == "starting" and now_s - silent.heard_s > limit_s:
                raise TrainingError(f"{silent.name} did not start within {limit_s:g} s")
            self._launcher.emit(events.Warned(message=f"{silent.name} {silent.loss_reason}"))
            self._launcher.signal(silent.number, "kill")  # its exit has another started

    def check_failures(self) -> None:
        """Raise what workers say that went wrong."""
        failures, records = self._dispatcher.failures, self._members.records
        causes = [entry for entry in failures if not entry[1].is_consequence]
        for name, failure in causes or failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            where = f"(in round {failure.step + 1}); its log is {self._starter.log_file(records[name])}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def check_shortage(self) -> None:
        """Wait while fewer workers are left than can continue; when nobody comes in time, end the run."""
        state, cluster, dispatcher = self._state, self._cluster, self._dispatcher
        remaining = RemainingWorkers(state.last_loss, len(self._members.staying_workers), cluster.min_workers)
        now_s = time.monotonic()
        if remaining.left >= remaining.needed or dispatcher.is_ending:
            state.shortage = None
        elif state.shortage is None:
            state.shortage = Shortage.begin(remaining.describe_end(cluster), cluster, now_s)
            if warning := remaining.describe_wait(cluster, self._starter.run_dir):
                self._launcher.emit(events.Warned(message=warning))
        elif state.shortage.is_past(now_s):
            raise TrainingError(state.shortage.end_reason)

    def _replace(self, record: MemberRecord, how: str, status: int) -> None:
        """A worker was lost: say so, and start another in its place."""
        dispatcher, state = self._dispatcher, self._state
        dispatcher.serve(0.0)  # its own account may have come in just before
        self.check_failures()
        key = dispatcher.lose(record)
        step = state.progress.step
        self._launcher.emit(events.WorkerLost(worker=record.index, step=step, reason=how))
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            log_file = self._starter.log_file(record)
            raise TrainingError(f"{record.name} {how} (in round {step + 1}); its log is {log_file}")
        self._refuse_deadly(key, f"{record.name} {how}")
        state.last_loss = f"{record.name} {how} (in round {step + 1})"
        task = f"its task ({key.kind} {key.place} of round {key.round + 1}) goes" if key else "nothing of its work goes"
        if state.num_replaced >= self._cluster.max_restarts:
            limit = self._cluster.max_restarts
            note = f"no replacement is left (cluster.max_restarts = {limit}), {task} to others"
            self._launcher.emit(events.Warned(message=f"{record.name} {how}: {note}"))
            return
        state.num_replaced += 1
        state.num_recoveries += 1
        successor = self._starter.start_worker()
        message = f"{record.name} {how}: {task} to others, {successor.name} takes its place"
        self._launcher.emit(events.Warned(message=message))

    def _give_up(self, record: MemberRecord, why: str) -> None:
        has_joined = record.may_send
        self._dispatcher.lose(record)
        if has_joined:
            self._dispatcher.channel.fence(record.name, record.fenced)
            self._state.last_loss = f"{record.name} {why}"
            step = self._state.progress.step
            self._launcher.emit(events.WorkerLost(worker=record.index, step=step, reason=why))

    def _refuse_deadly(self, key: TaskKey | None, last: str) -> None:
        """Raise TrainingError for a task that every worker is lost over: the next one would be, too."""
        if key is None:
            return
        name = f"{key.kind} {key.place} of round {key.round + 1}"
        lost_over = self._state.num_lost_over
        lost_over[name] = lost_over.get(name, 0) + 1
        if lost_over[name] >= MOST_LOSSES_IN_ONE_STEP:
            raise TrainingError(
                f"a worker was lost in each of {MOST_LOSSES_IN_ONE_STEP} attempts at {name}; last {last}"
            )
