"""Finds out which processes of a served run have ended, frozen or fallen silent."""

from __future__ import annotations

import signal
import time

from cordee.cluster.fork_server import Exited
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S, LauncherLink
from cordee.cluster.local import describe_exit, is_stopped
from cordee.core.errors import TrainingError
from cordee.served.crew import Crew
from cordee.served.dispatcher import Dispatcher
from cordee.served.losses import Losses
from cordee.served.memory import Hearing
from cordee.served.processes import Process


class Watch:
    """Looks at all processes of one run. What follows from it is for `Losses` to do."""

    def __init__(
        self, failure_timeout_s: float, launcher: LauncherLink, dispatcher: Dispatcher, crew: Crew, losses: Losses
    ) -> None:
        self._timeout_s = failure_timeout_s
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._crew = crew
        self._losses = losses
        self._unheard_s: dict[int, float] = {}  # since when a process that has not joined is waited for
        self._stopped_s: dict[int, float] = {}  # since when one of these is stopped
        self._dropped: set[int] = set()  # servers without a part, killed

    def look(self) -> None:
        """Hear who ended, end who is frozen, go on without guests that are gone."""
        self._take_reports()
        self._check_silence()
        self._drop_servers()
        self._check_far_guests()
        self._check_near_guests()

    def _take_reports(self) -> None:
        for report in self._launcher.reports():
            if isinstance(report, Exited):
                process = self._crew.processes.pop(report.index, None)
                if process is not None and not self._has_left(process):
                    self._losses.replace(process, describe_exit(report), report.status)

    def _has_left(self, process: Process) -> bool:
        """Whether a process ended in order: it said goodbye, and was heard, before."""
        hearing = self._dispatcher.hearings.get(process.name)
        if hearing is None and process.name in self._crew.away:
            return True
        return self._dispatcher.is_over or (hearing is not None and hearing.is_done)

    def _check_silence(self) -> None:
        """Kill what has frozen: its exit then tells the rest."""
        now_s = time.monotonic()
        for number, process in list(self._crew.processes.items()):
            name = process.name
            hearing = self._dispatcher.hearings.get(name)
            if hearing is None and name in self._crew.away:
                continue
            if hearing is None:
                self._check_start(number, name, now_s)
                continue
            if not self._is_silent(hearing, now_s):
                continue
            if self._launcher.is_working(number):
                hearing.heard_s = now_s
                continue
            self._launcher.emit(
                "warning", message=f"{name} is frozen: no sign of life for {now_s - hearing.heard_s:.1f} s"
            )
            hearing.heard_s = now_s
            if self._losses.can_replace or process.role != "worker":
                self._launcher.signal(number, signal.SIGKILL)
            else:
                self._crew.away.append(name)
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
            self._launcher.signal(number, signal.SIGKILL)

    def _drop_servers(self) -> None:
        """Kill servers that the one they followed has given up: their exit has another started."""
        for number, process in self._crew.processes.items():
            hearing = self._dispatcher.hearings.get(process.name)
            is_joined = process.role == "server" and hearing is not None and not hearing.is_done
            if is_joined and number not in self._dropped and not self._dispatcher.servers.has_part(process.name):
                self._dropped.add(number)
                self._launcher.signal(number, signal.SIGKILL)

    def _check_far_guests(self) -> None:
        """Go on without guests of other hosts that are not heard of; all that is known of them is what they say."""
        now_s, guests = time.monotonic(), self._crew.guests
        for index, since_s in guests.far.items():
            hearing = self._dispatcher.hearings.get(f"worker-{index}")
            if hearing is None:
                if now_s - since_s > STARTUP_TIMEOUT_S:
                    guests.pids.pop(index, None)
                continue
            guests.pids[index] = hearing.pid  # also one that is back
            if hearing.is_done:
                del guests.pids[index]
            elif self._is_silent(hearing, now_s):
                del guests.pids[index]
                self._losses.give_up(index, "is out of reach; if it can be heard again it joins again")

    def _check_near_guests(self) -> None:
        """Go on without guests whose processes ended or froze."""
        for index in self._crew.guests.take_ended():
            hearing = self._dispatcher.hearings.get(f"worker-{index}")
            if hearing is not None and not hearing.is_done:
                self._losses.give_up(index, "ended without a word")
        for index, pid in self._crew.guests.near:
            hearing = self._dispatcher.hearings.get(f"worker-{index}")
            if hearing is not None and self._is_silent(hearing, time.monotonic()) and is_stopped(pid):
                self._losses.give_up(index, "is frozen; if it wakes up it joins again")

    def _is_silent(self, hearing: Hearing, now_s: float) -> bool:
        """Whether a process that has not ended in order was not heard of for too long."""
        return not hearing.is_done and now_s - hearing.heard_s > self._timeout_s
