"""What `cordee.train` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cordee.monitoring import Summary, read_events
from cordee.monitoring.run_directory import EVENTS_FILE

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Run:
    """A run that has ended: where its files are, what came out, and the trained model."""

    directory: Path
    summary: Summary
    model: nn.Module

    @property
    def status(self) -> str:
        return self.summary.status

    @property
    def test_accuracy(self) -> float | None:
        return self.summary.test_accuracy

    def events(self) -> list[dict[str, Any]]:
        """Return everything that was recorded, in order."""
        return list(read_events(self.directory / EVENTS_FILE))
