"""How a training set is divided: every sample belongs to one client."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cordee.core.errors import JobError
from cordee.data import ArraySource
from cordee.strategies.federated.partition import divide
from cordee.strategies.federated.settings import PartitionSettings

LABELS = torch.arange(120) % 10
SOME_IGNORED = torch.where(torch.arange(120) % 7 == 0, -100, LABELS)


@pytest.mark.parametrize("labels", [LABELS, SOME_IGNORED], ids=["all", "ignored"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "dirichlet", "alpha": 1.0},
        {"kind": "labels", "per_client": 2},
        {"kind": "labels", "per_client": 3, "clients": 4},
        {"kind": "key", "key": "target"},
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_belongs_to_one_client(labels: torch.Tensor, settings: dict[str, Any], seed: int) -> None:
    source = ArraySource(torch.zeros(120, 2), labels)
    partition = divide(PartitionSettings(**{"clients": 5, **settings}), source, 10, seed)
    assert torch.equal(partition.order.sort().values, torch.arange(120))
    if settings.get("kind") == "labels":
        for client in range(partition.num_clients):
            classes = set(labels[partition.of(client)].tolist()) - {-100}
            assert len(classes) == settings["per_client"]


def test_classes_that_nobody_could_have_are_refused() -> None:
    source = ArraySource(torch.zeros(120, 2), LABELS)
    with pytest.raises(JobError, match="3 clients with 2 classes each cannot have all classes"):
        divide(PartitionSettings(kind="labels", clients=3, per_client=2), source, 10, 0)
