"""Hooks on gradients: what may be computed in parts, and who has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.compute import refuse_uneven_hooks
from cordee.core.errors import CordeeError, ModelError
from cordee.strategies.split import refuse_hooks
from cordee.training.components import assemble

MASK = torch.tensor([[1.0], [0.0]])
UNEVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a limit": lambda gradient: gradient.clamp(-1.0, 1.0),
    "a high limit": lambda gradient: gradient.clamp(-100.0, 100.0),
    "a length": lambda gradient: gradient / gradient.norm(),
    "a noise": lambda gradient: gradient + 0.1 * torch.randn_like(gradient),
    "a decay": lambda gradient: gradient + 0.1,
}


def hooked(hook: Callable[[Tensor], Tensor | None] | None) -> nn.Linear:
    layer = nn.Linear(3, 2)
    if hook is not None:
        layer.weight.register_hook(hook)
    return layer


@pytest.mark.parametrize(
    "hook", [None, lambda gradient: gradient * MASK, lambda gradient: 0.5 * gradient, lambda _: None]
)
def test_hooks_that_may_see_parts(hook: Callable[[Tensor], Tensor | None] | None) -> None:
    refuse_uneven_hooks(hooked(hook), "training.accumulate")


@pytest.mark.parametrize("name", UNEVEN)
def test_hooks_that_make_something_else_of_parts_are_refused(name: str) -> None:
    layer, before = hooked(UNEVEN[name]), torch.random.get_rng_state()
    with pytest.raises(
        ModelError, match=r"'weight' cannot be trained with training.accumulate, .*something else of two"
    ):
        refuse_uneven_hooks(layer, "training.accumulate")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_hooks_after_a_gradient_was_added_up_are_refused() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModelError, match=r"'bias' .* runs after the gradient was added up"):
        refuse_uneven_hooks(layer, "training.accumulate")


def test_slices_have_no_hooks() -> None:
    refuse_hooks(hooked(None), "sharded")
    with pytest.raises(ModelError, match=r"'weight' has a hook .* 'sharded' trains slices of it"):
        refuse_hooks(hooked(lambda gradient: gradient), "sharded")


def masked(*, input_shape: tuple[int, ...], num_classes: int, limits: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Linear(8, num_classes))
    hook = (lambda gradient: gradient.clamp(-1.0, 1.0)) if limits else (lambda gradient: 0.5 * gradient)
    model[0].weight.register_hook(hook)
    return model


@pytest.mark.parametrize(
    ("limits", "strategy", "training", "refused"),
    [
        (False, {"name": "data_parallel", "workers": 2}, {}, False),
        (False, {"name": "pipeline", "workers": 2}, {}, False),
        (False, {"name": "sharded", "workers": 2}, {}, True),  # torch's shards are other tensors
        (False, {"name": "tensor", "workers": 2, "plan": {"0": "gather"}}, {}, True),
        (False, {"name": "hybrid", "workers": 4, "mesh": {"data": 2, "sharded": 2}}, {}, True),
        (True, {"name": "single", "workers": 1}, {}, False),
        (True, {"name": "single", "workers": 1}, {"accumulate": 2}, True),
        (True, {"name": "data_parallel", "workers": 2}, {}, True),
        (True, {"name": "parameter_server", "workers": 2}, {}, True),
        (True, {"name": "pipeline", "workers": 2}, {}, True),
    ],
)
def test_jobs_are_refused_before_a_process_is_started(
    limits: bool, strategy: dict[str, object], training: dict[str, object], refused: bool
) -> None:
    job = small_job(
        model={"use": "test_gradient_hooks:masked", "limits": limits},
        strategy=strategy,
        training=training,
    )
    if not refused:
        assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=2))
        return
    with pytest.raises(CordeeError, match=r"parameter '0.weight' (has a hook|cannot be trained with)"):
        assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=2))
