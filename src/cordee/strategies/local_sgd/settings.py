"""Keys of [strategy] that belong to local_sgd."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cordee.communication.compression import CompressionSettings
from cordee.core.errors import JobError
from cordee.core.settings import Section


class LocalSgdSettings(Section, frozen=True, kw_only=True):
    """When workers agree, on what, and what becomes of it."""

    sync_every: int = 50  # steps that a worker takes alone before the workers agree
    # The optimizer that takes the mean difference as its gradient, and its settings; without it workers take the mean.
    outer: dict[str, Any] = msgspec.field(default_factory=dict)
    # local: the first worker's statistics are kept; average: the mean of all workers' is, where they agree.
    batch_norm: Literal["local", "average"] = "average"
    # What is sent in a smaller form: a name, or { use = "topk", share = 0.01 }; see docs/reference/local-sgd.md.
    compress: str | dict[str, Any] = "none"
    fragments: int = 1  # parts of the model, of which one is agreed on at a time
    delay: int = 0  # steps that workers train on while what they agree on is on its way
    workers_per_group: int = 1  # workers, neighbours in number, that exchange gradients in every step

    def __post_init__(self) -> None:
        for key in ("sync_every", "fragments", "workers_per_group"):
            if (value := getattr(self, key)) < 1:
                raise JobError(f"strategy.{key} = {value} must be at least 1")
        if self.sync_every % self.fragments:
            raise JobError(
                f"strategy.sync_every = {self.sync_every} is not a multiple of strategy.fragments = {self.fragments}: "
                "each fragment is agreed on once in sync_every steps, at equal distances"
            )
        if not 0 <= self.delay < self.steps_alone:
            raise JobError(
                f"strategy.delay = {self.delay} must be at least 0 and below {self.steps_alone} (sync_every / "
                "fragments): what is on its way must arrive before the next exchange begins"
            )

        CompressionSettings.read("strategy.compress", self.compress)

    @property
    def compression(self) -> CompressionSettings:
        return CompressionSettings.read("strategy.compress", self.compress)

    @property
    def steps_alone(self) -> int:
        """How many steps lie between two exchanges."""
        return self.sync_every // self.fragments
