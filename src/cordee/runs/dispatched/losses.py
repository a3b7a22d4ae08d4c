"""Who of a dispatched run was lost, and what follows: another takes its place, or the run has fewer, waits, or ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cordee import checkpoint
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord
from cordee.core.errors import TrainingError
from cordee.core.fault_points import reach
from cordee.core.settings import Cluster
from cordee.data import Unit
from cordee.monitoring import events
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.on_demand_losses import OnDemandLosses
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.server_calls import ServerCalls
from cordee.runs.dispatched.state import Loss, LossState


class Losses(OnDemandLosses):
    """Losses of workers, servers and the evaluator."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: LauncherLink,
        dispatcher: Dispatcher,
        starter: ProcessStarter,
        servers: ServerCalls,
        state: LossState,
    ) -> None:
        super().__init__(cluster, launcher, dispatcher, starter, state)
        self._dispatcher = dispatcher
        self._servers = servers

    def check_members(self, now_s: float) -> None:
        super().check_members(now_s)
        for server in [record for record in self._members.started if record.role == "server"]:
            if (
                server.phase == "joined"
                and not server.loss_reason
                and not self._dispatcher.servers.has_part(server.name)
            ):
                server.loss_reason = "does not follow any more"  # the exit has another started
                self._launcher.signal(server.number, "kill")

    def _is_left_alone(self, silent: MemberRecord) -> bool:
        return silent.is_external or (silent.role == "worker" and not self.can_replace)

    def replace(self, record: MemberRecord, how: str, status: int) -> None:
        """A process was lost: say so, and start another in its place."""
        dispatcher, state = self._dispatcher, self._state
        reach("dispatch.loss")
        dispatcher.serve(0.0)  # its own account may have come in just before
        self.check_failures()
        name, role, index, step, incarnation = record.name, record.role, record.index, record.step, record.incarnation
        units = dispatcher.lose(record)
        self._launcher.emit(events.WorkerLost(worker=index, role=role, step=step, reason=how))
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            raise TrainingError(f"{name} {how} (in step {step + 1}); its log is {self._starter.log_file(record)}")
        self._refuse_deadly(map(_describe, units), f"{name} {how}")
        limit = self._cluster.max_restarts
        if role == "worker":
            state.last = f"{name} {how} (in step {step + 1})"
        if role == "worker" and dispatcher.has_done_all:
            self._launcher.emit(events.Warned(message=f"{name} {how}: all work is done, nobody takes its place"))
            return
        if not self.can_replace and role == "worker":
            self._fence(name, incarnation)
            note = f"no replacement is left (cluster.max_restarts = {limit}), {_given(units)} to others"
            self._launcher.emit(events.Warned(message=f"{name} {how}: {note}"))
            return
        if not self.can_replace:
            raise TrainingError(
                f"{name} {how} (in step {step + 1}), and {limit} processes were replaced already "
                f"(cluster.max_restarts); its log is {self._starter.log_file(record)}"
            )
        self._count_replaced()
        self._begin_recovery(role, name)
        if role == "worker":
            successor = self._starter.start_worker()
            self._fence(name, incarnation)
            message = f"{_given(units)} to others, {successor.name} takes its place"
        elif role == "server":
            message = self._replace_server(index)
        else:
            self._starter.start(role, 0)
            message = "another takes its place"
        self._launcher.emit(events.Warned(message=f"{name} {how}: {message}"))

    def give_up(self, record: MemberRecord, why: str, *, is_away: bool = False) -> None:
        """Continue without a worker that is not replaced; one that is away may join again."""
        name, has_joined = record.name, record.may_send
        units = self._dispatcher.lose(record, is_away=is_away)
        if not has_joined:
            return  # nobody had counted on it
        self._dispatcher.channel.fence(name, record.fenced)
        self._fence(name, record.incarnation)
        self._state.last = f"{name} {why} (in step {record.step + 1})"
        self._begin_recovery("worker", name)
        self._launcher.emit(events.WorkerLost(worker=record.index, role="worker", step=record.step, reason=why))
        self._launcher.emit(events.Warned(message=f"{name} {why}: {_given(units)} to others"))

    def check_failures(self) -> None:
        """Continue without external workers that failed; raise what the others report."""
        failures, records = self._dispatcher.failures, self._members.records
        for name, failure in list(failures):
            if records[name].is_external:  # its failures are its own
                failures.remove((name, failure))
                self.give_up(records[name], failure.error)
        super().check_failures()

    def _end_short(self, end_reason: str) -> None:
        if not self._dispatcher.active_workers:
            raise TrainingError(end_reason)
        self._dispatcher.give_up(end_reason)

    def report_recoveries(self) -> None:
        """Tell how long it took from a loss to the next step that was committed."""
        for loss in [loss for loss in self._state.recovering if self._dispatcher.progress.step > loss.step]:
            self._state.recovering.remove(loss)
            seconds = time.perf_counter() - loss.at_s
            self._launcher.emit(events.Recovery(role=loss.role, lost=loss.name, seconds=seconds))

    def _begin_recovery(self, role: str, name: str) -> None:
        self._state.num_recoveries += 1
        self._state.recovering.append(Loss(role, name, time.perf_counter(), self._dispatcher.progress.step))

    def _replace_server(self, index: int) -> str:
        """Start another server; return what becomes of the parameters."""
        has_successor = self._dispatcher.servers.has_server(index)
        successor = self._starter.start_server(index, resume=not has_successor, has_state=not has_successor)
        if has_successor:
            return f"no update is lost, {successor.name} will follow"
        saved = checkpoint.list_checkpoints(self._starter.run_dir / "checkpoints")
        kept = f"from {saved[-1].name}" if saved else "from the beginning"
        return f"nobody has its parameters of step {self._dispatcher.progress.step}, {successor.name} continues {kept}"

    def start_followers(self) -> None:
        """Start a server where one is alone that should not be, unless another is there, or on its way."""
        for index, serving in self._dispatcher.servers.lacking_follower():
            others = [other for other in self._members.started if (other.role, other.index) == ("server", index)]
            if all(other.name == serving or other.is_done for other in others):
                self._starter.start_server(index, resume=False, has_state=False)

    def _fence(self, worker: str, incarnation: int) -> None:
        self._servers.fence(self._dispatcher.servers.addresses, worker, incarnation)


def _given(units: Sequence[Unit]) -> str:
    return "1 unit of its work goes" if len(units) == 1 else f"{len(units)} units of its work go"


def _describe(unit: Unit) -> str:
    return f"samples {unit.start} to {unit.stop - 1} of epoch {unit.epoch + 1} (step {unit.first_batch + 1})"
