"""Ctrl-C and SIGTERM for a process that serves: it ends in order."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class EndSignals:
    """While entered in the main thread, a call tells whether one of the signals has come."""

    def __init__(self) -> None:
        self._has_come = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._has_come

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
