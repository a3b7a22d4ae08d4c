"""The logs of all members of a run as one, in the order of time."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cordee.core.errors import RunDirectoryError
from cordee.monitoring.files import open_regular

_LONGEST_LINE = 16_384  # characters; the rest is not shown
_MOST_MEMBERS = 1000


class LogLine(NamedTuple):
    """A line of a member's log; a line without a time has that of the line before."""

    time: str  # "2026-11-18 10:54:05,123"; sorts as text
    member: str
    text: str


class Logs:
    """The log files of a run, which are read on from where they were read last.

    Of each file at most the last `most_bytes` are read, if that is given. Links are not followed.
    """

    def __init__(self, run: Path, member: str = "", *, most_bytes: int | None = None) -> None:
        self._folder = run / "logs"
        self._member = member
        self._most_bytes = most_bytes
        self._offsets: dict[str, int] = {}
        self._times: dict[str, str] = {}

    def members(self) -> list[str]:
        """Return whose logs there are."""
        if self._folder.is_symlink():
            return []
        try:
            names = sorted(path.name for path in self._folder.iterdir() if path.suffix == ".log")
        except OSError:
            return []
        return [name.removesuffix(".log") for name in names[:_MOST_MEMBERS]]

    def new_lines(self) -> list[LogLine]:
        """Return what was written since the last call, all members' in the order of their times.

        Raises RunDirectoryError if there is no log of the member that was asked for.
        """
        found = self.members()
        wanted = [name for name in found if self._is_wanted(name)]
        if self._member and found and not wanted:
            raise RunDirectoryError(f"there is no log of {self._member!r}: there are {', '.join(found)}")
        return list(heapq.merge(*(list(self._read(name)) for name in wanted), key=lambda line: line.time))

    def _is_wanted(self, name: str) -> bool:
        asked = self._member.replace(" ", "-")
        return not asked or asked in (name, name.removeprefix("worker-"))

    def _read(self, name: str) -> Iterator[LogLine]:
        offset = self._offsets.get(name, 0)
        try:
            with open_regular(self._folder / f"{name}.log") as file:
                if self._most_bytes is not None and file.seek(0, os.SEEK_END) - offset > self._most_bytes:
                    offset = file.seek(-self._most_bytes, os.SEEK_END)
                    offset += len(file.readline(self._most_bytes))  # the rest of a line
                file.seek(offset)
                # A line that is being written is left for the next time.
                content, end, _ = file.read(-1 if self._most_bytes is None else self._most_bytes).rpartition(b"\n")
        except (OSError, RunDirectoryError):
            return
        if not end:
            return
        self._offsets[name] = offset + len(content) + 1
        for line in content.split(b"\n"):
            text = printable(line[: 4 * _LONGEST_LINE].decode(errors="replace"), _LONGEST_LINE)
            if _has_time(text):
                self._times[name] = text[:23]
            yield LogLine(self._times.get(name, ""), name, text)


def printable(text: str, most: int = 2000) -> str:
    """Return a text of a run without characters that move a cursor or change colours, and not too long."""
    return "".join(
        each if each in "\t\n" or each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:most]
    )


def _has_time(text: str) -> bool:
    return len(text) > 23 and text[4] == text[7] == "-" and text[13] == text[16] == ":" and text[:4].isdecimal()
