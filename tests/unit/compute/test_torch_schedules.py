"""Schedulers of torch by name: the rates are those that torch sets, whatever asks for them in whatever order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from cordee.compute import OptimizerRecipe, make_optimizer_recipe, make_schedule
from cordee.compute.schedules import PlateauSchedule, follows_metric, torch_schedulers
from cordee.core.errors import JobError
from cordee.core.references import Use

NUM_BATCHES, NUM_STEPS = 3, 24


def halved(count: int) -> float:
    return 0.5**count


# For each of torch's, settings of the job file, and what makes the same in torch.
CASES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.3},
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "LinearLR": {"start_factor": 0.2, "total_iters": 5},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": [1.0, 0.2]},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.4, "step_size_up": 4},
    "LambdaLR": {"lr_lambda": f"{__file__}:halved"},
    "MultiplicativeLR": {"lr_lambda": f"{__file__}:halved"},
    "SequentialLR": {
        "schedulers": [{"use": "LinearLR", "total_iters": 2}, {"use": "ExponentialLR", "gamma": 0.5}],
        "milestones": [2],
    },
    "ChainedScheduler": {
        "schedulers": [{"use": "ConstantLR", "total_iters": 2}, {"use": "ExponentialLR", "gamma": 0.5}]
    },
}


def recipe(part: dict[str, Any], model: nn.Module) -> OptimizerRecipe:
    optimizer = Use("sgd", lr=0.1, momentum=0.9, groups=[{"match": "bias", "lr": 0.02}])
    schedule = make_schedule(Use.coerce("schedule", part), NUM_STEPS, num_batches=NUM_BATCHES)
    return make_optimizer_recipe(optimizer, schedule, lr_scale="none", num_shares=1).fit(model)


def in_torch(name: str, optimizer: torch.optim.Optimizer) -> Any:
    args = dict(CASES[name])
    if name in ("LambdaLR", "MultiplicativeLR"):
        args["lr_lambda"] = halved
    if name == "OneCycleLR":
        args["total_steps"] = NUM_STEPS
    if "schedulers" in args:
        args["schedulers"] = [
            getattr(lr_scheduler, table["use"])(optimizer, **{k: v for k, v in table.items() if k != "use"})
            for table in args["schedulers"]
        ]
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(args["schedulers"], optimizer=optimizer)
    return getattr(lr_scheduler, name)(optimizer, **args)


def test_all_of_torchs_are_tried() -> None:
    assert set(torch_schedulers()) - {"ReduceLROnPlateau", "SWALR"} == set(CASES)


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_torch(name: str) -> None:
    model = nn.Linear(2, 2)
    made = recipe({"use": name, **CASES[name]}, model)
    ours = made.make(model.named_parameters())
    theirs = made.make(model.named_parameters())
    scheduler = in_torch(name, theirs)
    per_step = name in ("OneCycleLR", "CyclicLR")
    expected = []
    for step in range(NUM_STEPS):
        expected.append([(g["lr"], g["momentum"]) for g in theirs.param_groups])
        theirs.step()
        if step + 1 < NUM_STEPS and (per_step or (step + 1) % NUM_BATCHES == 0):
            scheduler.step()
    for step in [*range(NUM_STEPS), 3, 0, NUM_STEPS - 1]:  # servers may be asked for an earlier one
        made.set_rate(ours, step)
        assert [(g["lr"], g["momentum"]) for g in ours.param_groups] == expected[step], step
        assert made.first_rate(step) == expected[step][0][0]


def test_part_of_the_model_has_the_rates_of_its_groups() -> None:
    model = nn.Linear(2, 2)
    made = recipe({"use": "OneCycleLR", "max_lr": [1.0, 0.2]}, model)
    whole, part = made.make(model.named_parameters()), made.for_parts_of(model).make([("bias", model.bias)])
    made.set_rate(whole, 7)
    made.set_rate(part, 7)
    assert [group["lr"] for group in part.param_groups] == [whole.param_groups[1]["lr"]]


def test_per_step() -> None:
    model = nn.Linear(2, 2)
    made = recipe({"use": "exponentiallr", "gamma": 0.5, "per": "step"}, model)
    assert [made.first_rate(step) for step in range(3)] == [0.1, 0.05, 0.025]


PLATEAU = {"use": "ReduceLROnPlateau", "factor": 0.5, "patience": 1, "min_lr": [0.03, 0.001], "cooldown": 1}


@pytest.mark.parametrize("stop_at", [0, 3, 7])
def test_plateau_is_that_of_torch_and_continues(stop_at: int) -> None:
    model = nn.Linear(2, 2)
    made = recipe(PLATEAU, model)
    theirs = made.make(model.named_parameters())
    truth = lr_scheduler.ReduceLROnPlateau(theirs, **{k: v for k, v in PLATEAU.items() if k != "use"})  # type: ignore[arg-type]
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 0.9, math.nan, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0]
    saved: dict[str, float] = {}
    levels = set()
    for number, value in enumerate(values):
        truth.step(value)
        if number == stop_at:  # another process takes it up
            made = recipe(PLATEAU, model)
        assert isinstance(made.schedule, PlateauSchedule)
        made.schedule.load(saved)
        made.schedule.record(value)
        saved = made.schedule.dump()
        levels.add(saved["level"])
        ours = made.make(model.named_parameters())
        made.set_rate(ours, number)
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups], number
    assert len(levels) > 3


def test_plateau_follows_the_direction_of_the_metric() -> None:
    made = make_schedule(Use("ReduceLROnPlateau", metric="f1"), 9, better=lambda name: "higher")
    assert isinstance(made, PlateauSchedule) and made.metric == "f1" and made.mode == "max"
    assert follows_metric(Use("reducelronplateau")) and not follows_metric(Use("StepLR"))
    with pytest.raises(JobError, match="mode = 'min' contradicts the metric 'f1'"):
        make_schedule(Use("ReduceLROnPlateau", metric="f1", mode="min"), 9, better=lambda name: "higher")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"use": "StepLR"}, "schedule needs 'step_size': set schedule.step_size"),
        ({"use": "StepRL", "step_size": 2}, "did you mean 'StepLR'"),
        ({"use": "StepLR", "step_size": 2, "gama": 0.1}, "no setting 'gama'.*did you mean 'gamma'"),
        ({"use": "StepLR", "step_size": 2, "per": "batch"}, "must be 'step' or 'epoch'"),
        ({"use": "OneCycleLR"}, "needs 'max_lr'"),
        ({"use": "OneCycleLR", "max_lr": 1.0, "pct_start": 3.0}, "pct_start"),
        ({"use": "SequentialLR", "milestones": [2]}, "needs 'schedulers'"),
        ({"use": "SequentialLR", "milestones": [2], "schedulers": [{"use": "cosine"}] * 2}, "none of torch's"),
        (
            {"use": "SequentialLR", "milestones": [2], "schedulers": [{"use": "StepLR"}] * 2},
            r"schedulers\[0\] needs 'step_size'",
        ),
        ({"use": "ReduceLROnPlateau", "factor": 2.0}, "[Ff]actor should be"),
        ({"use": "LambdaLR", "lr_lambda": "nothing_here:f"}, "no module 'nothing_here'"),
    ],
)
def test_bad_settings_are_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        recipe(part, nn.Linear(2, 2))


def test_epochs_need_a_length() -> None:
    with pytest.raises(JobError, match=r"counts epochs, and this data has no length: set schedule.per = 'step'"):
        make_schedule(Use("StepLR", step_size=2), 9, num_batches=None)


class DecaySchedule(lr_scheduler.LRScheduler):
    """Changes more than rates."""

    def get_lr(self) -> Any:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (self.last_epoch // 2)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_that_changes_what_is_not_taken_from_it_is_refused() -> None:
    """Without a message its weight decay would have no effect."""
    made = recipe({"use": f"{__file__}:DecaySchedule"}, nn.Linear(2, 2))
    optimizer = made.make(nn.Linear(2, 2).named_parameters())
    made.set_rate(optimizer, NUM_BATCHES)
    with pytest.raises(JobError, match="changes 'weight_decay' of the optimizer"):
        made.set_rate(optimizer, 2 * NUM_BATCHES)
