"""Making what travels smaller: 16-bit floats, 8- or 4-bit integers, only the largest values, or factors of matrices.

Rounding and leaving out are made good later: what a sender could not send of a gradient is kept and added to the next
(error feedback). What is kept and what is sent add up to what was meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from cordee.core.errors import CommunicationError, JobError
from cordee.core.job import read_section
from cordee.core.settings import Section

# Of any vector.
Compression: TypeAlias = Literal["none", "fp16", "bf16", "int8", "int4", "topk", "topk_2bit"]
# Also of what has shapes: the gradients, or differences, of a model's parameters.
ModelCompression: TypeAlias = Literal["none", "fp16", "bf16", "int8", "int4", "topk", "topk_2bit", "powersgd"]
SPARSE = ("topk", "topk_2bit")
_BLOCK = 1024  # values that share a scale
_SMALL_BLOCK = 128  # the same of 4 bits, where the scale matters more
_ROW = 4096  # of which `topk_2bit` sends the largest values: places in it take 12 bits


class CompressionSettings(Section, frozen=True, kw_only=True):
    """How gradients or differences of a model are sent: the name alone, or a table."""

    use: ModelCompression = "none"
    share: float = 0.01  # of the values, that `topk` and `topk_2bit` send
    rank: int = 2  # of the factors of `powersgd`

    @classmethod
    def read(cls, section: str, value: str | Mapping[str, Any]) -> CompressionSettings:
        """Return what a job says: "int8", or { use = "topk", share = 0.05 }. Raises JobError."""
        table = {"use": value} if isinstance(value, str) else value
        found: CompressionSettings = read_section(section, table, cls)
        if not 0 < found.share <= 1:
            raise JobError(f"{section}.share = {found.share} must be above 0 and at most 1")
        if found.rank < 1:
            raise JobError(f"{section}.rank = {found.rank} must be at least 1")
        for key, owners in (("share", SPARSE), ("rank", ("powersgd",))):
            if key in table and found.use not in owners:
                raise JobError(f"{section}.{key} is for {' and '.join(map(repr, owners))}, and use is '{found.use}'")
        return found

    def feedback(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> ErrorFeedback:
        """Return what compresses a vector in which tensors of these shapes lie one after the other."""
        length = sum(math.prod(shape) for shape in shapes)
        return ErrorFeedback(make_codec(self.use, self.share, length, dtype, shapes, self.rank))


class Codec(Protocol):
    """How vectors of one length are written for the way. Has no memory."""

    def encode(self, values: Tensor) -> list[Tensor]:
        """Return what to send. It may share memory with `values`."""

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        """Return what was sent, as far as it came through. Raises CommunicationError for what cannot be it."""

    def zeros(self) -> Tensor:
        """Return a vector of zeros."""


def make_codec(
    compression: ModelCompression,
    topk: float,
    length: int,
    dtype: torch.dtype,
    shapes: Sequence[Sequence[int]] = (),
    rank: int = 2,
) -> Codec:
    """Return the codec of this name for vectors of `length`; `topk` is the share of the values that `topk` sends.

    `powersgd` needs the `shapes` of the tensors that lie in the vector, one after the other; `rank` is that of factors.
    """
    match compression:
        case "none":
            return Plain(length, dtype)
        case "fp16":
            return _make_half(length, dtype, torch.float16)
        case "bf16":
            return _make_half(length, dtype, torch.bfloat16)
        case "int8":
            return Bytes(length, dtype)
        case "int4":
            return Nibbles(length, dtype)
        case "topk":
            return Largest(length, dtype, max(1, round(topk * length)))
        case "topk_2bit":
            return LargestCoarse(length, dtype, topk)
        case "powersgd":
            return Factors(length, dtype, shapes, rank)


class Plain:
    """Everything, as it is."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._length, self._dtype = length, dtype

    def zeros(self) -> Tensor:
        return torch.zeros(self._length, dtype=self._dtype)

    def encode(self, values: Tensor) -> list[Tensor]:
        return [values]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        (values,) = _parts(received, 1)
        _check(values.numel() == self._length and values.dtype == self._dtype, values, self._length)
        return values.reshape(-1)


class Half(Plain):
    """16-bit floats: half the bytes."""

    def __init__(self, length: int, dtype: torch.dtype, sent: torch.dtype) -> None:
        super().__init__(length, dtype)
        self._sent = sent

    def encode(self, values: Tensor) -> list[Tensor]:
        return [values.to(self._sent)]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        (values,) = _parts(received, 1)
        _check(values.numel() == self._length and values.dtype == self._sent, values, self._length)
        return values.reshape(-1).to(self._dtype)


def _make_half(length: int, dtype: torch.dtype, sent: torch.dtype) -> Codec:
    """Return what sends values of `dtype` as `sent`: as they are where that is one type.

    Else a receiver could not tell a difference from whole values, which have the type of what it holds.
    """
    return Plain(length, dtype) if sent is dtype else Half(length, dtype, sent)


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


