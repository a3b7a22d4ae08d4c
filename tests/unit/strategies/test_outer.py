"""The outer step against its formulas, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cordee.core.errors import CheckpointError, JobError
from cordee.strategies.outer import OuterStep

DILOCO = {"use": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}


def parameters(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "b": torch.randn(5, generator=generator, dtype=torch.float64),
    }


def test_without_an_optimizer_parameters_become_the_mean() -> None:
    start, ends = parameters(0), [parameters(1), parameters(2)]
    step = OuterStep(start)
    step.step({name: sum(end[name] - start[name] for end in ends) / 2 for name in start})
    for name, value in step.start.items():
        torch.testing.assert_close(value, (ends[0][name] + ends[1][name]) / 2, rtol=0, atol=1e-14)


def test_nesterov_momentum_is_diloco() -> None:
    start = parameters(0)
    step = OuterStep(start, DILOCO)
    expected, velocity = start["a"].clone(), torch.zeros(3, 4, dtype=torch.float64)
    for seed in range(1, 5):
        means = parameters(seed)
        gradient = -means["a"].clone()
        velocity = 0.9 * velocity + gradient
        expected -= 0.7 * (gradient + 0.9 * velocity)
        step.step(means)
    torch.testing.assert_close(step.start["a"], expected, rtol=0, atol=1e-13)


def test_the_start_is_a_copy_and_a_missing_mean_changes_nothing() -> None:
    start = parameters(0)
    step = OuterStep(start, DILOCO)
    step.step({"a": torch.ones(3, 4, dtype=torch.float64)})
    assert torch.equal(start["a"], parameters(0)["a"])
    assert torch.equal(step.start["b"], start["b"])
    assert not torch.equal(step.start["a"], start["a"])


def test_a_loaded_state_continues_with_the_same_bits() -> None:
    one = OuterStep(parameters(0), DILOCO)
    one.step(parameters(1))
    other = OuterStep(one.start, DILOCO)
    other.load_state_dict(one.state_dict())
    one.step(parameters(2))
    other.step(parameters(2))
    for name, value in one.start.items():
        assert torch.equal(value, other.start[name])


def test_an_empty_state_begins_again_and_one_without_use_is_refused() -> None:
    step = OuterStep(parameters(0), DILOCO)
    step.load_state_dict(OuterStep(parameters(0)).state_dict())
    step.step(parameters(1))
    with pytest.raises(CheckpointError, match="the job has none"):
        OuterStep(parameters(0)).load_state_dict(step.state_dict())


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"use": "sgdd"}, "strategy.outer"),
        ({"lr": 0.7}, r"\[strategy.outer\] needs the key 'use'"),
        ({"use": "sgd", "lr": "0.7"}, "strategy.outer.lr = '0.7' does not fit"),
        ({"use": "sgd", "lr": 0.7, "nesterov": True}, "refused its settings"),
        ({"use": "sgd", "rate": 0.7}, "rate"),
    ],
)
def test_bad_settings_are_named(outer: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        OuterStep(parameters(0), outer)
