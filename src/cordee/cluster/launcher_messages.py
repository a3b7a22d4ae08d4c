"""What a coordinator has its launcher do for it, and what it hears of it, over a socket between the two.

The launcher has the terminal, the events file and the fork server; the coordinator decides. What is said is msgpack
with its length in front. Each command has a number and is done once, however often it is sent: a coordinator that
comes back sends those of its last journal entry again.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cordee.cluster.engine import Action, ProcessReport, ProcessSpec
from cordee.monitoring.events import AnyEvent

_LENGTH = struct.Struct("<I")


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to process `index`."""

    index: int
    action: Action


class Emit(msgspec.Struct, frozen=True, tag=True):
    """Something for the events file and the screen."""

    event: AnyEvent


Command = ProcessSpec | Signal | Emit


class NumberedCommand(msgspec.Struct, frozen=True, tag=True):
    """A command, and its place in the order of them all."""

    number: int
    command: Command


class Show(msgspec.Struct, frozen=True, tag=True):
    """Where training is, for the screen."""

    step: int
    loss: float | None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The coordinator is not frozen."""


class Unjournalled(msgspec.Struct, frozen=True, tag=True):
    """The journal could not be written: a coordinator that dies from here on cannot come back."""

    problem: str
    is_forgotten: bool = False  # nor could it be read: whatever an earlier coordinator knew is lost


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The run is over: its result, or the kind and text of the error it ended with."""

    result: Any = None
    error_kind: str = ""
    error: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The user wants the run to end."""


ToLauncher = NumberedCommand | Show | Alive | Unjournalled | Ended
ToCoordinator = ProcessReport | Stop


class FramedSocket:
    """One end of the socket. Blocks only to send; `receive` returns what is there."""

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._received = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToLauncher | ToCoordinator) -> None:
        """Raises OSError if the other end is gone."""
        body = msgspec.msgpack.encode(message)
        self._connection.setblocking(True)
        try:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
        finally:
            self._connection.setblocking(False)

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have come in. Raises EOFError, after the last of them, when the other end is gone."""
        is_over = False
        while True:
            try:
                chunk = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                is_over = True
                break
            self._received += chunk
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            body = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield self._decoder.decode(body)
        if is_over:
            raise EOFError

    def close(self) -> None:
        self._connection.close()


def listen(folder: Path) -> socket.socket:
    """Return a socket that coordinators find by `folder`."""
    listener = socket.socket(socket.AF_UNIX)
    with _short_path(folder) as path:
        listener.bind(path)
    listener.listen(1)
    listener.setblocking(False)
    return listener


def connect(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with _short_path(folder) as path:
        connection.connect(path)
    return connection


class _short_path:  # noqa: N801 - used like a function
    """A path of the socket in `folder` that fits into the 108 bytes there are for it, however long the folder's is."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._descriptor}/launcher"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
