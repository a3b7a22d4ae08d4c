"""The coordinator's connection to its launcher: an engine, a monitor and a journal in one, kept consistent.

What is asked for during a turn is held back until `commit` has written it down with the state it follows from.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from cordee.cluster.engine import Action, ProcessReport, ProcessSpec
from cordee.cluster.journal import JOURNAL_FILE, Journal
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
    ToCoordinator,
    Unjournalled,
    connect,
)
from cordee.core.errors import CordeeError, StorageError
from cordee.core.fault_points import reach
from cordee.monitoring.events import AnyEvent, stamp

log = logging.getLogger("cordee.coordinator")

STARTUP_TIMEOUT_S = 120.0  # of a process: importing torch on a busy machine, and loading the data
TICK_S = 0.02  # that a coordinator waits for messages in each turn
SHOW_EVERY_S = 0.1


class LauncherSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator needs for its connection to the launcher."""

    folder: str  # where the launcher listens
    run_dir: str
    run_id: str
    alive_every_s: float


class _Effects(msgspec.Struct, frozen=True):
    num_commands: int  # so far
    commands: list[NumberedCommand]


class LauncherLink:
    """One coordinator's connection. `restored` is what the last `commit` of an earlier one said, if there was one."""

    def __init__(self, spec: LauncherSpec) -> None:
        self._spec = spec
        self._socket = FramedSocket(connect(Path(spec.folder)), ToCoordinator)
        self._pending: list[NumberedCommand] = []
        self._num_commands = 0
        self._is_stop_asked = False
        self._next_alive_s = self._next_show_s = 0.0
        self._journal: Journal | None = None
        self.restored: bytes | None = None
        try:
            self._journal = Journal(Path(spec.run_dir) / JOURNAL_FILE, spec.run_id)
            self._restore(self._journal)
        except StorageError as error:
            self._give_up_journal(error, is_forgotten=True)

    def _restore(self, journal: Journal) -> None:
        entry = journal.load()
        if entry is None:
            return
        effects = msgspec.msgpack.decode(entry.effects, type=_Effects)
        self.restored = entry.state
        self._num_commands = effects.num_commands
        for command in effects.commands:  # they may not all have been sent
            reach("launcher_link.again")
            self._socket.send(command)

    def commit(self, state: bytes) -> None:
        """Write the state down with what was asked for since the last commit, then send that off."""
        if self._journal is not None:
            effects = _Effects(self._num_commands, self._pending)
            try:
                self._journal.commit(state, msgspec.msgpack.encode(effects))
            except StorageError as error:
                self._give_up_journal(error)
        self.flush()

    def flush(self) -> None:
        """Send off what was asked for, as it is."""
        commands, self._pending = self._pending, []
        for command in commands:
            reach("launcher_link.command")
            self._socket.send(command)

    def _give_up_journal(self, error: StorageError, *, is_forgotten: bool = False) -> None:
        log.warning("%s", error)
        if self._journal is not None:
            self._journal.close()
        self._journal = None
        self._socket.send(Unjournalled(str(error), is_forgotten))

    @property
    def has_pending(self) -> bool:
        """Whether anything waits for a commit."""
        return bool(self._pending)

    def should_stop(self) -> bool:
        """Whether the user wants the run to end."""
        return self._is_stop_asked

    def emit(self, event: AnyEvent) -> None:
        """Have an event recorded and shown: one of the coordinator's own, or one that a member has reported."""
        self._ask(Emit(stamp(event, "coordinator")))

    def progress(self, step: int, loss: float | None) -> None:
        """Show where training is, now and then. Not written down."""
        now_s = time.monotonic()
        if now_s >= self._next_show_s:
            self._next_show_s = now_s + SHOW_EVERY_S
            self._socket.send(Show(step, None if loss is None or math.isnan(loss) else loss))

    def start(self, spec: ProcessSpec) -> None:
        """Ask for a process; `reports` tells its pid."""
        self._ask(spec)

    def signal(self, index: int, action: Action) -> None:
        """Have a signal sent to a process that may have ended."""
        self._ask(Signal(index, action))

    def reports(self) -> Iterator[ProcessReport]:
        """Yield what happened to processes. One that comes back hears of each process once more."""
        now_s = time.monotonic()
        if now_s >= self._next_alive_s:
            self._next_alive_s = now_s + self._spec.alive_every_s
            self._socket.send(Alive())
        for message in self._socket.receive():
            if isinstance(message, Stop):
                self._is_stop_asked = True
            else:
                yield message

    def end(self, result: Any) -> None:
        self._socket.send(Ended(result))

    def fail(self, error: CordeeError) -> None:
        """Have the launcher raise the error."""
        self._socket.send(Ended(error_kind=type(error).__name__, error=str(error)))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._socket.close()

    def _ask(self, command: Command) -> None:
        self._num_commands += 1
        self._pending.append(NumberedCommand(self._num_commands, command))

    def __enter__(self) -> LauncherLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
