"""Finds out which processes of a served run have ended, frozen or fallen silent."""

from __future__ import annotations

from cordee.cluster.engine import Exited
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S, LauncherLink
from cordee.cluster.members import Process, ProcessRecord, Silence, judge_silence
from cordee.cluster.processes import ProcessorWatch, is_alive, is_stopped
from cordee.core.errors import TrainingError
from cordee.monitoring import events
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.process_starter import ProcessStarter


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
        self._processors = ProcessorWatch()
        self._unheard_s: dict[int, float] = {}  # since when a process that has not joined is waited for
        self._stopped_s: dict[int, float] = {}  # since when one of these is stopped
        self._dropped: set[int] = set()  # servers without a part, killed

    def look(self, now_s: float) -> None:
        """Hear who ended, end who is frozen, continue without external workers that are gone."""
        self._take_reports()
        for process in self._starter.roster.started:
            self._check_started(process, now_s)
        for process in self._starter.roster.remote_workers:
            self._check_remote(process, now_s)
        self._check_local(now_s)

    def _take_reports(self) -> None:
        for report in self._launcher.reports():
            process = self._starter.roster.take(report)
            if process is not None and isinstance(report, Exited) and not self._has_left(process):
                self._losses.replace(process, report.describe(), report.status)

    def _has_left(self, process: Process) -> bool:
        """Whether a process ended in order: it said goodbye, and was heard, before."""
        record = self._record_of(process)
        if record is None and process.is_away:
            return True
        return self._dispatcher.is_over or (record is not None and record.is_done)

    def _check_started(self, process: Process, now_s: float) -> None:
        """Kill what has frozen, and servers that the one they followed has given up: the exit has another started."""
        record = self._record_of(process)
        if record is None:
            if not process.is_away:
                self._check_start(process, now_s)
            return
        if record.is_done:
            return
        number, silent_s = process.number, now_s - record.heard_s
        silence = self._judge(process, silent_s)
        if silence != "none":
            record.heard_s = now_s
        if silence == "frozen":
            self._launcher.emit(
                events.Warned(message=f"{process.name} is frozen: no sign of life for {silent_s:.1f} s")
            )
            if self._losses.can_replace or process.role != "worker":
                self._launcher.signal(number, "kill")
            else:
                process.is_away = True
                self._losses.give_up(process.index, "is frozen; if it wakes up it joins again")
        elif process.role == "server" and not self._dispatcher.servers.has_part(process.name):
            if number not in self._dropped:
                self._launcher.signal(number, "kill")
            self._dropped.add(number)

    def _judge(self, process: Process, silent_s: float) -> Silence:
        return judge_silence(
            silent_s,
            (self._timeout_s, STARTUP_TIMEOUT_S),
            has_joined=True,
            is_working=lambda: self._processors.is_working(process.pid),
            is_stopped=lambda: is_stopped(process.pid),
        )

    def _check_start(self, process: Process, now_s: float) -> None:
        """Kill one that is stopped before it has joined; raise TrainingError for one that does not get that far."""
        name, number = process.name, process.number
        if now_s - self._unheard_s.setdefault(number, now_s) > STARTUP_TIMEOUT_S:
            raise TrainingError(f"{name} did not start within {STARTUP_TIMEOUT_S:g} s")
        if not is_stopped(process.pid):
            self._stopped_s.pop(number, None)
        elif now_s - self._stopped_s.setdefault(number, now_s) > self._timeout_s:
            self._stopped_s[number] = now_s
            self._launcher.emit(events.Warned(message=f"{name} is frozen: it was stopped before it had joined"))
            self._launcher.signal(number, "kill")

    def _check_remote(self, process: Process, now_s: float) -> None:
        """Continue without a remote worker that is not heard of: all that is known of it is what it says."""
        record = self._record_of(process)
        if record is None:
            process.is_away |= now_s - process.since_s > STARTUP_TIMEOUT_S
            return
        is_lost = not record.is_done and now_s - record.heard_s > self._timeout_s
        process.is_away = is_lost or record.is_done  # neither, if it is back
        if is_lost:
            self._losses.give_up(process.index, "is out of reach; if it can be heard again it joins again")

    def _check_local(self, now_s: float) -> None:
        """Continue without external workers of this host whose processes ended or froze."""
        roster = self._starter.roster
        for process in roster.take_ended(is_alive):
            record = self._record_of(process)
            if record is not None and not record.is_done:
                self._losses.give_up(process.index, "ended without a word")
        for process in roster.local_workers:
            record = self._record_of(process)
            if record is None or record.is_done or now_s - record.heard_s <= self._timeout_s:
                continue
            if is_stopped(process.pid):
                self._losses.give_up(process.index, "is frozen; if it wakes up it joins again")

    def _record_of(self, process: Process) -> ProcessRecord | None:
        """Return what is known of a process that has joined."""
        return self._dispatcher.process_records.get(process.name)
