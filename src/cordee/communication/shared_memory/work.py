"""What a caller gets of an operation that was started: a work, its future, and callbacks in one order on all ranks.

A callback may start collectives of its own, as torch's PowerSGD hook does. Where they come among the other collectives
must not depend on when a peer arrived, or ranks would mix them up. So a callback that was attached to a future counts
as called there: if the operation is not done yet, a thread of the group calls it later, and the next collective of the
group waits until it has returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from cordee.core.errors import CommunicationError

# Set in a thread while it completes a future, which is when callbacks run.
_here = threading.local()


def is_in_callback() -> bool:
    return getattr(_here, "is_completing", False)


class CordeeWork(Work):
    """An operation that was started: wait for it, ask whether it is done, or take its future."""

    def __init__(self, result: Any, *, done: bool, callbacks: Callbacks | None = None) -> None:
        super().__init__()
        self._result = result
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._done = done
        self._finished = None if done else threading.Event()
        self._error: BaseException | None = None
        self._future: CordeeFuture | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done, or failed with `error`; wakes those who wait and completes the future."""
        with self._lock:
            self._error = error
            self._done = True
            has_future = self._future is not None
        if self._finished is not None:
            self._finished.set()
        if has_future:
            if self._callbacks is None:
                self.complete()
            else:
                self._callbacks.call(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raises the operation's error, or CommunicationError after `timeout`."""
        if not self._done:
            assert self._finished is not None
            limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not self._finished.wait(limit_s):
                raise CommunicationError(f"the operation was not done within the {limit_s:g} s given to wait()")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return list(self._result)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the result tensors. In a callback it is done: no other thread could complete it."""
        if is_in_callback() and not self._done:
            self._wait_quietly()
        if self._done and self._callbacks is not None:
            self._callbacks.drain()  # an earlier work's come first
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = CordeeFuture(self._callbacks)
            done = self._done
        if done:
            self.complete()
        return self._future

    def complete(self) -> None:
        """Give the future its value, and call what was attached to it, in this thread."""
        assert self._future is not None
        was_completing = is_in_callback()
        _here.is_completing = True
        try:
            if self._error is None:
                self._future.set_result(self._result)
            elif isinstance(self._error, Exception):
                self._future.set_exception(self._error)
            else:
                self._future.set_exception(CommunicationError(f"interrupted: {self._error!r}"))
        finally:
            _here.is_completing = was_completing
            if self._callbacks is not None:
                self._callbacks.settle(self._future)

    def _wait_quietly(self) -> None:
        """Block until done, well or not: for the future, which carries the error."""
        assert self._finished is not None
        self._finished.wait()


class CordeeFuture(torch.futures.Future[Any]):
    """A future whose group knows of its callbacks. Those that C++ attaches, as DDP does, start nothing: not counted."""

    def __init__(self, callbacks: Callbacks | None) -> None:
        super().__init__()
        self._callbacks = callbacks
        self.is_settled = False  # it is done, and everything attached before that has been called

    def then(self, callback: Callable[..., Any]) -> Any:
        if self._callbacks is not None:
            self._callbacks.expect(self)
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        if self._callbacks is not None:
            self._callbacks.expect(self)
        super().add_done_callback(callback)


class Callbacks:
    """Completes the futures of one group that were taken before their work was done, in the order of the works.

    In a thread of its own: a callback may wait for another collective, which the conductor's thread must be free to
    run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[CordeeWork] = deque()
        self._expected: set[CordeeFuture] = set()  # with callbacks that have not all returned
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, future: CordeeFuture) -> None:
        """Let the next collective wait for what is being attached to this future."""
        with self._changed:
            if not future.is_settled and not self._closed:
                self._expected.add(future)

    def drain(self) -> None:
        """Wait until the callbacks attached so far have returned, unless called from one."""
        if self._expected and not is_in_callback():
            with self._changed:
                self._changed.wait_for(lambda: not self._expected)

    def call(self, work: CordeeWork) -> None:
        """Have the future of a work that is done completed; local, returns at once."""
        with self._changed:
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"cordee-{self._name}-callbacks", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, future: CordeeFuture) -> None:
        with self._changed:
            future.is_settled = True
            self._expected.discard(future)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread when it has completed what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                work = self._queue.popleft()
            work.complete()
            del work  # its tensors are not to live until the next one comes
