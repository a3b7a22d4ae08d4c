"""fp16 with a scale of the loss: what a GPU would do, computed on the CPU, where jobs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cordee.cluster import Team
from cordee.compute import Computation, make_loss, make_optimizer_recipe
from cordee.compute.computation import NO_VOTES
from cordee.compute.loss_scale import GROWTH_INTERVAL, START, LossScale
from cordee.compute.schedules import constant
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.references import Use
from cordee.strategies.single import Single, SingleSettings
from cordee.training.components import assemble

JOB: dict[str, Any] = {"model": "mlp", "data": {"use": "synthetic", "shape": [5], "num_classes": 3, "size": 16}}


def trained(precision: str, scale: LossScale | None, num_steps: int = 3) -> tuple[nn.Module, Single]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = Batch(torch.randn(16, 5), torch.randint(0, 3, (16,)))
    computation = Computation(
        make_loss(Use("cross_entropy")), torch.device("cpu"), precision, counts_classes=True, scale=scale
    )
    job = Job.from_dict({**JOB, "training": {"clip_norm": 0.5}})
    strategy = Single(job, SingleSettings(), computation)
    recipe = make_optimizer_recipe(Use("sgd", lr=0.5, momentum=0.9), constant(), lr_scale="none", num_shares=1)
    strategy.setup(model, recipe, Team(), batch)
    for step in range(num_steps):
        loss = strategy.forward_backward([batch], measure=False, vote=lambda: NO_VOTES)
        assert loss.mean < 2.0  # not scaled
        strategy.update(step)
    return model, strategy


def test_steps_are_those_of_fp32_within_the_precision() -> None:
    plain, _ = trained("fp32", None)
    scale = LossScale()
    scaled, _ = trained("fp16", scale)
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3)
        assert not torch.equal(one, other)
    assert scale.factor == START and scale.dump()["num_sound"] == 3


def test_a_step_that_overflows_is_left_out_and_the_scale_is_halved() -> None:
    scale = LossScale()
    scale.load({"factor": 2.0**127, "num_sound": 5})
    model, strategy = trained("fp16", scale, num_steps=1)
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert scale.dump() == {"factor": 2.0**126, "num_sound": 0}
    assert not strategy._optimizer.state  # not even counted
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_scale_grows_after_many_sound_steps() -> None:
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL):
        scale.record(is_sound=True)
    assert scale.dump() == {"factor": 2 * START, "num_sound": 0}
    other = LossScale()
    other.load(scale.dump())
    assert other.factor == 2 * START
    other.load({})
    assert other.factor == START


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the job")
def test_a_job_without_a_gpu_is_refused() -> None:
    with pytest.raises(JobError, match=r"'fp16' is for GPUs, and this job computes on the CPU: set .*'bf16'"):
        assemble(Job.from_dict({**JOB, "training": {"precision": "fp16"}}), Team())
