"""What follows when a team loses a worker: another takes its place, or it continues with fewer, waits, or ends."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.policies import JOINS_AGAIN, FailureReport, RemainingWorkers, Shortage
from cordee.cluster.processes import ProcessorWatch, is_alive, is_stopped
from cordee.core.errors import TrainingError
from cordee.core.fault_points import reach
from cordee.core.settings import Cluster
from cordee.monitoring import events
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.state import LossState
from cordee.runs.team.workers import Workers

log = logging.getLogger("cordee.coordinator")


class Losses:
    """Finds out who was lost, and handles it. Raises TrainingError for what the run cannot continue after."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: LauncherLink,
        membership: Membership,
        workers: Workers,
        recoveries: Recoveries,
        state: LossState,
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._membership = membership
        self._workers = workers
        self._recoveries = recoveries
        self._state = state
        self._processors = ProcessorWatch()

    @property
    def end_reason(self) -> str | None:
        """Why the run ends early although its workers end well."""
        return self._state.end_reason

    def end_early(self, end_reason: str) -> None:
        """Have those that are left save and end, however few they are."""
        self._state.end_reason, self._membership.min_workers = end_reason, 1

    def check_members(self) -> None:
        """Find out who ended, end who is frozen, replace who is lost."""
        now_s, membership, workers = time.monotonic(), self._membership, self._workers
        for report in self._launcher.reports():
            if (ended := membership.take(report, now_s)) is not None and isinstance(report, Exited):
                membership.exit(ended.index, report.describe(), now_s, is_killed=report.status < 0)
        for ended in membership.take_ended(is_alive):
            membership.exit(ended.index, "ended without notice", now_s, is_killed=True)
        can_replace = self._recoveries.restarts.can_replace
        for silent in membership.check_silence(now_s, self._processors.is_working, is_stopped):
            if silent.is_external or (membership.is_elastic and not can_replace):
                workers.mark_away(silent)
            else:
                workers.kill(silent.index)
        if (found := membership.first_failure(now_s)) is not None:
            self._fail(found)
        for loss in membership.take_losses():
            self._handle_loss(loss)

    def check_shortage(self) -> None:
        """Continue when there are enough again; when nobody came in time, have those that are left save and end."""
        shortage, membership = self._state.shortage, self._membership
        if shortage is None:
            return
        if not membership.is_too_small:
            self._state.shortage = None
        elif self._launcher.should_stop():
            self._state.shortage, membership.min_workers = None, 1
        elif shortage.is_past(time.monotonic()):
            self._state.shortage = None
            self.end_early(shortage.end_reason)
            self._launcher.emit(events.Warned(message=f"{shortage.end_reason}; saving and ending"))

    def _handle_loss(self, loss: FailureReport) -> None:
        """Take a loss: start a replacement if there is one left; otherwise continue with fewer, or give up."""
        membership, lost = self._membership, loss.worker_index
        record = membership.of(lost)
        loss = replace(loss, step=membership.step)  # its own last sign of life may be many steps old
        reach("losses.found")
        self._recoveries.take(loss, is_external=record.is_external)
        self._launcher.emit(events.WorkerLost(worker=lost, step=membership.step, reason=loss.reason))
        if record.phase != "gone":  # another loss of this turn has started the whole team again
            self._launcher.emit(events.Warned(message=f"{loss.describe()}; it starts again with the team"))
            return
        is_replaced = not record.is_external and self._recoveries.restarts.may_replace()
        if is_replaced and membership.is_elastic:
            self._workers.start(lost)
            what = "it is being replaced"
        elif is_replaced:
            for other in list(membership.records.values()):
                if other.is_active:
                    self._workers.kill(other.index)
                self._workers.start(other.index)
            what = "the team starts again from the last checkpoint"
        elif membership.is_too_small:
            self._handle_shortage(loss)
            return
        elif record.is_external:
            what = "it had joined by itself and is not replaced"
        else:
            what = f"no replacement is left (cluster.max_restarts = {self._recoveries.restarts.max_restarts})"
        if record.is_away:
            what += f"; {JOINS_AGAIN}"
        self._launcher.emit(events.Warned(message=f"{loss.describe()}; {what}"))
        reach("losses.replaced")

    def _handle_shortage(self, loss: FailureReport) -> None:
        """Too few workers are left: wait for others, if those left have something to save afterwards."""
        membership, cluster = self._membership, self._cluster
        needed = cluster.min_workers if membership.is_elastic else membership.num_workers
        remaining = RemainingWorkers(loss.describe(), len(membership.active), needed)
        end_reason = f"{remaining.describe_end(cluster)}; its log is {self._workers.log_file(loss.worker_index)}"
        if not (membership.active and membership.is_elastic and membership.generation):
            raise TrainingError(end_reason)
        self._state.shortage = Shortage.begin(end_reason, cluster, time.monotonic())
        if warning := remaining.describe_wait(cluster, self._workers.run_dir):
            self._launcher.emit(events.Warned(message=warning))

    def _fail(self, failure: FailureReport) -> None:
        self._launcher.emit(events.WorkerLost(worker=failure.worker_index, step=failure.step, reason=failure.reason))
        if failure.traceback:
            log.error("worker %d failed:\n%s", failure.worker_index, failure.traceback)
        place = self._membership.of(failure.worker_index).place
        raise TrainingError(f"{failure.describe()}{place}; its log is {self._workers.log_file(failure.worker_index)}")
