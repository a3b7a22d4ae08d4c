"""Running collectives: in the caller when that is quickest, in a thread when a peer lets wait.

A collective called synchronously runs in the caller. One called asynchronously starts in the caller too, because a
hand-over between threads costs more than most collectives; only when a peer has not come within `patience_s` does
the group's thread take the rest over. Collectives of a group run one after the other, in the order of the calls.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from cordee.communication.shared_memory.liveness import PeerFailure
from cordee.communication.shared_memory.rounds import Need, Rounds, Steps, WaitTimeoutError, describe
from cordee.core.blocked_time import BLOCKED
from cordee.core.errors import CommunicationError

T = TypeVar("T")


@dataclass
class _Job:
    steps: Steps
    need: Need | None  # what it waits for, once begun
    work: CordeeWork
    after: Callable[[], None] | None
    timeout_s: float


class QueueThread(ABC, Generic[T]):
    """Does what it is handed over in a thread, in order. The thread is started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[T] = deque()  # the thread is busy with the first
        self._thread: threading.Thread | None = None
        self._closed = False

    def hand_over(self, item: T) -> None:
        """Have it done; local, returns at once."""
        with self._changed:
            self._queue.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread when it has done what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    @abstractmethod
    def _perform(self, item: T) -> BaseException | None:
        """Do it in the thread; return the error to be handed to the one who waits."""

    def _finish(self, item: T, error: BaseException | None) -> None:
        """The item is not in the queue any more."""

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                item = self._queue[0]
            error = self._perform(item)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()
            self._finish(item, error)
            del item, error  # the tensors are not to live until the next one comes


class CollectiveExecutor(QueueThread[_Job]):
    """Runs the collectives of one group in order."""

    def __init__(self, rounds: Rounds, timeout_s: float, patience_s: float, name: str) -> None:
        super().__init__(f"cordee-{name}")
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._turn = threading.Lock()  # held by the caller that runs or queues a collective
        self._broken: str | None = None
        self._callbacks = Callbacks(name)
        self.on_failure: Callable[[BaseException], None] = lambda _: None  # tells those who do not share memory

    def run(self, steps: Steps, timeout_s: float | None = None) -> None:
        """Run a collective to its end in the caller.

        Raises CommunicationError if a peer dies, freezes, leaves, does something else, or does not come in time;
        the group can not be used any more after that.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._callbacks.drain()
        with self._turn:
            if self._queue:
                with self._changed:
                    self._changed.wait_for(lambda: not self._queue)
            if self._broken is not None:
                raise self._refusal()
            if not BLOCKED.is_on:  # a block that counts nothing still costs 0.35 µs
                self._drive(steps, None, limit_s)
                return
            with BLOCKED:
                self._drive(steps, None, limit_s)

    def start(
        self,
        steps: Steps,
        result: Any,
        after: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        *,
        inline: bool = True,
    ) -> CordeeWork:
        """Begin a collective; `after` runs when it is done, in whichever thread that is.

        With `inline=False` it goes to the thread at once: for one that waits for other hosts.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._callbacks.drain()
        with self._turn:
            if self._queue or not inline:
                return self._hand_over(_Job(steps, None, self._work(result), after, limit_s))
            try:
                if self._broken is not None:
                    raise self._refusal()
                with BLOCKED:
                    need = self._drive(steps, None, min(self._patience_s, limit_s), give_up=False)
                if need is not None:
                    return self._hand_over(_Job(steps, need, self._work(result), after, limit_s))
                if after is not None:
                    after()
            except CommunicationError as error:
                work = self._work(result)
                work.finish(error)
                return work
        return CordeeWork(result, done=True, callbacks=self._callbacks)

    def close(self) -> None:
        """Fail what is still queued and end the thread."""
        super().close()
        self._callbacks.close()

    def _work(self, result: Any) -> CordeeWork:
        return CordeeWork(result, done=False, callbacks=self._callbacks)

    def _drive(self, steps: Steps, need: Need | None, timeout_s: float, *, give_up: bool = True) -> Need | None:
        """Run steps; with `give_up=False` return what is still waited for when the time is over."""
        wait = self._rounds.wait
        try:
            if need is not None:
                wait(need, timeout_s)
            else:
                self._rounds.is_arriving = True
            for need in steps:
                wait(need, timeout_s)
        except WaitTimeoutError:
            if not give_up:
                return need
            assert need is not None
            error = self._late(need, timeout_s)
            self._fail(error)
            raise error from None
        except BaseException as error:
            self._fail(error)
            raise
        return None

    def _hand_over(self, job: _Job) -> CordeeWork:
        self.hand_over(job)
        return job.work

    def _perform(self, job: _Job) -> BaseException | None:
        try:
            if self._broken is not None:
                raise self._refusal()
            self._drive_in_background(job)
            if job.after is not None:
                job.after()
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits
            return error
        return None

    def _finish(self, job: _Job, error: BaseException | None) -> None:
        job.work.finish(error)

    def _drive_in_background(self, job: _Job) -> None:
        # In short turns, so that close() is noticed.
        left_s, need = job.timeout_s, job.need
        while True:
            need = self._drive(job.steps, need, min(left_s, 0.25), give_up=False)
            if need is None:
                return
            left_s -= 0.25
            if self._closed:
                raise CommunicationError("the process group was destroyed before the operation was done")
            if left_s <= 0:
                error = self._late(need, job.timeout_s)
                self._fail(error)
                raise error

    def _late(self, need: Need, timeout_s: float) -> CommunicationError:
        rounds = self._rounds
        late = [rounds.watch.rank_of(word) for word in need[0] if rounds.words[word] < need[1]]
        doing = describe(rounds.own_signature())
        names = " and ".join(f"rank {rank}" for rank in late)
        message = (
            f"{names} did not come to {doing} within the timeout of {timeout_s:g} s: raise `timeout` of "
            "init_process_group if the ranks may be that far apart, or look for a rank that skips the call"
        )
        return rounds.watch.blame(PeerFailure(late[0] if late else 0, message))

    def _fail(self, error: BaseException) -> None:
        self._broken = str(error) or repr(error)
        self.on_failure(error)
        self._rounds.watch.give_up()

    def _refusal(self) -> CommunicationError:
        return CommunicationError(
            f"this process group can not be used any more after: {self._broken}; destroy it and form a new one"
        )


