"""What a worker sees of the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Team:
    """The members of one generation, seen from one of them."""

    worker_index: int = 0
    num_workers: int = 1
    generation: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for the team: it writes checkpoints and the summary."""
        return self.worker_index == 0
