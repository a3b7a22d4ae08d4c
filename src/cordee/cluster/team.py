"""What a worker sees of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cordee.core.blocked_time import BLOCKED


@dataclass(frozen=True)
class Team:
    """The members of one generation, seen from one of them. Alone by default, where agreeing is free."""

    worker_index: int = 0
    num_workers: int = 1
    num_local_workers: int = 1  # on this host: they share its cores
    local_rank: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()  # their numbers in the run, in the order of the team
    threads: int = 0  # that each member computes with; 0 is what the job says

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for the team: it writes checkpoints, events and the summary."""
        return self.worker_index == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over the team. Collective: all members give as many."""
        if self.num_workers == 1:
            return list(values)
        import torch  # here, so that launchers can have workers started before they import it
        import torch.distributed as dist

        total = torch.tensor(values, dtype=torch.float64)
        with BLOCKED:
            dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def gather(self, value: int) -> list[int]:
        """Return every member's value, in their order. Collective."""
        return [row[0] for row in self.gather_rows([value])]

    def gather_rows(self, values: Sequence[int]) -> list[list[int]]:
        """Return every member's values, in their order. Collective: all members give as many, of 64 bits each."""
        return self._gather(values, "int64")

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return every member's numbers, in double precision. Collective: all members give as many."""
        return self._gather(values, "float64")

    def _gather(self, values: Sequence[Any], kind: str) -> list[list[Any]]:
        if self.num_workers == 1:
            return [list(values)]
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=getattr(torch, kind))
        rows = own.new_empty(self.num_workers * len(values))
        with BLOCKED:
            dist.all_gather_single(rows, own)
        gathered: list[list[Any]] = rows.view(self.num_workers, len(values)).tolist()
        return gathered

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members' numbers in the run; their places where nobody has given them numbers."""
        return self.members or tuple(range(self.num_workers))

    def any(self, flag: bool) -> bool:
        """Return whether any member says so. Collective."""
        return flag if self.num_workers == 1 else self.sum([float(flag)])[0] > 0
