"""How the workers of a team are laid out: who computes other samples, and who splits a model between them. Pure.

Workers are numbered along the last axis first. Along `data` and `sharded` they compute different samples, along
`pipeline` and `tensor` the same: of {data = 2, pipeline = 3}, workers 0, 1, 2 split one copy of the model and 3, 4, 5
another; 0 and 3 hold the same part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class Mesh:
    """How many workers there are along each axis; also a worker's place on each."""

    data: int = 1
    sharded: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def num_workers(self) -> int:
        return math.prod(self)

    @property
    def num_shares(self) -> int:
        """Parts a batch is cut into."""
        return self.data * self.sharded

    @property
    def replica_size(self) -> int:
        """How many workers, neighbours in number, have one copy of the model between them."""
        return self.pipeline * self.tensor

    @property
    def used(self) -> dict[str, int]:
        """The axes along which there are two workers or more, and how many."""
        return {axis: size for axis, size in zip(AXES, self, strict=True) if size > 1}

    def __iter__(self) -> Iterator[int]:
        return iter(astuple(self))

    def place_of(self, worker_index: int) -> Mesh:
        """Return where a worker is on each axis."""
        place = []
        for size in reversed(list(self)):
            worker_index, at = divmod(worker_index, size)
            place.append(at)
        return Mesh(*reversed(place))

    def worker_at(self, place: Mesh) -> int:
        """Return which worker is there."""
        index = 0
        for size, at in zip(self, place, strict=True):
            index = index * size + at
        return index

    def rosters(self, axes: Collection[str]) -> list[list[int]]:
        """Return the workers that differ in their places on these axes only, group by group."""
        inside = self._numbers([axis for axis in AXES if axis in axes])
        firsts = self._numbers([axis for axis in AXES if axis not in axes])
        return [[first + number for number in inside] for first in firsts]

    def same_parts(self) -> list[range]:
        """Return the workers that hold the same part of the model and compute other samples, part by part."""
        return [range(part, self.num_workers, self.replica_size) for part in range(self.replica_size)]

    def same_stages(self) -> list[range]:
        """Return the workers that hold the slices of one stage, stage by stage."""
        return [range(first, first + self.tensor) for first in range(0, self.num_workers, self.tensor)]

    def stage_members(self, stage: int) -> list[int]:
        """Return the workers that hold a slice of a stage, in all replicas of the model."""
        return [worker for worker in range(self.num_workers) if worker // self.tensor % self.pipeline == stage]

    def _numbers(self, axes: Collection[str]) -> list[int]:
        """Return what the places on some axes add to a worker's number, for all combinations of places."""
        strides = {}
        stride = 1
        for axis, size in reversed(list(zip(AXES, self, strict=True))):
            strides[axis], stride = stride, stride * size
        steps = [range(0, strides[axis] * getattr(self, axis), strides[axis]) for axis in axes]
        return [sum(places) for places in itertools.product(*steps)]


AXES = tuple(field.name for field in fields(Mesh))
