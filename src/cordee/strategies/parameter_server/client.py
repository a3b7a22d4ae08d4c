"""A worker's side of the servers: pushes while it still computes, pulls the first layers first, tries again.

A server that died comes back under another address, or its second takes over: what was not acknowledged is sent again.
Each unit counts once at the servers, so sending twice does no harm.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from cordee.communication.buffers import Buffer
from cordee.communication.calls import UNAVAILABLE, Connection, Connections
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach
from cordee.strategies.parameter_server.compression import Feedback, Follower, make_codec
from cordee.strategies.parameter_server.layout import Layout, Piece
from cordee.strategies.parameter_server.messages import Extras, Pull, Pulled, PullExtras, Push, Pushed, PushExtras
from cordee.strategies.parameter_server.settings import ParameterServerSettings

log = logging.getLogger(__name__)

_RETRY_S = 0.02


class Directory(Protocol):
    """Where servers are; asked again when one does not answer."""

    def connect(self, server: int) -> Connection:
        """Return a connection to a server that is up. Raises CommunicationError when there is none in time."""


class RetriedCalls:
    """Calls to servers that may go away and come back. Any thread may call."""

    def __init__(self, directory: Directory, patience_s: float, lose_messages: float = 0.0, seed: int = 0) -> None:
        self._connections = Connections(directory.connect)
        self._patience_s = patience_s
        self._lose = lose_messages
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # of the random numbers

    def call(
        self,
        server: int,
        message: Message,
        buffers: Sequence[Any] = (),
        *,
        receive: Callable[[Message, tuple[Buffer, ...]], Any] = lambda message, buffers: message,
        reply_bytes: int = 0,
    ) -> Any:
        """Make a call until it is answered. Raises CommunicationError when no server answers in time."""
        deadline = time.monotonic() + self._patience_s
        kind = type(message).__name__.lower()
        while True:
            connection: Connection | None = None
            try:
                connection = self._connections.get(server)
                reach(f"client.call.{kind}")
                if self._is_lost():  # the request
                    time.sleep(_RETRY_S)
                    continue
                result = connection.call(message, buffers, receive=receive, reply_bytes=reply_bytes)
                reach(f"client.answered.{kind}")
                if self._is_lost():  # the reply
                    continue
                return result
            except CommunicationError as error:
                if isinstance(error, RefusedError) and error.reason == "reply-too-large":
                    reply_bytes = max(2 * reply_bytes, 1 << 20)
                    continue
                if isinstance(error, RefusedError) and error.reason != UNAVAILABLE:
                    raise
                self._connections.drop(server, connection)
                if time.monotonic() > deadline:
                    raise
                log.info("server %d: %s; trying again", server, error)
                time.sleep(_RETRY_S)

    def close(self) -> None:
        for connection in self._connections.take_all():
            connection.close()

    def _is_lost(self) -> bool:
        if not self._lose:
            return False
        with self._lock:
            draw = self._random.random()
        if draw < self._lose / 3:  # overtaken by others
            time.sleep(draw / self._lose * 0.03)
        return draw > 1 - self._lose * 2 / 3


class ParameterClient:
    """Pushes a worker's flat gradient and pulls its flat parameters, piece by piece."""

    def __init__(self, layout: Layout, settings: ParameterServerSettings, calls: RetriedCalls, name: str) -> None:
        self.layout = layout
        self._settings = settings
        self._calls = calls
        self._name = name
        self._versions = [0] * len(layout.pieces)
        codecs = [make_codec(settings, piece.length, layout.dtype) for piece in layout.pieces]
        self._feedback = [Feedback(codec) for codec in codecs]
        self._followers = [Follower(codec, piece.length) for codec, piece in zip(codecs, layout.pieces, strict=True)]
        self._pool: ThreadPoolExecutor | None = None
        if len(layout.pieces) > 1:
            self._pool = ThreadPoolExecutor(min(len(layout.pieces), layout.num_servers * 2, 8), "cordee-push")

    def pull(self, flat: Tensor, settles: int = -1, scale: float = 1.0) -> None:
        """Bring all parameters up to date."""
        if self._pool is None:
            self._pull_piece(self.layout.pieces[0], flat, settles, scale)
            return
        waiting = [self._pool.submit(self._pull_piece, piece, flat, settles, scale) for piece in self.layout.pieces]
        for one in waiting:
            one.result()

    def start_push(self, piece: Piece, gradient: Tensor, push: Push) -> Future[Pushed]:
        """Send the gradient of one piece; `gradient` is that of all pieces, and must not change until it is through."""
        if self._pool is not None:
            return self._pool.submit(self._push_piece, piece, gradient, push)
        done: Future[Pushed] = Future()
        try:
            done.set_result(self._push_piece(piece, gradient, push))
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits, as a thread would
            done.set_exception(error)
        return done

    def base(self, piece: Piece) -> int:
        """The version of the parameters that this worker computes with."""
        return self._versions[piece.index]

    def push_extras(self, buffers: dict[str, Tensor], unit: int, step: int, share: int, num_shares: int) -> None:
        """Tell the first server of the model's buffers."""
        message = PushExtras(unit, tuple(buffers), step=step, share=share, num_shares=num_shares)
        self._calls.call(0, message, list(buffers.values()))

    def pull_extras(self, buffers: dict[str, Tensor], settles: int = -1) -> None:
        """Bring the model's buffers to what all workers start from."""

        def receive(message: Message, received: tuple[Buffer, ...]) -> None:
            assert isinstance(message, Extras)
            with torch.no_grad():
                for name, buffer in zip(message.names, received, strict=True):
                    buffers[name].copy_(buffer.torch())

        room = sum(value.numel() * value.element_size() + 64 for value in buffers.values()) + 4096
        self._calls.call(0, PullExtras(settles), receive=receive, reply_bytes=room)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._calls.close()

    def _push_piece(self, piece: Piece, gradient: Tensor, push: Push) -> Pushed:
        buffers = self._feedback[piece.index].compress(gradient[piece.start : piece.stop])
        reply = self._calls.call(piece.server, push, buffers)
        assert isinstance(reply, Pushed)
        return reply

    def _pull_piece(self, piece: Piece, flat: Tensor, settles: int, scale: float) -> None:
        target, follower = flat[piece.start : piece.stop], self._followers[piece.index]

        def receive(message: Message, buffers: tuple[Buffer, ...]) -> None:
            assert isinstance(message, Pulled)
            with torch.no_grad():
                follower.take(target, [buffer.torch() for buffer in buffers], message.stamp)
            self._versions[piece.index] = message.version

        self._calls.call(
            piece.server,
            Pull(piece.index, follower.stamp, settles, scale),
            receive=receive,
            reply_bytes=piece.length * flat.element_size() + 4096,
        )
