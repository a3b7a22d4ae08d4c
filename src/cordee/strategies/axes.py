"""The groups of a team along the axes of its mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cordee.cluster import Team
from cordee.core.mesh import Mesh


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
