"""The axes of a team: who computes other samples, and who splits a model between them.

Workers are numbered along the last axis first. Along `data` and `sharded` they compute different samples, along
`pipeline` and `tensor` the same: of {data = 2, pipeline = 3}, workers 0, 1, 2 split one copy of the model and 3, 4, 5
another; 0 and 3 hold the same part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch.distributed as dist

from cordee.cluster import Team


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

    def __iter__(self) -> itertools.chain[int]:
        return itertools.chain(astuple(self))

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

    def rosters(self, axes: Sequence[str]) -> list[list[int]]:
        """Return the workers that differ in their places on these axes only, group by group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for worker_index in range(self.num_workers):
            place = self.place_of(worker_index)
            rest = tuple(getattr(place, one.name) for one in fields(self) if one.name not in axes)
            groups.setdefault(rest, []).append(worker_index)
        return list(groups.values())


@dataclass(frozen=True)
class Axes:
    """One worker's place on the mesh, and its groups. A group of one is None."""

    mesh: Mesh
    place: Mesh
    data: dist.ProcessGroup | None = None  # those that hold the same
    sharded: dist.ProcessGroup | None = None
    shares: dist.ProcessGroup | None = None  # those that differ in their samples only: data and sharded together
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None


def form_axes(team: Team, mesh: Mesh) -> Axes:
    """Form the groups of all axes. Collective over the team."""
    assert mesh.num_workers == team.num_workers
    formed: dict[str, dist.ProcessGroup | None] = {}
    known: dict[str, dist.ProcessGroup] = {}
    for name, along in (
        ("data", ("data",)),
        ("sharded", ("sharded",)),
        ("shares", ("data", "sharded")),
        ("pipeline", ("pipeline",)),
        ("tensor", ("tensor",)),
    ):
        rosters = mesh.rosters(along)
        if len(rosters[0]) == 1:
            continue
        key = repr(rosters)
        if key not in known:
            known[key] = _form(rosters, team.worker_index)
        formed[name] = known[key]
    return Axes(mesh, mesh.place_of(team.worker_index), **formed)


def _form(rosters: list[list[int]], worker_index: int) -> dist.ProcessGroup:
    """Form all groups, as torch wants everybody to, and return the own one."""
    if len(rosters) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(roster) for roster in rosters]
    own = next(number for number, roster in enumerate(rosters) if worker_index in roster)
    group: dist.ProcessGroup = groups[own]
    return group
