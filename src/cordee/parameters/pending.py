"""Operations under way: handles to wait for, and the queue that runs the most urgent first.

Operations on one key run in the order they were asked for, whatever their priorities.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cordee.core.errors import StoreError

NUM_THREADS = 2


class Handle:
    """An operation that was begun; `wait` returns what the synchronous one would."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._is_done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end; raises what the operation raised, StoreError after `timeout_s`.

        Without `timeout_s` it ends with the operation, which has deadlines of its own.
        """
        if not self._is_done.wait(timeout_s):
            raise StoreError(f"the operation on {', '.join(map(repr, self._keys))} has not ended after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._is_done.set()


class JointHandle(Handle):
    """Several operations as one."""

    def __init__(self, keys: Sequence[str], handles: Sequence[Handle]) -> None:
        super().__init__(keys)
        self._handles = handles

    @property
    def is_done(self) -> bool:
        return all(handle.is_done for handle in self._handles)

    def wait(self, timeout_s: float | None = None) -> Any:
        return [handle.wait(timeout_s) for handle in self._handles]


class CallQueue:
    """Runs operations in threads, which start with the first one and end with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._order = itertools.count()
        self._ready: list[tuple[float, int, str]] = []  # keys whose first operation may run
        self._waiting: dict[str, deque[tuple[float, int, Callable[[], Any], Handle]]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.num_open = 0  # operations that have not ended

    def submit(self, key: str, priority: float, operation: Callable[[], Any]) -> Handle:
        """Run `operation` when its turn comes: after those on its key, before those of lower priority."""
        handle = Handle([key])
        with self._lock:
            if self._is_closed:
                raise StoreError("the store is closed")
            while len(self._threads) < NUM_THREADS:
                thread = threading.Thread(target=self._work, name=f"cordee-store-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            number = next(self._order)
            queue = self._waiting.get(key)
            if queue is None:
                queue = self._waiting[key] = deque()
                heapq.heappush(self._ready, (-priority, number, key))
                self._lock.notify()
            queue.append((priority, number, operation, handle))
            self.num_open += 1
        return handle

    def wait_idle(self, key: str | None = None) -> None:
        """Wait until nothing is under way for a key, or for any."""
        with self._lock:
            while self.num_open if key is None else key in self._waiting:
                self._lock.wait()

    def close(self) -> None:
        """End the threads after the operations that run; those that wait fail."""
        with self._lock:
            self._is_closed = True
            self._ready.clear()
            self._lock.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._lock:
            left = [handle for queue in self._waiting.values() for _, _, _, handle in queue]
            self._waiting.clear()
            self.num_open = 0
            self._lock.notify_all()
        for handle in left:
            handle._finish(None, StoreError("the store was closed before this operation began"))

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._ready and not self._is_closed:
                    self._lock.wait()
                if not self._ready:
                    return
                _, _, key = heapq.heappop(self._ready)
                _, _, operation, handle = self._waiting[key][0]
            result, failure = None, None
            try:
                result = operation()
            except BaseException as error:  # noqa: BLE001 - raised where the handle is waited for
                failure = error
            with self._lock:
                queue = self._waiting[key]
                queue.popleft()
                self.num_open -= 1
                if not queue:
                    del self._waiting[key]
                elif not self._is_closed:
                    heapq.heappush(self._ready, (-queue[0][0], queue[0][1], key))
                self._lock.notify_all()
            handle._finish(result, failure)
