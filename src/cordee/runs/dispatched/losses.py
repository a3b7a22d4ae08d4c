"""Who of a dispatched run was lost, and what follows: another takes its place, or the run has fewer, waits, or ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cordee import checkpoint
from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.policies import JOINS_AGAIN, MOST_LOSSES_IN_ONE_STEP, RemainingWorkers, Shortage
from cordee.cluster.processes import ProcessorWatch, is_alive, is_stopped
from cordee.core.errors import TrainingError
from cordee.core.fault_points import reach
from cordee.core.settings import Cluster
from cordee.data import Unit
from cordee.monitoring import events
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.server_calls import ServerCalls
from cordee.runs.dispatched.state import Loss, LossState

log = logging.getLogger("cordee.coordinator")


class Losses:
    """Finds out who was lost, and handles it. Raises TrainingError for losses that the run cannot continue after."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: LauncherLink,
        dispatcher: Dispatcher,
        starter: ProcessStarter,
        servers: ServerCalls,
        state: LossState,
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._starter = starter
        self._servers = servers
        self._state = state
        self._processors = ProcessorWatch()

    @property
    def _members(self) -> Members:
        return self._dispatcher.members

    def check_members(self, now_s: float) -> None:
        """Hear who ended, end who is frozen, continue without external workers that are gone."""
        for report in self._launcher.reports():
            ended = self._members.take(report, now_s)
            if ended is not None and isinstance(report, Exited) and ended.is_active and not self._dispatcher.is_over:
                self.replace(ended, report.describe(), report.status)
        for ended in self._members.take_ended(is_alive):
            if ended.is_active:
                self.give_up(ended, "ended without notice")
        for silent in self._members.check_silence(now_s, self._processors.is_working, is_stopped):
            self._handle_silence(silent, now_s)
        for server in [record for record in self._members.started if record.role == "server"]:
            if (
                server.phase == "joined"
                and not server.loss_reason
                and not self._dispatcher.servers.has_part(server.name)
            ):
                server.loss_reason = "does not follow any more"  # the exit has another started
                self._launcher.signal(server.number, "kill")

    def _handle_silence(self, silent: MemberRecord, now_s: float) -> None:
        """Kill a process that can be replaced, or must be: its exit has another started. Continue without others."""
        if not silent.is_external:
            limit_s = self._members.startup_timeout_s
            if silent.phase == "starting" and now_s - silent.heard_s > limit_s:
                raise TrainingError(f"{silent.name} did not start within {limit_s:g} s")
            self._launcher.emit(events.Warned(message=f"{silent.name} {silent.loss_reason}"))
        if silent.is_external or (silent.role == "worker" and not self.can_replace):
            self.give_up(silent, f"{silent.loss_reason.partition(':')[0]}; {JOINS_AGAIN}", is_away=True)
        else:
            self._launcher.signal(silent.number, "kill")

    @property
    def can_replace(self) -> bool:
        """Whether there is a replacement left."""
        return self._state.num_replaced < self._cluster.max_restarts

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
        self._refuse_deadly(units, f"{name} {how}")
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
        state.num_replaced += 1
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
        """Continue without external workers that failed; raise what the others say that went wrong."""
        failures, records = self._dispatcher.failures, self._members.records
        for name, failure in list(failures):
            if records[name].is_external:  # its failures are its own
                failures.remove((name, failure))
                self.give_up(records[name], failure.error)
        causes = [entry for entry in failures if not entry[1].is_consequence]
        for name, failure in causes or failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            log_file = self._starter.log_file(records[name])
            where = f"(in step {failure.step + 1}){records[name].place}; its log is {log_file}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def check_shortage(self) -> None:
        """Wait while fewer workers are left than can continue; when nobody comes in time, have what is there saved."""
        state, cluster, dispatcher = self._state, self._cluster, self._dispatcher
        remaining = RemainingWorkers(state.last, len(self._members.staying_workers), cluster.min_workers)
        now_s = time.monotonic()
        if remaining.left >= remaining.needed or dispatcher.is_ending:
            state.shortage = None
        elif state.shortage is None:
            state.shortage = Shortage.begin(remaining.describe_end(cluster), cluster, now_s)
            if warning := remaining.describe_wait(cluster, self._starter.run_dir):
                self._launcher.emit(events.Warned(message=warning))
        elif state.shortage.is_past(now_s):
            if not dispatcher.active_workers:
                raise TrainingError(state.shortage.end_reason)
            dispatcher.give_up(state.shortage.end_reason)

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

    def _refuse_deadly(self, units: Sequence[Unit], last: str) -> None:
        """Raise TrainingError for work that every worker is lost over: the next one would be, too."""
        lost_over = self._state.num_lost_over
        for unit in units:
            lost_over[unit.number] = lost_over.get(unit.number, 0) + 1
            if lost_over[unit.number] >= MOST_LOSSES_IN_ONE_STEP:
                raise TrainingError(
                    f"a worker was lost in each of {MOST_LOSSES_IN_ONE_STEP} attempts at samples {unit.start} to "
                    f"{unit.stop - 1} of epoch {unit.epoch + 1} (step {unit.first_batch + 1}); last {last}"
                )

    def _fence(self, worker: str, incarnation: int) -> None:
        self._servers.fence(self._dispatcher.servers.addresses, worker, incarnation)


def _given(units: Sequence[Unit]) -> str:
    return "1 unit of its work goes" if len(units) == 1 else f"{len(units)} units of its work go"