class Nibbles(Plain):
    """4-bit integers with a scale for every 128 values: an eighth of the bytes."""

    def encode(self, values: Tensor) -> list[Tensor]:
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % _SMALL_BLOCK)).view(-1, _SMALL_BLOCK)
        scales = blocks.abs().amax(dim=1).div_(7).to(torch.float32)
        safe = scales.clamp_min(torch.finfo(torch.float32).tiny)
        levels = torch.round(blocks / safe.unsqueeze(1)).nan_to_num_(0.0).clamp_(-7, 7).add_(8).to(torch.uint8)
        pairs = levels.view(-1, 2)
        return [pairs[:, 0] | (pairs[:, 1] << 4), scales]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        packed, scales = _parts(received, 2)
        num_blocks = -(-self._length // _SMALL_BLOCK)
        num_bytes = num_blocks * _SMALL_BLOCK // 2
        _check(packed.numel() == num_bytes and packed.dtype == torch.uint8, packed, self._length)
        _check(scales.numel() == num_blocks and scales.dtype == torch.float32, scales, num_blocks)
        flat = packed.reshape(-1)
        levels = torch.stack([flat & 15, flat >> 4], dim=1).view(-1, _SMALL_BLOCK).to(self._dtype) - 8
        return (levels * scales.reshape(-1, 1).to(self._dtype)).view(-1)[: self._length]


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
        whole = torch.zeros(self._length, dtype=self._dtype, device=values.device)
        whole[places] = values.reshape(-1)
        return whole


class LargestCoarse(Plain):
    """The values of the largest magnitude of each row of 4096, in 2 bits each: the sign, and one of two magnitudes.

    A place takes 12 bits, so that a value takes 14 bits instead of 64 (as in SparseLoCo).
    """

    def __init__(self, length: int, dtype: torch.dtype, share: float) -> None:
        super().__init__(length, dtype)
        self._num_rows = max(1, -(-length // _ROW))
        self._width = max(1, -(-length // self._num_rows))
        # Even, so that a receiver that does not know the share sees it.
        self._num_kept = min(2 * max(1, round(share * self._width / 2)), self._width - self._width % 2) or 1

    def encode(self, values: Tensor) -> list[Tensor]:
        rows = torch.nn.functional.pad(values, (0, self._num_rows * self._width - values.numel()))
        rows = rows.view(self._num_rows, self._width)
        where = rows.abs().topk(self._num_kept, dim=1, sorted=False).indices
        kept = rows.gather(1, where)
        sizes = kept.abs()
        is_large = sizes > sizes.mean(dim=1, keepdim=True)
        levels = torch.stack([_mean_where(sizes, ~is_large), _mean_where(sizes, is_large)], dim=1)
        codes = (kept < 0).to(torch.uint8) | (is_large.to(torch.uint8) << 1)
        return [_pack_12_bits(where.reshape(-1)), _pack_2_bits(codes.reshape(-1)), levels.to(torch.float32).view(-1)]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        places, codes, levels = _parts(received, 3)
        _check(levels.numel() == 2 * self._num_rows and levels.dtype == torch.float32, levels, self._length)
        num_kept = min(places.numel() // 3 * 2 // self._num_rows, self._width)
        num = self._num_rows * num_kept
        is_fine = places.dtype == codes.dtype == torch.uint8 and places.numel() == 3 * -(-num // 2)
        _check(is_fine and codes.numel() == -(-num // 4) and num_kept <= self._width, codes, self._length)
        where = _unpack_12_bits(places.reshape(-1))[:num].view(self._num_rows, num_kept)
        if where.numel() and int(where.max()) >= self._width:
            raise CommunicationError(f"a compressed vector of {self._length} numbers names places outside of it")
        flags = _unpack_2_bits(codes.reshape(-1))[:num].view(self._num_rows, num_kept)
        sizes = levels.view(self._num_rows, 2).to(self._dtype).gather(1, (flags >> 1).long())
        rows = torch.zeros(self._num_rows, self._width, dtype=self._dtype, device=codes.device)
        rows.scatter_(1, where, torch.where((flags & 1).bool(), -sizes, sizes))
        return rows.view(-1)[: self._length]


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, values, torch.zeros_like(values)).sum(dim=1) / chosen.sum(dim=1).clamp_min(1)


def _pack_12_bits(numbers: Tensor) -> Tensor:
    pairs = torch.nn.functional.pad(numbers, (0, numbers.numel() % 2)).view(-1, 2)
    one, other = pairs[:, 0], pairs[:, 1]
    return torch.stack([one & 255, (one >> 8) | ((other & 15) << 4), other >> 4], dim=1).to(torch.uint8).view(-1)


def _unpack_12_bits(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, 3).long().unbind(dim=1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).view(-1)


def _pack_2_bits(codes: Tensor) -> Tensor:
    four = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return four[:, 0] | (four[:, 1] << 2) | (four[:, 2] << 4) | (four[:, 3] << 6)


def _unpack_2_bits(packed: Tensor) -> Tensor:
    return torch.stack([packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6], dim=1).view(-1)


class Factors(Plain):
    """Two thin factors of each matrix (PowerSGD, with two power iterations from a fixed start); the rest as it is."""

    def __init__(self, length: int, dtype: torch.dtype, shapes: Sequence[Sequence[int]], rank: int) -> None:
        super().__init__(length, dtype)
        self._rank = rank
        self._sizes = [math.prod(shape) for shape in shapes]
        assert sum(self._sizes) == length, "powersgd needs the shapes of all that is in the vector"
        # Of each tensor, its rows and columns where factors are smaller than it is.
        self._matrices = []
        for shape, size in zip(shapes, self._sizes, strict=True):
            height = shape[0] if len(shape) > 1 else 0
            width = size // height if height else 0
            self._matrices.append((height, width) if rank * (height + width) < height * width else None)

    def encode(self, values: Tensor) -> list[Tensor]:
        pieces = []
        for piece, matrix in zip(torch.split(values, self._sizes), self._matrices, strict=True):
            pieces += [piece] if matrix is None else self._factorise(piece.view(matrix))
        return [torch.cat([piece.reshape(-1) for piece in pieces])]

    def _factorise(self, matrix: Tensor) -> list[Tensor]:
        if not bool(torch.isfinite(matrix).all()):
            return [matrix.new_full((num, self._rank), math.nan) for num in matrix.shape]
        generator = torch.Generator().manual_seed(matrix.shape[1])
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))  # of 16 bits there is no decomposition
        right = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64).to(wide)
        for _ in range(2):
            left = torch.linalg.qr(wide @ right).Q
            right = wide.T @ left
        return [left.to(matrix.dtype), right.to(matrix.dtype)]

    def decode(self, received: Sequence[Tensor]) -> Tensor:
        (values,) = _parts(received, 1)
        sizes = [size if matrix is None else self._rank * sum(matrix) for size, matrix in self._layout()]
        _check(values.numel() == sum(sizes) and values.dtype == self._dtype, values, self._length)
        pieces = []
        for piece, (_, matrix) in zip(torch.split(values.reshape(-1), sizes), self._layout(), strict=True):
            if matrix is not None:
                left, right = torch.split(piece, [self._rank * num for num in matrix])
                piece = left.view(-1, self._rank) @ right.view(-1, self._rank).T
            pieces.append(piece.reshape(-1))
        return torch.cat(pieces)

    def _layout(self) -> list[tuple[int, tuple[int, int] | None]]:
        return list(zip(self._sizes, self._matrices, strict=True))


class ErrorFeedback:
    """The sender's side of gradients: what was left out of one is added to the next."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # may be replaced: what was left out so far is added all the same
        self.left: Tensor | None = None
        self._device = torch.device("cpu")

    def move_to(self, device: torch.device) -> None:
        """Compress vectors of this device from now on."""
        self._device = device
        self.left = None if self.left is None else self.left.to(device)

    def zeros(self) -> Tensor:
        """Return a vector of zeros as the codec takes them."""
        return self.codec.zeros().to(self._device)

    def compress(self, gradient: Tensor) -> list[Tensor]:
        """Return what to send. What is not finite is sent, for a server to refuse, and not kept."""
        sent, self.left = self.prepare(gradient)
        return sent

    def prepare(self, gradient: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return what to send, and what `left` is once it has arrived: what is sent and left is what was meant."""
        if self.left is None and type(self.codec) is Plain:
            return [gradient], None
        wanted = gradient if self.left is None else gradient + self.left
        sent = self.codec.encode(wanted)
        left = wanted - self.codec.decode(sent)
        total = left.sum() if left.itemsize > 2 else left.float().sum()  # of 16 bits it may overflow
        return sent, left if type(self.codec) is not Plain and bool(torch.isfinite(total)) else None


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
    """The receiver's side of parameters. Keeps them: a worker that takes steps alone changes its own copy."""

    def __init__(self, codec: Codec, length: int) -> None:
        self._codec = codec
        self._length = length
        self._known: Tensor | None = None
        self.stamp = 0

    def take(self, target: Tensor, received: Sequence[Tensor], stamp: int) -> None:
        """Make `target`, whatever it holds, what the sender has."""
        is_whole = len(received) == 1 and received[0].dtype == target.dtype and received[0].numel() == self._length
        if is_whole:
            known = received[0].reshape(-1)
            self._known = known.clone() if type(self._codec) is not Plain else None  # else all is always sent
        elif self._known is None:
            raise CommunicationError("a difference came, and the parameters that it is from have not come before")
        else:
            known = self._known.add_(self._codec.decode(received))
        target.copy_(known)
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
