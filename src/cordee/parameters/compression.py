"""Making what travels smaller: 16-bit floats, 8-bit integers, or only the largest values.

Rounding and leaving out are made good later: what a sender could not send of a gradient is kept and added to the next
(error feedback).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from cordee.core.errors import CommunicationError

Compression: TypeAlias = Literal["none", "fp16", "int8", "topk"]
_BLOCK = 1024  # values that share a scale


class Codec(Protocol):
    """How vectors of one length are written for the way. Has no memory."""

    def encode(self, values: Tensor) -> list[Tensor]:
        """Return what to send. It may share memory with `values`."""

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        """Return what was sent, as far as it came through. Raises CommunicationError for what cannot be it."""


def make_codec(compression: Compression, topk: float, length: int, dtype: torch.dtype) -> Codec:
    """Return the codec of this name for vectors of `length`; `topk` is the share of the values that `topk` sends."""
    match compression:
        case "none":
            return Plain(length, dtype)
        case "fp16":
            return Half(length, dtype)
        case "int8":
            return Bytes(length, dtype)
        case "topk":
            return Largest(length, dtype, max(1, round(topk * length)))


class Plain:
    """Everything, as it is."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._length, self._dtype = length, dtype

    def encode(self, values: Tensor) -> list[Tensor]:
        return [values]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        (values,) = _parts(received, 1)
        _check(values.numel() == self._length and values.dtype == self._dtype, values, self._length)
        return values.reshape(-1)


class Half(Plain):
    """16-bit floats: half the bytes."""

    def encode(self, values: Tensor) -> list[Tensor]:
        return [values.to(torch.float16)]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        (values,) = _parts(received, 1)
        _check(values.numel() == self._length and values.dtype == torch.float16, values, self._length)
        return values.reshape(-1).to(self._dtype)


class Bytes(Plain):
    """8-bit integers with a scale for every 1024 values: a quarter of the bytes."""

    def encode(self, values: Tensor) -> list[Tensor]:
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(dim=1).div_(127).to(torch.float32)
        safe = scales.clamp_min(torch.finfo(torch.float32).tiny)
        levels = torch.round(blocks / safe.unsqueeze(1)).nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8)
        return [levels.view(-1)[: values.numel()], scales]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        levels, scales = _parts(received, 2)
        num_blocks = -(-self._length // _BLOCK)
        _check(levels.numel() == self._length and levels.dtype == torch.int8, levels, self._length)
        _check(scales.numel() == num_blocks and scales.dtype == torch.float32, scales, num_blocks)
        padded = torch.nn.functional.pad(levels.reshape(-1), (0, -self._length % _BLOCK)).view(-1, _BLOCK)
        return (padded.to(self._dtype) * scales.reshape(-1, 1).to(self._dtype)).view(-1)[: self._length]


class Largest(Plain):
    """Only the values of the largest magnitude, and where they stand."""

    def __init__(self, length: int, dtype: torch.dtype, num_kept: int) -> None:
        super().__init__(length, dtype)
        self._num_kept = num_kept

    def encode(self, values: Tensor) -> list[Tensor]:
        where = values.abs().topk(self._num_kept, sorted=False).indices
        return [where.to(torch.int32), values[where]]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        where, values = _parts(received, 2)
        _check(where.dtype == torch.int32 and values.dtype == self._dtype, values, self._length)
        _check(where.numel() == values.numel() <= self._length, values, self._length)
        places = where.reshape(-1).long()
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < self._length):
            raise CommunicationError(f"a compressed vector of {self._length} numbers names places outside of it")
        whole = torch.zeros(self._length, dtype=self._dtype)
        whole[places] = values.reshape(-1)
        return whole


class ErrorFeedback:
    """The sender's side of gradients: what was left out of one is added to the next."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # may be replaced: what was left out so far is added all the same
        self.left: Tensor | None = None

    def compress(self, gradient: Tensor) -> list[Tensor]:
        """Return what to send. What is not finite is sent, for a server to refuse, and not kept."""
        if self.left is None and type(self.codec) is Plain:
            return [gradient]
        wanted = gradient if self.left is None else gradient + self.left
        sent = self.codec.encode(wanted)
        left = wanted - self.codec.decode(sent)
        total = left.sum() if left.itemsize > 2 else left.float().sum()  # of 16 bits it may overflow
        self.left = left if type(self.codec) is not Plain and bool(torch.isfinite(total)) else None
        return sent


class DeltaSender:
    """The sender's side of parameters: knows what the receiver has, and sends the difference to what it should have."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: Tensor | None = None
        self.stamp = 0

    def compress(self, values: Tensor, has: int) -> list[Tensor]:
        """Return what brings a receiver up to date that got message number `has` last; 0 has nothing."""
        if type(self._codec) is Plain:
            return [values]
        self.stamp += 1
        if self._known is None or has != self.stamp - 1 or has == 0:
            self._known = values.clone()
            return [values]
        sent = self._codec.encode(values - self._known)
        self._known += self._codec.decode(sent)
        return sent


class DeltaReceiver:
    """The receiver's side of parameters."""

    def __init__(self, codec: Codec, length: int) -> None:
        self._codec = codec
        self._length = length
        self.stamp = 0

    def take(self, target: Tensor, received: Sequence[Tensor], stamp: int) -> None:
        """Bring `target` up to date in place."""
        is_whole = len(received) == 1 and received[0].dtype == target.dtype and received[0].numel() == self._length
        if is_whole:
            target.copy_(received[0].reshape(-1))
        else:
            target.add_(self._codec.decode(received))
        self.stamp = stamp


def _parts(received: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    if len(received) != count:
        raise CommunicationError(f"a compressed vector comes in {count} parts, this one in {len(received)}")
    return received


def _check(is_fine: bool, tensor: Tensor, length: int) -> None:
    if not is_fine:
        raise CommunicationError(
            f"{tensor.numel()} numbers of {tensor.dtype} do not make a vector of {length}: both sides need the same "
            "model and compression"
        )
