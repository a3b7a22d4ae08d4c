"""Groups of the optimizer and frozen parameters, by patterns of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cordee.compute import OptimizerRecipe, make_optimizer_recipe
from cordee.compute.parameter_groups import freeze_parameters
from cordee.compute.schedules import constant
from cordee.core.errors import JobError
from cordee.core.references import Use


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


def recipe(groups: Any, **settings: Any) -> OptimizerRecipe:
    part = Use("adamw", lr=0.1, weight_decay=0.2, groups=groups, **settings)
    return make_optimizer_recipe(part, constant(), lr_scale="none", num_shares=1)


def test_first_pattern_that_matches_counts_and_the_others_come_first() -> None:
    model = Net()
    made = recipe(
        [{"match": "bias|norm", "weight_decay": 0.0}, {"match": "^head", "lr": 0.01}, {"match": "features", "lr": 1.0}]
    ).fit(model)
    optimizer = made.make(model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [([names[id(p)] for p in g["params"]], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        (["features.bias", "norm.weight", "norm.bias", "head.bias"], 0.1, 0.0),
        (["head.weight"], 0.01, 0.2),
        (["features.weight"], 1.0, 0.2),
    ]
    assert made.set_rate(optimizer, 0) == 0.1
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 1.0]


def test_a_part_of_the_model_has_the_groups_of_the_whole() -> None:
    model = Net()
    parts = recipe([{"match": "head", "lr": 0.5}, {"match": "norm", "lr": 0.3}]).fit(model).for_parts_of(model)
    optimizer = parts.make(model.norm.named_parameters(prefix="norm"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.3]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "conv", "lr": 0.1}], r"'conv' matches no parameter of the model.*it has 'features.weight'"),
        ([{"match": "weight", "lr": 0.1}, {"match": "head.w", "lr": 0.1}], "an earlier group has already"),
        ([{"match": "(", "lr": 0.1}], "is not a regular expression"),
        ([{"match": "", "lr": 0.1}], "must be a pattern"),
        ([{"mach": "bias", "lr": 0.1}], r"needs the key 'match' \(not 'mach'\)"),
        ([{"match": "bias"}], "sets nothing"),
        ([{"match": "bias", "weight_decy": 0.0}], "no setting 'weight_decy'.*did you mean 'weight_decay'"),
        ([{"match": "bias", "lr": -1.0}], "refuses: Invalid learning rate"),
        ([{"match": "bias", "lr": "high"}], "expected a number"),
        ({"match": "bias"}, r"must be tables: write \[\[optimizer.groups\]\]"),
    ],
)
def test_bad_groups_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        recipe(groups).fit(Net())


def test_patterns_of_frozen_and_tied_parameters() -> None:
    model = Net()
    model.norm.requires_grad_(False)
    with pytest.raises(JobError, match=r"'norm.weight' and others that are not trained"):
        recipe([{"match": "norm", "lr": 0.1}]).fit(model)
    tied = Net()
    tied.tied_to = tied.head  # type: ignore[assignment]
    with pytest.raises(JobError, match=r"which is the parameter 'head.weight': match that"):
        recipe([{"match": "tied_to", "lr": 0.1}]).fit(tied)


def test_freeze() -> None:
    model = Net()
    freeze_parameters(model, ["^features", "norm.bias"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "norm.weight",
        "head.weight",
        "head.bias",
    ]
    with pytest.raises(JobError, match=r"training.freeze\[1\] = 'feature_' matches no parameter"):
        freeze_parameters(Net(), ["head", "feature_"])


def test_average_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model, decay = Net(), 0.8
    part = Use("adam", lr=0.05)
    made = make_optimizer_recipe(part, constant(), lr_scale="none", num_shares=1, average_decay=decay)
    optimizer = made.make(model.named_parameters())
    truth = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    truth.update_parameters(model)  # it begins with the weights as they are
    for step in range(6):
        # The norm has no gradient at first, and none in the fourth step.
        used = ["features", "head"] if step in (0, 3) else ["features", "norm", "head"]
        for name in used:
            for parameter in getattr(model, name).parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        model.zero_grad()
        truth.update_parameters(model)
    from cordee.compute.averaging import swap_averages

    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    swap_averages(optimizer)
    for name, parameter in truth.module.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    swap_averages(optimizer)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in trained.items())
