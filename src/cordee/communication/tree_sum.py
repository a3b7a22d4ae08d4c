"""Sums over the logical shards of all members, added in one order whoever holds which (core/shards.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.core.shards import Block, add_up, share_shards, whole_blocks


class TreeSum:
    """Adds the blocks of all members of the default group. The result has the same bits on any number of members."""

    def __init__(self, num_shards: int, member: int, num_members: int) -> None:
        held = [whole_blocks(share_shards(num_shards, other, num_members)) for other in range(num_members)]
        self.own: Sequence[Block] = held[member]  # what `reduce` takes, in this order
        self._root = Block(0, num_shards)
        self._num_members = num_members
        self._num_rows = max(len(blocks) for blocks in held)
        # Where each block is found once the rows of all members are gathered.
        self._rows = {block: i * self._num_rows + k for i, blocks in enumerate(held) for k, block in enumerate(blocks)}
        # Two numbers have one sum in either order, so that a plain all-reduce is the tree.
        self._is_pair = num_members == 2 and self._num_rows == 1
        self._gathered: dict[tuple[torch.dtype, int], Tensor] = {}

    def rows(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for the own blocks, one in each row; members with fewer blocks than others have rows to spare."""
        return torch.zeros(self._num_rows, size, dtype=dtype, device=device)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the sum over all shards, given the own blocks' sums in `rows`.

        Collective. The result lies in memory that the next call with as many numbers overwrites, as may `rows`.
        """
        if self._num_members == 1:
            return rows[0]
        if self._is_pair:
            dist.all_reduce(rows[0])
            return rows[0]
        gathered = self._room(rows)
        dist.all_gather_single(gathered, rows)

        def find(block: Block) -> Tensor | None:
            return gathered[self._rows[block]] if block in self._rows else None

        return add_up(self._root, find, add_in_place)

    def _room(self, rows: Tensor) -> Tensor:
        """Return where to gather; kept, since fresh memory costs more than the sum."""
        key = (rows.dtype, rows.shape[1])
        if key not in self._gathered:
            self._gathered[key] = rows.new_empty(self._num_members * self._num_rows, rows.shape[1])
        return self._gathered[key]


def add_in_place(one: Tensor, other: Tensor) -> Tensor:
    return one.add_(other)