# What a caller gets of an operation that was started: a work, its future, and callbacks in one order on all ranks.
#
# A callback may start collectives of its own, as torch's PowerSGD hook does. Where they come among the other
# collectives must not depend on when a peer arrived, or ranks would mix them up. So a callback that was attached to a
# future counts as called there: if the operation is not done yet, a thread of the group calls it later, and the next
# collective of the group waits until it has returned.

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
                self._callbacks.hand_over(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raises the operation's error, or CommunicationError after `timeout`."""
        if not self._done:
            assert self._finished is not None
            limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            with BLOCKED:
                is_finished = self._finished.wait(limit_s)
            if not is_finished:
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
                self._future.set_exception(_raised_in_native_code(self._error))
            else:
                interrupted = CommunicationError(f"interrupted: {self._error!r}")
                self._future.set_exception(_raised_in_native_code(interrupted))
        finally:
            _here.is_completing = was_completing
            if self._callbacks is not None:
                self._callbacks.run_pending(self._future)

    def _wait_quietly(self) -> None:
        """Block until done, well or not: for the future, which carries the error."""
        assert self._finished is not None
        self._finished.wait()


def _raised_in_native_code(error: Exception) -> Exception:
    """Return the error, which C++ that takes it for the value of a future now raises.

    A future of Python holds an error as a value that its own methods raise. DDP reads the value in C++: it pickles an
    object to find tensors in it, and takes the first one without asking whether there is any. With an error it found
    none and crashed (a survivor of a killed peer ended by SIGSEGV). So pickling this error raises it.
    """

    def refuse(protocol: object) -> NoReturn:
        raise error

    error.__reduce_ex__ = refuse  # type: ignore[method-assign]
    return error


class CordeeFuture(torch.futures.Future[Any]):
    """A future whose group knows of its callbacks. Those that C++ attaches, as DDP does, start nothing: not counted."""

    def __init__(self, callbacks: Callbacks | None) -> None:
        super().__init__()
        self._callbacks = callbacks
        self.has_called_all = False  # it is done, and everything attached before that has been called

    def then(self, callback: Callable[..., Any]) -> Any:
        if self._callbacks is not None:
            self._callbacks.expect(self)
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        if self._callbacks is not None:
            self._callbacks.expect(self)
        super().add_done_callback(callback)


class Callbacks(QueueThread["CordeeWork"]):
    """Completes the futures of one group that were taken before their work was done, in the order of the works.

    In a thread of its own: a callback may wait for another collective, which the executor's thread must be free to
    run.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"cordee-{name}-callbacks")
        self._expected: set[CordeeFuture] = set()  # with callbacks that have not all returned

    def expect(self, future: CordeeFuture) -> None:
        """Let the next collective wait for what is being attached to this future."""
        with self._changed:
            if not future.has_called_all and not self._closed:
                self._expected.add(future)

    def drain(self) -> None:
        """Wait until the callbacks attached so far have returned, unless called from one."""
        if self._expected and not is_in_callback():
            with self._changed:
                self._changed.wait_for(lambda: not self._expected)

    def run_pending(self, future: CordeeFuture) -> None:
        with self._changed:
            future.has_called_all = True
            self._expected.discard(future)
            self._changed.notify_all()

    def _perform(self, work: CordeeWork) -> None:
        work.complete()
