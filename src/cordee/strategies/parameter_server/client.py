"""The side of workers and evaluator: pushes while a worker still computes, pulls of the first layers first, snapshots.

Large pieces of servers on this host are read where they are: the server answers with a stamp instead of the bytes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from cordee.checkpoint import State
from cordee.communication.compression import DeltaReceiver, ErrorFeedback, make_codec
from cordee.communication.messages import Message
from cordee.communication.wire import Buffer
from cordee.core.blocked_time import BLOCKED
from cordee.parameters.calls import MappedValues, ServerCalls
from cordee.parameters.placement import Layout, Piece
from cordee.parameters.replication import decode_state
from cordee.strategies.parameter_server.messages import (
    Extras,
    KeepResidual,
    Pull,
    Pulled,
    PullExtras,
    PullResiduals,
    Push,
    Pushed,
    PushExtras,
    Residuals,
    Snapped,
    Snapshot,
    SnapshotExtras,
)
from cordee.strategies.parameter_server.settings import ParameterServerSettings


class ParameterClient:
    """Pushes a worker's flat gradient and pulls its flat parameters, piece by piece."""

    def __init__(self, layout: Layout, settings: ParameterServerSettings, calls: ServerCalls) -> None:
        self.layout = layout
        self._calls = calls
        self._versions = [0] * len(layout.pieces)
        codecs = [
            make_codec(settings.compression, settings.topk, piece.length, layout.dtype) for piece in layout.pieces
        ]
        self._feedback = [ErrorFeedback(codec) for codec in codecs]
        self._receivers = [
            DeltaReceiver(codec, piece.length) for codec, piece in zip(codecs, layout.pieces, strict=True)
        ]
        # What is compressed is not in memory that could be mapped.
        sizes = [piece.length * layout.dtype.itemsize * (settings.compression == "none") for piece in layout.pieces]
        self._memories = [
            MappedValues(calls, piece.server, size) for piece, size in zip(layout.pieces, sizes, strict=True)
        ]
        self._pool: ThreadPoolExecutor | None = None
        if len(layout.pieces) > 1:
            self._pool = ThreadPoolExecutor(min(len(layout.pieces), layout.num_servers * 2, 8), "cordee-push")

    def pull(self, flat: Tensor, apply_step: int = -1, scale: float = 1.0) -> None:
        """Bring all parameters up to date."""
        if self._pool is None:
            with BLOCKED:
                self._pull_piece(self.layout.pieces[0], flat, apply_step, scale)
            return
        waiting = [self._pool.submit(self._pull_piece, piece, flat, apply_step, scale) for piece in self.layout.pieces]
        with BLOCKED:
            for one in waiting:
                one.result()

    def start_push(self, piece: Piece, gradient: Tensor, push: Push) -> Future[Pushed]:
        """Send the gradient of one piece; `gradient` is that of all pieces, and must not change until it is through."""
        if self._pool is not None:
            return self._pool.submit(self._push_piece, piece, gradient, push)
        done: Future[Pushed] = Future()
        try:
            with BLOCKED:
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
        with BLOCKED:
            self._calls.call(0, message, list(buffers.values()))

    def pull_extras(self, buffers: dict[str, Tensor], pull: PullExtras | SnapshotExtras) -> tuple[int, ...]:
        """Bring the model's buffers to what all workers start from; return how old gradients were, by updates."""

        def receive(message: Message, received: tuple[Buffer, ...]) -> tuple[int, ...]:
            assert isinstance(message, Extras)
            with torch.no_grad():
                for name, buffer in zip(message.names, received, strict=True):
                    buffers[name].copy_(buffer.torch())
            return message.ages

        room = sum(value.numel() * value.element_size() + 64 for value in buffers.values()) + 4096
        with BLOCKED:
            ages: tuple[int, ...] = self._calls.call(0, pull, receive=receive, reply_bytes=room)
        return ages

    def snapshot(self, piece: Piece, flat: Tensor, snapshot: Snapshot) -> State:
        """Bring the parameters of a piece up to date, and return the state of their optimizer."""
        target = flat[piece.start : piece.stop]

        def receive(message: Message, buffers: tuple[Buffer, ...]) -> State:
            assert isinstance(message, Snapped)
            with torch.no_grad():
                target.copy_(buffers[0].torch())
            return decode_state(message.names, [buffer.torch().clone() for buffer in buffers[1:]])

        room = 4 * target.nbytes + (1 << 20)
        state: State = self._calls.call(piece.server, snapshot, receive=receive, reply_bytes=room)
        return state

    def keep_residuals(self, step: int) -> None:
        """Give the servers what compression has left out of the gradients so far, for the checkpoint of `step`."""
        for piece, feedback in zip(self.layout.pieces, self._feedback, strict=True):
            left = feedback.zeros() if feedback.left is None else feedback.left
            with BLOCKED:
                self._calls.call(piece.server, KeepResidual(piece.index, step), [left])

    def take_residuals(self, worker: str) -> None:
        """Begin with what compression had left out of the gradients of a worker of the run that is resumed."""
        for piece, feedback in zip(self.layout.pieces, self._feedback, strict=True):
            feedback.left = self.residuals(piece, PullResiduals(piece.index, worker=worker)).get(worker)

    def residuals(self, piece: Piece, pull: PullResiduals) -> dict[str, Tensor]:
        """Return what servers know to be left out of the gradients of a piece, by worker."""

        def receive(message: Message, buffers: tuple[Buffer, ...]) -> dict[str, Tensor]:
            assert isinstance(message, Residuals)
            tensors = [buffer.torch().clone() for buffer in buffers]
            return dict(zip(message.workers, tensors, strict=True))

        with BLOCKED:
            found: dict[str, Tensor] = self._calls.call(piece.server, pull, receive=receive)
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._calls.close()

    def _push_piece(self, piece: Piece, gradient: Tensor, push: Push) -> Pushed:
        feedback, own = self._feedback[piece.index], gradient[piece.start : piece.stop]
        before = feedback.left
        if push.count or before is None:
            buffers = feedback.compress(own)
        else:  # it does not count: what compression left out of earlier ones would be lost with it
            buffers = feedback.codec.encode(torch.zeros_like(own))
        reply = self._calls.call(piece.server, push, buffers)
        assert isinstance(reply, Pushed)
        if reply.outcome in ("refused", "known"):  # "known": the same unit of another worker counts (drop_late, say)
            feedback.left = before
        return reply

    def _pull_piece(self, piece: Piece, flat: Tensor, apply_step: int, scale: float) -> None:
        receiver, mapped = self._receivers[piece.index], self._memories[piece.index]
        target = flat[piece.start : piece.stop]
        room = piece.length * flat.element_size() + 4096
        view = mapped.view

        def receive(message: Message, buffers: tuple[Buffer, ...]) -> bool:
            assert isinstance(message, Pulled)
            if message.stamp >= 0:
                assert view is not None
                if not view.read(0, target.view(torch.uint8).numpy().data, message.stamp):
                    return False
            else:
                with torch.no_grad():
                    receiver.take(target, [buffer.torch() for buffer in buffers], message.sent)
                mapped.map(message.memory)
            self._versions[piece.index] = message.version
            return True

        for memory in (mapped.number(view), -1):  # where they have changed since the server answered: sent
            pull = Pull(piece.index, receiver.stamp, apply_step, scale, memory)
            if self._calls.call(piece.server, pull, receive=receive, reply_bytes=room):
                return
