"""What flows from the data layer to the compute layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Batch(NamedTuple):
    """Samples that are computed together; row i of `targets` belongs to row i of `inputs`."""

    inputs: Tensor
    targets: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.targets)
