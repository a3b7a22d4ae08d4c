"""A worker's side of the run: joins, shows that it lives, passes events on, hears what to do."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from cordee.cluster.coordinator import WORKER_PREFIX
from cordee.communication.channel import ClientChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import (
    COORDINATION,
    Directive,
    Event,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    Ready,
    Welcome,
)
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError

LONGEST_NAP_S = 0.25  # between two looks at whether this worker wants to leave


class Answer(NamedTuple):
    """What a worker that was ready is told to do."""

    directive: Directive
    generation: int


class CoordinatorLink:
    """A worker's connection to the coordinator. A thread keeps it alive from `join` to `leave`."""

    def __init__(self, address: str, run: str, worker_index: int, keys: ClientKeys) -> None:
        name = f"{WORKER_PREFIX}{worker_index}"
        speaker = Speaker(run=run, name=name, incarnation=time.time_ns())
        self._channel = ClientChannel(address, speaker, Codec(COORDINATION), keys)
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._is_stop_asked = False
        self._is_pause_asked = False
        self._wants_to_leave = False
        self._is_leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._timeout_s = 5.0
        self.step = 0  # told with each heartbeat

    @property
    def is_stop_asked(self) -> bool:
        return self._is_stop_asked

    @property
    def is_pause_asked(self) -> bool:
        """Whether the team is to be formed anew after this step."""
        return self._is_pause_asked

    def join(self, timeout_s: float) -> None:
        """Register, and show signs of life from now on."""
        hello = Hello(role="worker", pid=os.getpid(), host=socket.gethostname())
        reply = self._channel.request(hello, timeout_s=timeout_s).message
        assert isinstance(reply, Welcome), reply
        self._timeout_s = reply.failure_timeout_s
        self._thread = threading.Thread(
            target=self._keep_alive, args=(reply.heartbeat_s,), name="cordee-heartbeat", daemon=True
        )
        self._thread.start()

    def await_generation(self, step: int, *, has_dropped: bool, reason: str = "") -> Answer:
        """Say that this worker is ready, with `step` steps taken or -1 for nothing, and wait for what to do.

        Waits as long as it takes: the others may still be loading their data. If the launcher dies, so do we.
        """
        self._channel.send(Ready(step, has_dropped, reason[:4000]), timeout_s=self._timeout_s)
        return self._answers.get()

    def ask_to_leave(self) -> None:
        """Have the coordinator told that this worker must go. For signal handlers: returns at once."""
        self._wants_to_leave = True

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        self._channel.send(Event(kind, fields), timeout_s=self._timeout_s)

    def fail(self, error: BaseException, step: int) -> None:
        """Report the error this worker ends with; the loss of a peer is a consequence, anything else a cause."""
        text = "".join(traceback.format_exception(error))[-60_000:]
        line = f"raised {type(error).__name__}: {error}"[:4000]
        is_consequence = isinstance(error, CommunicationError)
        self._channel.send(Failure(step, line, text, is_consequence), timeout_s=self._timeout_s)

    def leave(self) -> None:
        """Say goodbye: this worker is done."""
        self._channel.send(Goodbye(), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._is_leaving.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _keep_alive(self, heartbeat_s: float) -> None:
        next_s, has_asked = 0.0, False
        while not self._is_leaving.is_set():
            try:
                if self._wants_to_leave and not has_asked:
                    self._channel.send(Leaving(), timeout_s=heartbeat_s)
                    has_asked = True
                if time.monotonic() >= next_s:
                    self._channel.send(Heartbeat(self.step), timeout_s=heartbeat_s)
                    next_s = time.monotonic() + heartbeat_s
                received = self._channel.receive(min(heartbeat_s / 2, LONGEST_NAP_S))
            except CommunicationError:
                if self._is_leaving.wait(heartbeat_s):
                    return
                continue  # the coordinator may come back; if the launcher died, so do we
            if received is not None and isinstance(received.message, Directive):
                self._obey(received.message, received.envelope.generation)

    def _obey(self, directive: Directive, generation: int) -> None:
        if directive.action == "stop":
            self._is_stop_asked = True
        elif directive.action == "pause":
            self._is_pause_asked = generation >= self._channel.generation  # not one of an earlier generation
        else:
            self._is_pause_asked = False
            self._channel.generation = max(self._channel.generation, generation)
            self._answers.put(Answer(directive, generation))

    def __enter__(self) -> CoordinatorLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
