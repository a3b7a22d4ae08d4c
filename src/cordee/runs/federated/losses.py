"""Who of a federated run was lost, and what follows: its task goes to another, and another worker takes its place."""

from __future__ import annotations

from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord
from cordee.core.errors import TrainingError
from cordee.core.settings import Cluster
from cordee.monitoring import events
from cordee.runs.dispatched.on_demand_losses import OnDemandLosses
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.federated.board import TaskKey
from cordee.runs.federated.dispatcher import RoundDispatcher


class WorkerLosses(OnDemandLosses):
    """Losses of workers that simulate clients."""

    step_noun = "round"

    def __init__(
        self, cluster: Cluster, launcher: LauncherLink, dispatcher: RoundDispatcher, starter: ProcessStarter
    ) -> None:
        super().__init__(cluster, launcher, dispatcher, starter, dispatcher.state.losses)
        self._dispatcher = dispatcher

    def _end_short(self, end_reason: str) -> None:
        raise TrainingError(end_reason)

    def replace(self, record: MemberRecord, how: str, status: int) -> None:
        """A worker was lost: say so, and start another in its place."""
        dispatcher, state = self._dispatcher, self._state
        dispatcher.serve(0.0)  # its own account may have come in just before
        self.check_failures()
        key = dispatcher.lose(record)
        step = dispatcher.state.progress.step
        self._launcher.emit(events.WorkerLost(worker=record.index, step=step, reason=how))
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            log_file = self._starter.log_file(record)
            raise TrainingError(f"{record.name} {how} (in round {step + 1}); its log is {log_file}")
        self._refuse_deadly([_describe(key)] if key else [], f"{record.name} {how}")
        state.last = f"{record.name} {how} (in round {step + 1})"
        task = f"its task ({_describe(key)}) goes" if key else "nothing of its work goes"
        if not self.can_replace:
            limit = self._cluster.max_restarts
            note = f"no replacement is left (cluster.max_restarts = {limit}), {task} to others"
            self._launcher.emit(events.Warned(message=f"{record.name} {how}: {note}"))
            return
        self._count_replaced()
        state.num_recoveries += 1
        successor = self._starter.start_worker()
        message = f"{record.name} {how}: {task} to others, {successor.name} takes its place"
        self._launcher.emit(events.Warned(message=message))

    def give_up(self, record: MemberRecord, why: str, *, is_away: bool = False) -> None:
        has_joined = record.may_send
        self._dispatcher.lose(record, is_away=is_away)
        if has_joined:
            self._dispatcher.channel.fence(record.name, record.fenced)
            self._state.last = f"{record.name} {why}"
            step = self._dispatcher.state.progress.step
            self._launcher.emit(events.WorkerLost(worker=record.index, step=step, reason=why))


def _describe(task: TaskKey) -> str:
    return f"{task.kind} {task.place} of round {task.round + 1}"
