"""Ctrl-C and SIGTERM as a request: the first asks to stop after the step, a second Ctrl-C stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar

INTERRUPTED = 130  # the exit code of a program that was ended by Ctrl-C


class InterruptFlag:
    """While entered, takes SIGINT and SIGTERM; calling it returns whether one has come.

    Signals reach only the main thread: elsewhere this does nothing and the flag stays down.
    """

    any_raised: ClassVar[bool] = False  # whether the flag of this process that was entered last has been raised

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._is_raised = False
        self._previous: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self._is_raised

    def __enter__(self) -> InterruptFlag:
        InterruptFlag.any_raised = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_raised:
            if number == signal.SIGTERM:
                return  # schedulers send it more than once: to a job, and to each of its steps
            raise KeyboardInterrupt
        self._is_raised = True
        InterruptFlag.any_raised = True
        self._on_first()


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Give SIGINT and SIGTERM the handlers back that libraries replace by their own when they are initialised."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
