"""A server whose parameters the optimizer leaves out is found before any process is started."""

from __future__ import annotations

import pytest
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.compute import Computation, make_loss, make_optimizer_recipe, make_schedule
from cordee.core import Batch, Use
from cordee.core.errors import JobError
from cordee.strategies.choice import make_strategy


def only_the_last(named_parameters: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in named_parameters if name.startswith("1.")], lr=0.1)


@pytest.mark.parametrize("servers", [1, 2])
def test_an_optimizer_that_leaves_a_server_nothing(servers: int) -> None:
    job = small_job(
        optimizer={"use": only_the_last}, strategy={"name": "parameter_server", "workers": 2, "servers": servers}
    )
    strategy = make_strategy(job, Computation(make_loss(job.loss), torch.device("cpu"), "fp32", True))
    recipe = make_optimizer_recipe(job.optimizer, make_schedule(Use("constant"), 10), lr_scale="none", num_shares=2)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    example = Batch(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    if servers == 1:
        strategy.check(model, recipe, example)
        return
    with pytest.raises(JobError, match=r"only_the_last' takes none of '0\.weight'"):
        strategy.check(model, recipe, example)
