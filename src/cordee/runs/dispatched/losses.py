"""What follows when a served run loses a process: another takes its place, or it goes on with fewer, waits, or ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cordee import checkpoint
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import Process
from cordee.cluster.policies import MOST_LOSSES_IN_ONE_STEP, Lack, Shortage
from cordee.core.errors import TrainingError
from cordee.core.fault_points import reach
from cordee.core.settings import Cluster
from cordee.data import Unit
from cordee.monitoring import events
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.server_calls import ServerCalls
from cordee.runs.dispatched.state import Loss, LossState

log = logging.getLogger("cordee.served")


class Losses:
    """Bears the losses of one run. Raises TrainingError for those it cannot go on after."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: LauncherLink,
        dispatcher: Dispatcher,
        starter: ProcessStarter,
        servers: ServerCalls,
        memory: LossState,
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._starter = starter
        self._servers = servers
        self._memory = memory

    @property
    def num_replaced(self) -> int:
        return self._memory.num_replaced

    @property
    def can_replace(self) -> bool:
        """Whether there is a replacement left."""
        return self._memory.num_replaced < self._cluster.max_restarts

    def replace(self, process: Process, how: str, status: int) -> None:
        """A process was lost: say so, and start another in its place."""
        dispatcher, memory = self._dispatcher, self._memory
        reach("dispatch.loss")
        dispatcher.serve(0.0)  # its own account may have come in just before
        self.check_failures()
        name, role, index = process.name, process.role, process.index
        record = dispatcher.process_records.get(name)
        step, incarnation = (record.step, record.incarnation) if record else (0, 0)
        units = dispatcher.lose(name)
        self._launcher.emit(events.WorkerLost(worker=index, role=role, step=step, reason=how))
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            raise TrainingError(f"{name} {how} (in step {step + 1}); its log is {self._starter.log_file(name)}")
        self._refuse_deadly(units, f"{name} {how}")
        limit = self._cluster.max_restarts
        if role == "worker":
            memory.last = f"{name} {how} (in step {step + 1})"
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
                f"(cluster.max_restarts); its log is {self._starter.log_file(name)}"
            )
        memory.num_replaced += 1
        self._begin_recovery(role, name)
        if role == "worker":
            successor = self._starter.start_worker()
            self._fence(name, incarnation)
            message = f"{_given(units)} to others, {successor} takes its place"
        elif role == "server":
            message = self._replace_server(index)
        else:
            self._starter.start(role, 0)
            message = "another takes its place"
        self._launcher.emit(events.Warned(message=f"{name} {how}: {message}"))

    def give_up(self, index: int, why: str) -> None:
        """Go on without a worker that is not replaced."""
        name = f"worker-{index}"
        record = self._dispatcher.process_records[name]
        units = self._dispatcher.lose(name)
        self._dispatcher.channel.fence(name, record.incarnation)
        self._fence(name, record.incarnation)
        self._memory.last = f"{name} {why} (in step {record.step + 1})"
        self._begin_recovery("worker", name)
        self._launcher.emit(events.WorkerLost(worker=index, role="worker", step=record.step, reason=why))
        self._launcher.emit(events.Warned(message=f"{name} {why}: {_given(units)} to others"))

    def check_failures(self) -> None:
        """Go on without external workers that failed; raise what the others say that went wrong."""
        failures, roster = self._dispatcher.failures, self._starter.roster
        for name, failure in list(failures):
            if roster.is_external(name):  # its troubles are its own
                failures.remove((name, failure))
                index = roster.processes[name].index
                roster.remove(name)
                self.give_up(index, failure.error)
        causes = [entry for entry in failures if not entry[1].is_consequence]
        for name, failure in causes or failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            where = f"(in step {failure.step + 1}); its log is {self._starter.log_file(name)}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def check_shortage(self) -> None:
        """Wait while fewer workers are left than can go on; when nobody comes in time, have what is there saved."""
        memory, cluster, dispatcher = self._memory, self._cluster, self._dispatcher
        lack = Lack(memory.last, len(dispatcher.staying(self._starter.workers)), cluster.min_workers)
        now_s = time.monotonic()
        if lack.left >= lack.needed or dispatcher.is_ending:
            memory.shortage = None
        elif memory.shortage is None:
            memory.shortage = Shortage.begin(lack.verdict(cluster), cluster, now_s)
            if warning := lack.describe_wait(cluster, self._starter.run_dir):
                self._launcher.emit(events.Warned(message=warning))
        elif memory.shortage.is_past(now_s):
            if not dispatcher.active_workers:
                raise TrainingError(memory.shortage.verdict)
            dispatcher.give_up(memory.shortage.verdict)

    def note_recoveries(self) -> None:
        """Tell how long it took from a loss to the next step that was committed."""
        for loss in [loss for loss in self._memory.recovering if self._dispatcher.progress.step > loss.step]:
            self._memory.recovering.remove(loss)
            seconds = time.perf_counter() - loss.at_s
            self._launcher.emit(events.Recovery(role=loss.role, lost=loss.name, seconds=seconds))

    def _begin_recovery(self, role: str, name: str) -> None:
        self._memory.num_recoveries += 1
        self._memory.recovering.append(Loss(role, name, time.perf_counter(), self._dispatcher.progress.step))

    def _replace_server(self, index: int) -> str:
        """Start another server; return what becomes of the parameters."""
        is_served = self._dispatcher.servers.is_served(index)
        successor = self._starter.start_server(index, resume=not is_served, has_state=not is_served)
        if is_served:
            return f"no update is lost, {successor} will be the second server"
        saved = checkpoint.list_checkpoints(self._starter.run_dir / "checkpoints")
        kept = f"from {saved[-1].name}" if saved else "from the beginning"
        return f"nobody has its parameters of step {self._dispatcher.progress.step}, {successor} continues {kept}"

    def start_seconds(self) -> None:
        """Start a server where one is alone that should not be, unless another is there, or on its way."""
        for index, serving in self._dispatcher.servers.lacking_second():
            others = [p.name for p in self._starter.roster.started if (p.role, p.index) == ("server", index)]
            process_records = self._dispatcher.process_records
            if all(name == serving or (name in process_records and process_records[name].is_done) for name in others):
                self._starter.start_server(index, resume=False, has_state=False)

    def _refuse_deadly(self, units: Sequence[Unit], last: str) -> None:
        """Raise TrainingError for work that every worker is lost over: the next one would be, too."""
        lost_over = self._memory.num_lost_over
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
