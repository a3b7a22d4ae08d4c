"""A thread that makes things ready while they are not yet asked for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_background(produce: Callable[[], Iterator[T]], ahead: int) -> Generator[T, None, None]:
    """Yield what `produce()` yields, made in a thread that stays at most `ahead` things in front.

    An exception of the producer is raised here, in its place in the order. Closing the generator (also by
    KeyboardInterrupt, or by dropping it) ends the thread before it returns.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(maxsize=max(1, ahead))
    is_closed = threading.Event()

    def offer(item: tuple[T | None, BaseException | None, bool]) -> bool:
        while not is_closed.is_set():
            try:
                ready.put(item, timeout=1.0)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            for thing in produce():
                if not offer((thing, None, False)):
                    return
            offer((None, None, True))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, who raises it
            offer((None, error, True))

    thread = threading.Thread(target=run, name="cordee-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            thing, error, is_last = ready.get()
            if error is not None:
                raise error
            if is_last:
                return
            yield thing  # type: ignore[misc]  # T may itself include None
    finally:
        is_closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # a thread that waits for room sees at once that it is not needed any more
                ready.get_nowait()
        thread.join()
