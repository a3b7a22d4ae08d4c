"""The picture of the clients is made of any data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cordee.data import ArraySource
from cordee.runs.federated.picture import draw_partition
from cordee.strategies.federated.partition import Partition

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "targets",
    [torch.arange(6) % 3, torch.tensor([0, 1, -100, 2, -100, 1]), torch.zeros(6, 4, dtype=torch.int64)],
    ids=["classes", "ignored labels", "tokens"],
)
def test_any_targets_can_be_drawn(tmp_path: Path, targets: torch.Tensor) -> None:
    partition = Partition(torch.arange(6), torch.tensor([0, 2, 6]))
    draw_partition(tmp_path / "partition.png", partition, ArraySource(torch.zeros(6, 2), targets), 3)
    assert (tmp_path / "partition.png").stat().st_size > 1000
