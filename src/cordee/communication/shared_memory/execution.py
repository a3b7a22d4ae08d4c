"""Running collectives: in the caller when that is quickest, in a thread when a peer lets wait.

A collective called synchronously runs in the caller. One called asynchronously starts in the caller too, because a
hand-over between threads costs more than most collectives; only when a peer has not come within `patience_s` does
the group's thread take the rest over. Collectives of a group run one after the other, in the order of the calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.communication.shared_memory.liveness import Verdict
from cordee.communication.shared_memory.rounds import Need, Rounds, Steps, WaitTimeoutError
from cordee.communication.shared_memory.signature import describe
from cordee.communication.shared_memory.work import Callbacks, CordeeWork
from cordee.core.errors import CommunicationError


@dataclass
class _Job:
    steps: Steps
    need: Need | None  # what it waits for, once begun
    work: CordeeWork
    after: Callable[[], None] | None
    timeout_s: float


class Conductor:
    """Runs the collectives of one group in order."""

    def __init__(self, rounds: Rounds, timeout_s: float, patience_s: float, name: str) -> None:
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._name = name
        self._turn = threading.Lock()  # held by the caller that runs or queues a collective
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()  # the first is being run by the thread
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken: str | None = None
        self._callbacks = Callbacks(name)

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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)
        self._callbacks.close()

    def _work(self, result: Any) -> CordeeWork:
        return CordeeWork(result, done=False, callbacks=self._callbacks)

    def _drive(self, steps: Steps, need: Need | None, timeout_s: float, *, give_up: bool = True) -> Need | None:
        """Run steps; with `give_up=False` return what is still waited for when the time is over."""
        wait = self._rounds.wait
        try:
            if need is not None:
                wait(need, timeout_s)
            for need in steps:
                wait(need, timeout_s)
        except WaitTimeoutError:
            if not give_up:
                return need
            assert need is not None
            error = self._late(need, timeout_s)
            self._broken = str(error)
            raise error from None
        except BaseException as error:
            self._fail(error)
            raise
        return None

    def _hand_over(self, job: _Job) -> CordeeWork:
        with self._changed:
            self._queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"cordee-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job.work

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._queue[0]
            error: BaseException | None = None
            try:
                if self._broken is not None:
                    raise self._refusal()
                self._drive_in_background(job)
                if job.after is not None:
                    job.after()
            except BaseException as caught:  # noqa: BLE001 - handed to the one who waits
                error = caught
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()
            job.work.finish(error)
            del job, error  # the tensors are not to live until the next one comes

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
                self._broken = str(error)
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
        return rounds.watch.blame(Verdict(late[0] if late else 0, message))

    def _fail(self, error: BaseException) -> None:
        self._broken = str(error) or repr(error)
        self._rounds.watch.give_up()

    def _refusal(self) -> CommunicationError:
        return CommunicationError(
            f"this process group can not be used any more after: {self._broken}; destroy it and form a new one"
        )
