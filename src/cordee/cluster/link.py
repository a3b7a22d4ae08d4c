"""A worker's side of the run: joins, shows that it lives, passes events on, hears what to do."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from cordee.cluster.coordinator import WORKER_PREFIX
from cordee.communication.channel import ClientChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import COORDINATION, Directive, Event, Failure, Goodbye, Heartbeat, Hello, Welcome
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError


class CoordinatorLink:
    """A worker's connection to the coordinator. A thread keeps it alive from `join` to `leave`."""

    def __init__(self, address: str, run: str, worker_index: int, keys: ClientKeys) -> None:
        name = f"{WORKER_PREFIX}{worker_index}"
        speaker = Speaker(run=run, name=name, incarnation=time.time_ns())
        self._channel = ClientChannel(address, speaker, Codec(COORDINATION), keys)
        self._directives: queue.SimpleQueue[Directive] = queue.SimpleQueue()
        self._is_stop_asked = False
        self._is_leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._timeout_s = 5.0
        self.step = 0  # told with each heartbeat

    @property
    def is_stop_asked(self) -> bool:
        return self._is_stop_asked

    def join(self, timeout_s: float) -> Directive:
        """Register, and return the first directive: who is in the team."""
        hello = Hello(role="worker", pid=os.getpid(), host=socket.gethostname())
        reply = self._channel.request(hello, timeout_s=timeout_s).message
        assert isinstance(reply, Welcome), reply
        self._timeout_s = reply.failure_timeout_s
        self._thread = threading.Thread(
            target=self._keep_alive, args=(reply.heartbeat_s,), name="cordee-heartbeat", daemon=True
        )
        self._thread.start()
        try:
            return self._directives.get(timeout=timeout_s)
        except queue.Empty:
            raise CommunicationError(f"the others did not join within {timeout_s:g} s") from None

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
        next_s = 0.0
        while not self._is_leaving.is_set():
            try:
                if time.monotonic() >= next_s:
                    self._channel.send(Heartbeat(self.step), timeout_s=heartbeat_s)
                    next_s = time.monotonic() + heartbeat_s
                received = self._channel.receive(heartbeat_s / 2)
            except CommunicationError:
                if self._is_leaving.wait(heartbeat_s):
                    return
                continue  # the coordinator may come back; if the launcher died, so do we
            if received is not None and isinstance(received.message, Directive):
                if received.message.action == "stop":
                    self._is_stop_asked = True
                else:
                    self._channel.generation = max(self._channel.generation, received.envelope.generation)
                    self._directives.put(received.message)

    def __enter__(self) -> CoordinatorLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
