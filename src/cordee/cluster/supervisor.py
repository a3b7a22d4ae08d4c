"""The launcher's side of a coordinator: starts it, carries out its commands, and brings it back when it is killed.

The coordinator is a process of its own, forked like the workers. What it must know is in its journal, so another
takes up where it was; workers connect again by themselves.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cordee.cluster.control import marked, remove_control
from cordee.cluster.coordinator import CoordinatorSpec
from cordee.cluster.engine import (
    AgentLost,
    CannotStart,
    Engine,
    EngineWaits,
    Exited,
    ProcessReport,
    ProcessSpec,
    Report,
    Started,
)
from cordee.cluster.journal import JOURNAL_FILE, remove_journal
from cordee.cluster.launcher_link import LauncherSpec
from cordee.cluster.launcher_messages import (
    Alive,
    Command,
    Emit,
    Ended,
    FramedSocket,
    NumberedCommand,
    Show,
    Signal,
    Stop,
    ToLauncher,
    Unjournalled,
    listen,
)
from cordee.cluster.processes import is_stopped
from cordee.communication.keys import make_keys
from cordee.core import errors
from cordee.core.errors import CordeeError, TrainingError
from cordee.core.fault_points import reach
from cordee.core.temporary import temporary_folder
from cordee.monitoring import Monitor, Summary, events

log = logging.getLogger("cordee.supervisor")

COORDINATOR = -1  # its number at the engine; those of others are its own choice
STARTUP_TIMEOUT_S = 120.0  # the fork server may still be importing torch
TICK_S = 0.05
MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0  # more in so short a time are no accident


class Supervisor:
    """Has a coordinator lead a run, through as many processes as it takes."""

    def __init__(
        self, engine: Engine, monitor: Monitor, should_stop: Callable[[], bool], *, failure_timeout_s: float
    ) -> None:
        self._engine = engine
        self._monitor = monitor
        self._should_stop = should_stop
        self._failure_timeout_s = failure_timeout_s
        self._socket: FramedSocket | None = None
        self._is_up = False  # the coordinator has said again what the one before it wanted, and may hear reports
        self._pid = 0  # of the coordinator
        self._asked: dict[int, int] = {}  # index -> incarnation of the process that the coordinator asked for last
        self._exited: dict[int, Exited] = {}  # of those that have ended
        self._num_done = 0  # commands
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._num_deaths = 0
        self._is_stop_told = False
        self._unjournalled = ""
        self._heard_s = 0.0
        self._ended: Ended | None = None

    def run(
        self, target: str, run_dir: Path, *, kind: str, facts: dict[str, Any], resume: bool, marker: str = ""
    ) -> Summary:
        """Have `target` lead a run of this kind; return its summary. `marker` is what members look for in the storage.

        Raises the error that it ends with, and TrainingError if it cannot be kept alive.
        """
        run_dir = run_dir.absolute()
        run_id = secrets.token_hex(8)
        server_keys, (client_keys, control_keys) = make_keys(2)
        capacity = self._engine.capacity()
        with temporary_folder() as folder, listen(Path(folder)) as listener, marked(run_dir, run_id):
            launcher = LauncherSpec(
                folder=folder, run_dir=str(run_dir), run_id=run_id, alive_every_s=self._failure_timeout_s / 5
            )
            spec = CoordinatorSpec(
                kind=kind,
                run_dir=str(run_dir),
                run_id=run_id,
                server_keys=server_keys.to_text(),
                client_keys=client_keys.to_text(),
                control_keys=control_keys.to_text(),
                resume=resume,
                marker=marker,
                launcher_pid=os.getpid(),
                num_slots=capacity.num_slots,
                most_workers=capacity.num_slots if capacity.is_limit and not capacity.may_grow else None,
                address=capacity.address,
                facts=facts,
                launcher=launcher,
            )
            self._spec = msgspec.to_builtins(spec)
            self._target, self._log = target, run_dir / "logs" / "coordinator.log"
            try:
                self._start()
                while self._ended is None:
                    self._turn(listener)
            finally:
                if self._socket is not None:
                    self._socket.close()
                remove_control(run_dir)
                remove_journal(run_dir / JOURNAL_FILE)
        if self._ended.error_kind:
            raise getattr(errors, self._ended.error_kind, CordeeError)(self._ended.error)
        return msgspec.convert(self._ended.result, Summary)

    def _start(self) -> None:
        self._heard_s, self._pid = time.monotonic(), 0
        reach("supervisor.start")
        self._engine.start(ProcessSpec.new(COORDINATOR, self._target, self._spec, log=str(self._log), place="launcher"))

    def _turn(self, listener: socket.socket) -> None:
        waiting: list[Any] = [self._engine, self._socket or listener]
        readable, _, _ = select.select(waiting, [], [], TICK_S)
        if self._socket is not None and self._socket in readable:
            self._receive(self._socket)
        if listener in readable:
            self._accept(listener)
        if self._ended is not None:
            return
        for report in self._engine.reports():  # also without news: it looks whether its fork server is stopped
            self._take_report(report)
        if self._should_stop() and not self._is_stop_told and self._socket is not None:
            self._is_stop_told = True
            self._send(Stop())
        self._check_silence()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._socket = FramedSocket(connection, ToLauncher)
        self._heard_s = time.monotonic()
        self._is_stop_told = self._is_up = False

    def _send_known(self) -> None:
        """Tell a new coordinator what is known of its processes.

        Only after the commands that it repeats: of a worker that one of them replaces, the old process is known until
        then, and its end would be taken for the loss of the new one.
        """
        self._is_up = True
        for started in self._engine.members():
            if self._is_asked_for(started):
                self._send(started)
        for exited in self._exited.values():
            self._send(Started(exited.index, exited.incarnation, exited.pid))
            self._send(exited)

    def _receive(self, connection: FramedSocket) -> None:
        try:
            for message in connection.receive():
                self._heard_s = time.monotonic()
                match message:
                    case NumberedCommand(number=number, command=command):
                        if number > self._num_done:
                            reach("supervisor.command")
                            self._num_done = number
                            self._do(command)
                            reach("supervisor.command_done")
                    case Show(step=step, loss=loss):
                        self._monitor.progress(step=step, loss=loss)
                    case Unjournalled(problem=problem, is_forgotten=is_forgotten):
                        if is_forgotten and self._num_deaths:
                            raise TrainingError(
                                f"the coordinator was killed, and its journal cannot be read: {problem}"
                            )
                        self._unjournalled = problem
                        note = f"{problem}: if the coordinator dies now, the run ends with it; training continues"
                        self._monitor.emit(events.Warned(message=note))
                    case Alive() if not self._is_up:
                        self._send_known()
                    case Ended():
                        reach("supervisor.ended")
                        self._ended = message
        except EOFError:
            connection.close()
            self._socket = None

    def _do(self, command: Command) -> None:
        match command:
            case ProcessSpec(index=index, incarnation=incarnation):
                self._asked[index] = incarnation
                self._exited.pop(index, None)
                self._engine.start(command)
            case Signal(index=index, action=action):
                self._engine.signal(index, action)
            case Emit(event=event):
                self._monitor.emit(event)

    def _send(self, message: ProcessReport | Stop) -> None:
        if self._socket is None:
            return  # the next coordinator is told
        try:
            self._socket.send(message)
        except OSError:
            log.info("the coordinator is gone: %s waits for the next", message)

    def _is_asked_for(self, report: ProcessReport) -> bool:
        """Whether a report is of the newest process of its number, and not of one that it replaces."""
        return self._asked.get(report.index) == report.incarnation

    def _take_report(self, report: Report) -> None:
        if isinstance(report, AgentLost):
            self._heard_s = time.monotonic()  # a coordinator that was asked for has to wait for the next agent
            if report.keeps_processes:
                self._monitor.emit(events.ForkServerLost(pid=report.pid, reason=report.how))
            self._monitor.emit(events.Warned(message=report.how))
        elif isinstance(report, EngineWaits):
            self._monitor.emit(events.Warned(message=report.how))
        elif isinstance(report, CannotStart):
            raise TrainingError(f"a process of the run cannot be started: {report.reason}")
        elif report.index != COORDINATOR:
            if self._is_asked_for(report):
                if isinstance(report, Exited):
                    self._exited[report.index] = report
                if self._is_up:
                    self._send(report)
        elif isinstance(report, Started):
            self._pid = report.pid
            self._monitor.emit(events.CoordinatorStarted(pid=report.pid))
        elif isinstance(report, Exited):
            self._restart(report)

    def _restart(self, exited: Exited) -> None:
        """The coordinator is dead: start another, unless that is of no use."""
        if self._socket is not None:  # its last words
            self._receive(self._socket)
        if self._ended is not None:
            return
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        how = exited.describe()
        if exited.status >= 0:
            raise TrainingError(f"the coordinator {how}; its log is {self._log}")
        self._num_deaths += 1
        now_s = time.monotonic()
        self._deaths.append(now_s)
        if self._unjournalled:
            raise TrainingError(f"the coordinator {how}, and it has no journal to continue from ({self._unjournalled})")
        if len(self._deaths) == MOST_DEATHS and now_s - self._deaths[0] < DEATHS_WITHIN_S:
            raise TrainingError(
                f"the coordinator {how}, the {MOST_DEATHS}th time within {DEATHS_WITHIN_S:g} s; its log is {self._log}"
            )
        self._monitor.emit(events.CoordinatorLost(pid=exited.pid, reason=how))
        self._monitor.emit(events.Warned(message=f"the coordinator {how}: another takes up where it was"))
        self._start()

    def _check_silence(self) -> None:
        """Kill a coordinator that has frozen: its exit then brings it back."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s <= self._failure_timeout_s:
            return
        if self._socket is None and silent_s > STARTUP_TIMEOUT_S:
            raise TrainingError(f"the coordinator did not start within {STARTUP_TIMEOUT_S:g} s; its log is {self._log}")
        # One that only waits, for a server that gives another everything, say, has its time.
        if is_stopped(self._pid) or silent_s > STARTUP_TIMEOUT_S:
            self._engine.signal(COORDINATOR, "kill")
