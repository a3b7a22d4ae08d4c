"""Finds out which processes of a served run have ended, frozen or fallen silent."""

from __future__ import annotations

import time

from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S, LauncherLink
from cordee.cluster.processes import is_stopped
from cordee.core.errors import TrainingError
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.processes import Process
from cordee.runs.dispatched.state import ProcessRecord


class Watch:
    """Looks at all processes of one run. What follows from it is for `Losses` to do."""

    def __init__(
        self,
        failure_timeout_s: float,
        launcher: LauncherLink,
        dispatcher: Dispatcher,
        starter: ProcessStarter,
        losses: Losses,
    ) -> None:
        self._timeout_s = failure_timeout_s
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._starter = starter
        self._losses = losses
        self._unheard_s: dict[int, float] = {}  # since when a process that has not joined is waited for
        self._stopped_s: dict[int, float] = {}  # since when one of these is stopped
        self._dropped: set[int] = set()  # servers without a part, killed

    def look(self) -> None:
        """Hear who ended, end who is frozen, go on without external workers that are gone."""
        self._take_reports()
        self._check_silence()
        self._drop_servers()
        self._check_remote_workers()
        self._check_near_workers()

    def _take_reports(self) -> None:
        for report in self._launcher.reports():
            if isinstance(report, Exited):
                process = self._starter.processes.pop(report.index, None)
                if process is not None and not self._has_left(process):
                    self._losses.replace(process, report.describe(), report.status)

    def _has_left(self, process: Process) -> bool:
        """Whether a process ended in order: it said goodbye, and was heard, before."""
        record = self._dispatcher.process_records.get(process.name)
        if record is None and process.name in self._starter.away:
            return True
        return self._dispatcher.is_over or (record is not None and record.is_done)

    def _check_silence(self) -> None:
        """Kill what has frozen: its exit then tells the rest."""
        now_s = time.monotonic()
        for number, process in list(self._starter.processes.items()):
            name = process.name
            record = self._dispatcher.process_records.get(name)
            if record is None and name in self._starter.away:
                continue
            if record is None:
                self._check_start(number, name, now_s)
                continue
            if not self._is_silent(record, now_s):
                continue
            if self._launcher.is_working(number):
                record.heard_s = now_s
                continue
            self._launcher.emit(
                "warning", message=f"{name} is frozen: no sign of life for {now_s - record.heard_s:.1f} s"
            )
            record.heard_s = now_s
            if self._losses.can_replace or process.role != "worker":
                self._launcher.signal(number, "kill")
            else:
                self._starter.away.append(name)
                self._losses.give_up(process.index, "is frozen; if it wakes up it joins again")

    def _check_start(self, number: int, name: str, now_s: float) -> None:
        """Kill one that is stopped before it has joined; raise TrainingError for one that does not get that far."""
        if now_s - self._unheard_s.setdefault(number, now_s) > STARTUP_TIMEOUT_S:
            raise TrainingError(f"{name} did not start within {STARTUP_TIMEOUT_S:g} s")
        if not self._launcher.is_stopped(number):
            self._stopped_s.pop(number, None)
        elif now_s - self._stopped_s.setdefault(number, now_s) > self._timeout_s:
            self._stopped_s[number] = now_s
            self._launcher.emit("warning", message=f"{name} is frozen: it was stopped before it had joined")
            self._launcher.signal(number, "kill")

    def _drop_servers(self) -> None:
        """Kill servers that the one they followed has given up: their exit has another started."""
        for number, process in self._starter.processes.items():
            record = self._dispatcher.process_records.get(process.name)
            is_joined = process.role == "server" and record is not None and not record.is_done
            if is_joined and number not in self._dropped and not self._dispatcher.servers.has_part(process.name):
                self._dropped.add(number)
                self._launcher.signal(number, "kill")

    def _check_remote_workers(self) -> None:
        """Continue without remote workers that are not heard of: all that is known of them is what they say."""
        now_s, external_workers = time.monotonic(), self._starter.external_workers
        for index, since_s in external_workers.far.items():
            record = self._dispatcher.process_records.get(f"worker-{index}")
            if record is None:
                if now_s - since_s > STARTUP_TIMEOUT_S:
                    external_workers.pids.pop(index, None)
                continue
            external_workers.pids[index] = record.pid  # also one that is back
            if record.is_done:
                del external_workers.pids[index]
            elif self._is_silent(record, now_s):
                del external_workers.pids[index]
                self._losses.give_up(index, "is out of reach; if it can be heard again it joins again")

    def _check_near_workers(self) -> None:
        """Go on without external workers whose processes ended or froze."""
        for index in self._starter.external_workers.take_ended():
            record = self._dispatcher.process_records.get(f"worker-{index}")
            if record is not None and not record.is_done:
                self._losses.give_up(index, "ended without a word")
        for index, pid in self._starter.external_workers.near:
            record = self._dispatcher.process_records.get(f"worker-{index}")
            if record is not None and self._is_silent(record, time.monotonic()) and is_stopped(pid):
                self._losses.give_up(index, "is frozen; if it wakes up it joins again")

    def _is_silent(self, record: ProcessRecord, now_s: float) -> bool:
        """Whether a process that has not ended in order was not heard of for too long."""
        return not record.is_done and now_s - record.heard_s > self._timeout_s
