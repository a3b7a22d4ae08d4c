"""The two axes of a team: who splits a model between them, and who holds the same part of it.

Workers are numbered along the inner axis first: of 2 × 3 workers, 0, 1, 2 split one copy of the model and 3, 4, 5
another; 0 and 3 are replicas of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cordee.cluster import Team


@dataclass(frozen=True)
class Axes:
    """One worker's place on both axes, and its groups. A group of one is None."""

    num_replicas: int
    replica_index: int
    num_parts: int
    part_index: int
    replicas: dist.ProcessGroup | None = None  # those with the same part
    parts: dist.ProcessGroup | None = None  # those that make up a model together

    def worker_index(self, part_index: int) -> int:
        """Return the worker with this part of the same copy."""
        return self.replica_index * self.num_parts + part_index


def form_axes(team: Team, num_replicas: int) -> Axes:
    """Form the groups of both axes. Collective over the team."""
    assert team.num_workers % num_replicas == 0
    num_parts = team.num_workers // num_replicas
    replica_index, part_index = divmod(team.worker_index, num_parts)
    copies = [[copy * num_parts + part for part in range(num_parts)] for copy in range(num_replicas)]
    twins = [[copy * num_parts + part for copy in range(num_replicas)] for part in range(num_parts)]
    parts = _form(copies, replica_index) if num_parts > 1 else None
    replicas = _form(twins, part_index) if num_replicas > 1 else None
    return Axes(num_replicas, replica_index, num_parts, part_index, replicas, parts)


def _form(rosters: list[list[int]], own: int) -> dist.ProcessGroup:
    """Form all groups, as torch wants everybody to, and return the own one."""
    if len(rosters) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(ranks) for ranks in rosters]
    group: dist.ProcessGroup = groups[own]
    return group
