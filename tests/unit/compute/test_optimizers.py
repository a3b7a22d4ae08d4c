"""Optimizers by name: all of torch's, their settings, the rate they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cordee.compute import OptimizerRecipe, make_optimizer_recipe, make_schedule
from cordee.compute.optimizers import builtin_optimizers
from cordee.core import Use
from cordee.core.errors import JobError


def recipe(part: Use, schedule: Use | None = None, lr_scale: str = "none", num_workers: int = 1) -> OptimizerRecipe:
    made = make_schedule(schedule or Use("constant"), 10)
    return make_optimizer_recipe(part, made, lr_scale=lr_scale, num_shares=num_workers)


def parameters(*shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes or [(3, 2), (2, 2)])]


def test_every_optimizer_of_torch_has_its_lower_case_name() -> None:
    expected = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert set(builtin_optimizers()) == {name.lower() for name in expected}
    assert {"sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam", "adafactor", "lbfgs"} <= set(builtin_optimizers())


@pytest.mark.parametrize("name", sorted(set(builtin_optimizers()) - {"lbfgs"}))
def test_every_optimizer_takes_a_step(name: str) -> None:
    named = parameters()
    before = [p.detach().clone() for _, p in named]
    made = recipe(Use(name))
    optimizer = made.make(named)
    assert type(optimizer).__name__.lower() == name
    made.set_rate(optimizer, 0)
    for _, parameter in named:
        gradient = torch.ones_like(parameter)
        parameter.grad = gradient.to_sparse() if name == "sparseadam" else gradient
    optimizer.step()
    assert all(not torch.equal(p, old) for (_, p), old in zip(named, before))


@pytest.mark.parametrize("spelling", ["AdamW", "adamw", "ADAMW", "torch.optim:AdamW", torch.optim.AdamW])
def test_spellings(spelling: Any) -> None:
    assert type(recipe(Use(spelling, lr=0.1)).make(parameters())) is torch.optim.AdamW


def test_settings_reach_the_optimizer() -> None:
    (group,) = recipe(Use("adam", lr=1, betas=[0.5, 0.6], weight_decay=0.1)).make(parameters()).param_groups
    assert (group["lr"], list(group["betas"]), group["weight_decay"]) == (1, [0.5, 0.6], 0.1)


def test_the_rate_is_told_as_a_number_also_where_it_is_a_tensor() -> None:
    made = recipe(Use(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.5))))
    assert type(made.set_rate(made.make(parameters()), 0)) is float


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_one_kernel_for_all_parameters_where_torch_has_it(name: str) -> None:
    assert recipe(Use(name, lr=0.1)).make(parameters()).param_groups[0]["fused"] is True
    assert not recipe(Use(name, lr=0.1, foreach=True)).make(parameters()).param_groups[0]["fused"]
    assert not recipe(Use(name, lr=0.1, fused=False)).make(parameters()).param_groups[0]["fused"]


def test_the_fused_step_is_the_usual_formula() -> None:
    results = []
    for extra in ({}, {"fused": False}):
        named = parameters()
        optimizer = recipe(Use("adam", lr=0.1, **extra)).make(named)
        for step in range(3):
            for _, p in named:
                p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
        results.append([p for _, p in named])
    # Only the order of roundings differs.
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_frozen_parameters_are_left_out() -> None:
    named = parameters()
    named[0][1].requires_grad_(False)
    assert recipe(Use("sgd", lr=0.1)).make(named).param_groups[0]["params"] == [named[1][1]]


def test_the_rate_follows_the_schedule() -> None:
    made = recipe(Use("sgd", lr=0.5), Use("linear"))
    optimizer = made.make(parameters())
    assert [made.set_rate(optimizer, step) for step in (0, 5, 0, 9)] == pytest.approx([0.5, 0.25, 0.5, 0.05])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    def two_rates(params: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 10 * lr}], lr=lr)

    made = recipe(Use(two_rates, lr=0.1), Use("linear"))
    optimizer = made.make(parameters())
    assert made.set_rate(optimizer, 5) == pytest.approx(0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_follows_the_number_of_workers(scale: str, factor: float) -> None:
    made = recipe(Use("sgd", lr=0.1), lr_scale=scale, num_workers=4)
    assert made.set_rate(made.make(parameters()), 0) == pytest.approx(0.1 * factor)


def no_optimizer(params: list[Tensor]) -> int:
    return len(params)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Use("adan"), r"optimizer.use = 'adan' is not known; did you mean 'adam'\?"),
        (Use("adam", learning_rate=0.1), "optimizer has no setting 'learning_rate'"),
        (Use("sgd", momentum="much"), "optimizer.momentum = 'much' does not fit"),
        (Use("adam", lr=-1.0), "optimizer 'adam' refused its settings .*Invalid learning rate: -1.0"),
        (Use("lbfgs"), "evaluates the model many times a step"),
        (Use(no_optimizer), "makes a int, not a torch.optim.Optimizer"),
        (Use(lambda: None), "refused its settings"),
    ],
)
def test_optimizers_that_cannot_be_made(part: Use, message: str) -> None:
    with pytest.raises(JobError, match=message):
        recipe(part).make(parameters())


def test_a_model_without_parameters() -> None:
    with pytest.raises(JobError, match="no parameters to train"):
        recipe(Use("sgd", lr=0.1)).make([])


def test_an_optimizer_that_does_not_take_these_parameters() -> None:
    with pytest.raises(JobError, match="optimizer 'muon' refused"):
        recipe(Use("muon")).make(parameters((3,)))


def by_name(named_parameters: list[tuple[str, nn.Parameter]], lr: float = 0.1) -> torch.optim.Optimizer:
    """No decay for biases, which only their names tell apart."""
    biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
    others = [parameter for name, parameter in named_parameters if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}], lr=lr)


def test_a_function_that_asks_for_names_gets_them() -> None:
    model = nn.Linear(3, 2)
    made = recipe(Use(by_name, lr=0.2)).make(model.named_parameters())
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    assert made.param_groups[1]["params"] == [model.bias]


def of_no_parameter(named_parameters: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in named_parameters if name == "other"], lr=0.1)


def test_an_optimizer_of_nothing_names_what_it_left_out() -> None:
    with pytest.raises(JobError, match=r"takes none of 'p0', 'p1', 'p2' and 1 other parameters\. .* freeze them"):
        recipe(Use(of_no_parameter)).make(parameters((2,), (2,), (2,), (2,)))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), "fast", None])
def test_a_schedule_that_gives_no_number_is_blamed(factor: Any) -> None:
    made = make_optimizer_recipe(Use("sgd", lr=0.1), lambda step: factor, lr_scale="none", num_shares=1)
    with pytest.raises(JobError, match=r"the schedule gives .* for step 3: it must give a finite number"):
        made.set_rate(made.make(parameters()), 3)
