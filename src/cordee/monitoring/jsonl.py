"""`events.jsonl`: one JSON object per line, on disk as soon as it has happened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import RunDirectoryError, StorageError
from cordee.monitoring.events import AnyEvent, Picture, UnreadableLine, decode_event
from cordee.monitoring.files import open_regular, reason, to_json
from cordee.monitoring.run_directory import EVENTS_FILE

_TAIL_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 24  # of a file that is read; nothing that a run writes is near to it
_SHOWN_BYTES = 1 << 10  # of a longer one
PICTURES = "pictures"  # folder of a run directory


class JsonlSink:
    """Appends events to a file; a resumed run continues in the same one.

    Each line is one write to the system, so a killed process loses none of its events. A last line that a
    crash of the machine or a full disk left incomplete is repaired when the file is opened, so that every line
    is valid JSON. Raises `StorageError` when the file cannot be opened or a line cannot be written; a line
    written in part is taken back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _repair_last_line(self._descriptor)
        except OSError as error:
            self.close()
            raise StorageError(f"cannot write {path}: {reason(error)}") from error

    def emit(self, event: AnyEvent) -> None:
        try:
            if isinstance(event, Picture):
                event = self._keep(event)
            line = to_json(event) + b"\n"
            _append_whole(self._descriptor, line)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {reason(error)}; events are not recorded from here on, training continues"
            ) from error

    def _keep(self, picture: Picture) -> Picture:
        """Write a picture to its own file, beside the events; return the event that names it."""
        folder = self.path.parent / PICTURES
        folder.mkdir(exist_ok=True)
        file = folder / f"{picture.name}-step-{picture.step}.png"
        file.write_bytes(picture.png)
        return msgspec.structs.replace(picture, path=f"{PICTURES}/{file.name}", png=b"")

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def append_event(run: Path, event: AnyEvent) -> None:
    """Add an event to those of a run that another process writes. Raises StorageError where that cannot be done.

    The line is one write at the end of the file, which does not mix with those of the launcher.
    """
    path = run / EVENTS_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _append_whole(descriptor, to_json(event) + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {reason(error)}") from error


def follow(run: Path, offset: int = 0, max_bytes: int = -1) -> tuple[list[AnyEvent | UnreadableLine], int]:
    """Return the events of a run directory from `offset` on, and the offset to ask with next time.

    Reads only what is new, at most about `max_bytes` of it if that is given: the offset stays where there is no more.
    A line that is still being written is left for the next time; one that cannot be decoded is an `UnreadableLine`.
    A run without events has none. Raises RunDirectoryError if the file cannot be read, or has become shorter than
    `offset`.
    """
    path = run / EVENTS_FILE
    try:
        with open_regular(path) as file:
            if file.seek(0, os.SEEK_END) < offset:
                raise RunDirectoryError(f"{path} is shorter than when it was read: it is the file of another run")
            file.seek(offset)
            content = file.read(max_bytes)
            if 0 < max_bytes == len(content) and b"\n" not in content:
                content += file.readline(_LONGEST_LINE_BYTES)  # one line that is longer than that
            new, end, _ = content.rpartition(b"\n")
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {reason(error)}") from error
    if not end and len(content) >= _LONGEST_LINE_BYTES:
        problem = f"a line of more than {_LONGEST_LINE_BYTES:,} bytes"
        return [UnreadableLine(offset, content[:_SHOWN_BYTES], problem)], offset + len(content)
    events = []
    for line in new.split(b"\n") if end else ():
        events.append(decode_event(line, offset))
        offset += len(line) + 1
    return events, offset


def read_events(path: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events in `path` in order, only those in the last `tail_bytes` if given.

    Lines that are no events (the last one of a run that is writing) are passed over. Raises RunDirectoryError if
    `path` is not a regular file.
    """
    with open_regular(path) as file:
        if tail_bytes is not None and file.seek(0, os.SEEK_END) > tail_bytes:
            file.seek(-tail_bytes, os.SEEK_END)
            file.readline()
        else:
            file.seek(0)
        while line := file.readline(_LONGEST_LINE_BYTES):
            event = _decode(line)
            if event is not None:
                yield event


def read_lines(path: Path) -> tuple[list[dict[str, Any] | None], bool]:
    """Return what each line of `path` says, None for one that is no event, and whether the last one has no end.

    An unfinished last line that is no event is not among them. Raises RunDirectoryError if `path` cannot be read or is
    not a regular file.
    """
    events, line = [], b"\n"
    try:
        with open_regular(path) as file:
            for line in file:
                events.append(_decode(line))
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {reason(error)}") from error
    is_cut = not line.endswith(b"\n") and events[-1] is None
    return (events[:-1] if is_cut else events), is_cut


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def _repair_last_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        length = min(_TAIL_BYTES, start)
        start -= length
        tail = os.pread(descriptor, length, start) + tail
    torn = tail.rpartition(b"\n")[2]
    if _decode(torn) is None:
        os.ftruncate(descriptor, size - len(torn))
    else:
        os.write(descriptor, b"\n")


def _append_whole(descriptor: int, line: bytes) -> None:
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise
