"""The steps that a worker of a parameter server takes alone between two pulls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cordee.compute import make_optimizer_recipe
from cordee.compute.schedules import constant
from cordee.core.references import Use
from cordee.runs.dispatched.worker import DispatchedWorker


def changes(settings: dict[str, Any]) -> list[float]:
    """Return by how much a local step with a gradient of 1 changes the weight and the bias of a layer."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            parameter.grad = torch.ones_like(parameter)
    use = Use.coerce("optimizer", settings)
    recipe = make_optimizer_recipe(use, constant(), lr_scale="none", num_shares=1).fit(model)
    rates = recipe.make(model.named_parameters())
    worker: Any = SimpleNamespace(_parts=SimpleNamespace(recipe=recipe), _rates=rates, _work=None)
    DispatchedWorker._step_locally(worker, 3)
    return [float(parameter.detach()) for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adadelta", "Adagrad", "Rprop"])
def test_without_a_rate_in_the_job_the_rate_is_that_of_torch(name: str) -> None:
    rate = getattr(torch.optim, name)([torch.zeros(1)]).defaults["lr"]
    assert changes({"use": name.lower()}) == [-rate, -rate]


def test_groups_have_their_own_rates() -> None:
    groups = [{"match": "bias", "lr": 0.5}]
    assert changes({"use": "sgd", "groups": groups}) == [-0.001, -0.5]
    assert changes({"use": "sgd", "lr": 0.25, "groups": groups}) == [-0.25, -0.5]


def test_an_optimizer_that_maximizes_does_so_locally() -> None:
    assert changes({"use": "sgd", "lr": 0.25, "maximize": True}) == [0.25, 0.25]
