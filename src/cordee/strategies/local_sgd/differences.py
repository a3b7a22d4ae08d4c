"""What workers exchange where they agree: the differences of the parameters of one part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.cluster import Team
from cordee.communication.compressed_sum import CompressedSum, Gathering
from cordee.communication.compression import ErrorFeedback
from cordee.communication.exchange import settle
from cordee.core.errors import JobError


def cut_fragments(sizes: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    """Cut parameters, in their order, into parts of about as many bytes. Pure. Raises JobError if there are too few."""
    if num_fragments > len(sizes):
        raise JobError(
            f"strategy.fragments = {num_fragments} cuts a model of {len(sizes)} parameters (tensors) into empty "
            f"parts: set fragments to at most {len(sizes)}"
        )
    names, total, done = list(sizes), sum(sizes.values()), 0
    fragments: list[list[str]] = [[]]
    for index, name in enumerate(names):
        num_left = num_fragments - len(fragments)
        is_full = done >= total * len(fragments) / num_fragments
        if fragments[-1] and num_left and (is_full or len(names) - index == num_left):
            fragments.append([])
        fragments[-1].append(name)
        done += sizes[name]
    return fragments


@dataclass
class Sent:
    """An exchange that has begun. `DifferenceExchange.finish` ends it."""

    count: float  # of items that this worker's difference is from
    room: Tensor
    work: Any  # None: there is nobody to exchange with
    gathering: Gathering | None  # of what is compressed
    ends: dict[str, Tensor]  # this worker's parameters as they were when it began


class DifferenceExchange:
    """The mean of one fragment's differences over a team, each weighted by the items that it comes from. Collective."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], team: Team, nominal_count: float, feedback: ErrorFeedback | None
    ) -> None:
        """`feedback` compresses what is sent; it is this worker's own, whatever team the worker is in."""
        self._shapes, self._team, self._nominal_count = shapes, team, nominal_count
        self._compressed = None if feedback is None else CompressedSum(feedback, team.num_workers)

    def begin(
        self, start: Mapping[str, Tensor], ends: Mapping[str, Tensor], count: float, dtype: torch.dtype, *, keep: bool
    ) -> Sent:
        """Begin to exchange what lies between `start` and `ends`; with `keep` a copy of `ends` is kept."""
        pairs = [(ends[name].detach().to(dtype), start[name].to(dtype)) for name in self._shapes]
        room = torch.cat([(end - begin).reshape(-1) for end, begin in pairs])
        kept = {name: ends[name].detach().clone() for name in self._shapes} if keep else {}
        if self._compressed is not None:
            return Sent(count, room, None, self._compressed.begin(room if count else None), kept)
        work = None
        if self._team.num_workers > 1:
            room.mul_(count / self._nominal_count) if count else room.zero_()
            work = dist.all_reduce(room, async_op=True)
        return Sent(count, room, work, None, kept)

    def finish(self, sent: Sent, counts: Sequence[float]) -> dict[str, Tensor]:
        """Return the mean difference of each parameter. `counts` are those of all members, as they were sent."""
        total, room = sum(counts), sent.room
        if sent.gathering is not None:
            assert self._compressed is not None
            room = self._compressed.finish(sent.gathering, [count / total if total else 0.0 for count in counts])
            settle(room.device)
        elif sent.work is not None:
            sent.work.wait()
            settle(room.device)
            room.mul_(self._nominal_count / total) if total else room.zero_()
        pieces = torch.split(room, [shape.numel() for shape in self._shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def drop(self, sent: Sent) -> None:
        """Wait for the end of an exchange that will not count. Collective."""
        self.finish(sent, [1.0] * self._team.num_workers)

    def commit(self, sent: Sent) -> None:
        """The exchange counts. Local."""
        if sent.gathering is not None and self._compressed is not None:
            self._compressed.commit(sent.gathering)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type that differences are computed and sent in: float32, or what is wider."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
