"""Sums over a group of what each member sends in a compressed form.

What is compressed cannot be added on its way. Every member gets what every other member sends, and adds it up in the
order of the members: all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.communication.compression import ErrorFeedback
from cordee.communication.exchange import GradientExchange, settle

# Of the gradients in each flat tensor, their shapes and their type, to what compresses that tensor.
MakeFeedback: TypeAlias = Callable[[Sequence[Sequence[torch.Size]], Sequence[torch.dtype]], list[ErrorFeedback]]


class Gathering(NamedTuple):
    """An exchange that has begun."""

    own: list[Tensor]
    left: Tensor | None  # of what this member meant, once the others have what it sent
    rows: Tensor
    work: Any


class CompressedSum:
    """Sums vectors over the default group of `num_members`. What a member does not send it keeps for the next."""

    def __init__(self, feedback: ErrorFeedback, num_members: int) -> None:
        self._feedback, self._num_members = feedback, num_members

    def begin(self, values: Tensor | None) -> Gathering:
        """Begin to send a vector; with None zeros take part, and nothing is sent of what is kept.

        Collective. What is kept changes with `commit` only.
        """
        feedback = self._feedback
        if values is None:
            own, left = feedback.codec.encode(feedback.zeros()), feedback.left
        else:
            own, left = feedback.prepare(values)
        packed = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in own])
        if self._num_members == 1:
            return Gathering(own, left, packed, None)
        rows = packed.new_empty(self._num_members * packed.numel())
        return Gathering(own, left, rows, dist.all_gather_single(rows, packed, async_op=True))

    def finish(self, gathering: Gathering, weights: Sequence[float]) -> Tensor:
        """Return the sum of the members' vectors, as they arrived, each times its weight. Collective."""
        if gathering.work is not None:
            gathering.work.wait()
        codec, total = self._feedback.codec, self._feedback.zeros()
        for packed, weight in zip(gathering.rows.view(self._num_members, -1), weights, strict=True):
            if weight:
                total.add_(codec.decode(_unpack(packed, gathering.own)), alpha=weight)
        return total

    def commit(self, gathering: Gathering) -> None:
        """The exchange counts: keep what was not sent. Local."""
        self._feedback.left = gathering.left


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(packed, [part.nbytes for part in like])
    # Copied: what begins at another place than a multiple of its size cannot be looked at as numbers.
    return [piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, like, strict=True)]


class CompressedExchange(GradientExchange):
    """Sums gradients over the default group in a compressed form. The numbers beside them are sent as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_extras: int, make: MakeFeedback) -> None:
        super().__init__(parameters, num_extras)
        num_tail = self._row.tail.numel()
        bodies = [flat[: flat.numel() - num_tail * (flat.dtype is torch.float32)] for flat in self._row.flats]
        self._bodies = [body for body in bodies if body.numel()]
        shapes = [[p.shape for p in self._parameters if p.dtype is body.dtype] for body in self._bodies]
        num_members = dist.get_world_size()
        feedback = make(shapes, [body.dtype for body in self._bodies])
        for one, body in zip(feedback, self._bodies, strict=True):
            one.move_to(body.device)
        self._sums = [CompressedSum(one, num_members) for one in feedback]
        self._weights = [1.0] * num_members

    def reduce(
        self, extras: Sequence[float] = (), *, count_at: int | None = None, nominal_count: int = 1
    ) -> list[float]:
        """Like that of `GradientExchange`, but gradients are scaled before they are sent.

        What was left out of one batch would else be scaled with the next, which may be much smaller. Where members
        count nothing at all, no gradient is sent, and nothing of what was left out.
        """
        flags, tail = self._copy_gradients(), self._row.tail
        tail.copy_(torch.tensor([*flags, *extras], device=tail.device))
        dist.all_reduce(tail)
        numbers = tail.tolist()
        users, totals = numbers[: len(flags)], numbers[len(flags) :]
        total_count = nominal_count if count_at is None else totals[count_at]
        if total_count:
            self._sum_bodies(nominal_count / total_count)
            settle(tail.device)
        self._give(users)
        return totals

    def _sum_bodies(self, scale: float) -> None:
        if scale != 1:
            torch._foreach_mul_(self._bodies, scale)
        begun = [one.begin(body) for one, body in zip(self._sums, self._bodies, strict=True)]
        summed = [one.finish(each, self._weights) for one, each in zip(self._sums, begun, strict=True)]
        for one, each, body, total in zip(self._sums, begun, self._bodies, summed, strict=True):
            one.commit(each)
            body.copy_(total)
