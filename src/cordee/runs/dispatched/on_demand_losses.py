"""Losses of runs with work on demand: who is lost, what members report, whether enough workers are left."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.policies import JOINS_AGAIN, MOST_LOSSES_IN_ONE_STEP, RemainingWorkers, Shortage
from cordee.cluster.processes import ProcessorWatch, is_alive, is_stopped
from cordee.communication.messages import Failure
from cordee.core.errors import TrainingError
from cordee.core.settings import Cluster
from cordee.monitoring import events
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.state import LossState

log = logging.getLogger("cordee.coordinator")


class WorkQueue(Protocol):
    """What losses have to know of what hands out the work."""

    failures: list[tuple[str, Failure]]

    @property
    def members(self) -> Members: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def is_ending(self) -> bool:
        """Whether the run ends with what is begun."""


class OnDemandLosses(ABC):
    """Finds out who was lost, and handles it. Raises TrainingError for losses that the run cannot continue after."""

    step_noun = "step"  # what the members count

    def __init__(
        self, cluster: Cluster, launcher: LauncherLink, queue: WorkQueue, starter: ProcessStarter, state: LossState
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._queue = queue
        self._starter = starter
        self._state = state
        self._processors = ProcessorWatch()
        self._lost_with = ""  # what else was lost with the process whose loss is handled

    @abstractmethod
    def replace(self, record: MemberRecord, how: str, status: int) -> None:
        """A process was lost: report it, and start another in its place."""

    @abstractmethod
    def give_up(self, record: MemberRecord, why: str, *, is_away: bool = False) -> None:
        """Continue without a worker that is not replaced; one that is away may join again."""

    @abstractmethod
    def _end_short(self, end_reason: str) -> None:
        """Nobody came in time. Have what is there saved, or raise TrainingError."""

    @property
    def can_replace(self) -> bool:
        """Whether there is a replacement left. Processes that were lost together are one loss."""
        return self._is_counted or self._state.num_replaced < self._cluster.max_restarts

    @property
    def _is_counted(self) -> bool:
        return self._lost_with != "" and self._lost_with == self._state.counted

    def _count_replaced(self) -> None:
        if not self._is_counted:
            self._state.num_replaced += 1
            self._state.counted = self._lost_with

    @property
    def _members(self) -> Members:
        return self._queue.members

    def check_members(self, now_s: float) -> None:
        """Hear who ended, end who is frozen, continue without external workers that are gone."""
        for report in self._launcher.reports():
            ended = self._members.take(report, now_s)
            if ended is not None and isinstance(report, Exited) and ended.is_active and not self._queue.is_over:
                self._lost_with = report.lost_with
                self.replace(ended, report.describe(), report.status)
        self._lost_with = ""  # what follows was not lost with anything
        for ended in self._members.take_ended(is_alive):
            if ended.is_active:
                self.give_up(ended, "ended without notice")
        for silent in self._members.check_silence(now_s, self._processors.is_working, is_stopped):
            self._handle_silence(silent, now_s)

    def check_failures(self) -> None:
        """Raise what members report that went wrong: a cause before its consequences."""
        failures, records = self._queue.failures, self._members.records
        causes = [entry for entry in failures if not entry[1].is_consequence]
        for name, failure in causes or failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            log_file = self._starter.log_file(records[name])
            where = f"(in {self.step_noun} {failure.step + 1}){records[name].place}; its log is {log_file}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def check_shortage(self) -> None:
        """Wait while fewer workers are left than can continue; when nobody comes in time, end the run."""
        state, cluster = self._state, self._cluster
        remaining = RemainingWorkers(state.last, len(self._members.staying_workers), cluster.min_workers)
        now_s = time.monotonic()
        if remaining.left >= remaining.needed or self._queue.is_ending:
            state.shortage = None
        elif state.shortage is None:
            state.shortage = Shortage.begin(remaining.describe_end(cluster), cluster, now_s)
            if warning := remaining.describe_wait(cluster, self._starter.run_dir):
                self._launcher.emit(events.Warned(message=warning))
        elif state.shortage.is_past(now_s):
            self._end_short(state.shortage.end_reason)

    def _handle_silence(self, silent: MemberRecord, now_s: float) -> None:
        """Kill a process that can be replaced, or must be: its exit has another started. Continue without others."""
        if not silent.is_external:
            limit_s = self._members.startup_timeout_s
            if silent.phase == "starting" and now_s - silent.heard_s > limit_s:
                raise TrainingError(f"{silent.name} did not start within {limit_s:g} s")
            self._launcher.emit(events.Warned(message=f"{silent.name} {silent.loss_reason}"))
        if self._is_left_alone(silent):
            self.give_up(silent, f"{silent.loss_reason.partition(':')[0]}; {JOINS_AGAIN}", is_away=True)
        else:
            self._launcher.signal(silent.number, "kill")

    def _is_left_alone(self, silent: MemberRecord) -> bool:
        """Whether a silent process is not killed, because nobody would take its place."""
        return silent.is_external

    def _refuse_deadly(self, works: Iterable[str], last: str) -> None:
        """Raise TrainingError for work that every worker is lost over: the next one would be, too."""
        lost_over = self._state.num_lost_over
        for work in works:
            lost_over[work] = lost_over.get(work, 0) + 1
            if lost_over[work] >= MOST_LOSSES_IN_ONE_STEP:
                raise TrainingError(
                    f"a worker was lost in each of {MOST_LOSSES_IN_ONE_STEP} attempts at {work}; last {last}"
                )
