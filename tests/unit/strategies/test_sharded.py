"""What `sharded` decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_jobs import small_job
from torch import nn

from cordee.compute import Computation, make_loss, make_optimizer_recipe, make_schedule
from cordee.core import Use
from cordee.core.errors import JobError
from cordee.models import gpt
from cordee.strategies.choice import make_strategy
from cordee.strategies.sharded import choose_units
from cordee.strategies.split import require_elementwise


def names(model: nn.Module, unit_bytes: int) -> list[str]:
    known = {module: name for name, module in model.named_modules()}
    return [known[unit] for unit in choose_units(model, unit_bytes)]


def small_gpt(**arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return gpt(input_shape=(8,), num_classes=30, num_layers=2, embedding_width=32, num_heads=2, **arguments)


def test_units_are_as_large_as_asked() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    assert names(model, 10**9) == [""]
    assert names(model, 440) == ["0", "2.0", "2.1", ""]
    assert names(model, 441) == ["2", ""]


def test_every_parameter_is_in_one_unit() -> None:
    model = small_gpt(tie_embeddings=False)
    for unit_bytes in (1, 1000, 5000, 20_000, 10**9):
        seen: set[int] = set()
        for unit in choose_units(model, unit_bytes):
            seen |= {id(parameter) for parameter in unit.parameters()}  # what an inner unit has is the inner unit's
        assert seen == {id(parameter) for parameter in model.parameters()}


def test_a_tied_weight_stays_with_what_is_around_both_of_its_places() -> None:
    model = small_gpt()
    found = names(model, 1)
    assert found[-1] == ""
    assert not {"embedding", "embedding.token", "output", "output.vocabulary"} & set(found)
    assert {"embedding.position", "output.norm", "layer1.attention.project"} <= set(found)


def test_lists_of_modules_are_no_units() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(3)])

    assert names(Listed(), 441) == [""]
    assert names(Listed(), 440) == ["layers.0", "layers.1", "layers.2", ""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 1}, "'sharded' needs 2 workers or more, the job has 1"),
        ({"workers": 9}, "batch_size = 8 has no sample for each of 9 workers"),
        ({"workers": 2, "offload": True}, "strategy.offload = true moves parameters from a GPU .* on the CPU"),
        ({"workers": 2, "unit_bytes": 0}, "strategy.unit_bytes = 0 must be at least 1"),
        ({"workers": 2, "reducer": "ddp"}, "strategy.reducer is a setting of 'data_parallel'"),
        ({"workers": 2, "unit_byte": 5}, "has no key 'unit_byte'; did you mean 'unit_bytes'"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], message: str) -> None:
    job = small_job(strategy={"name": "sharded", **settings})
    computation = Computation(make_loss(job.loss), torch.device("cpu"), "fp32", True)
    with pytest.raises(JobError, match=message):
        make_strategy(job, computation)


def test_an_optimizer_that_looks_at_whole_parameters() -> None:
    schedule = make_schedule(Use("constant"), 1)
    for name, is_refused in (("adam", False), ("adafactor", True)):
        recipe = make_optimizer_recipe(Use(name, lr=0.1), schedule, lr_scale="none", num_shares=1)
        if is_refused:
            with pytest.raises(JobError, match="'Adafactor' may look at whole parameters, and strategy 'sharded'"):
                require_elementwise(recipe, nn.Linear(2, 2), "sharded")
        else:
            require_elementwise(recipe, nn.Linear(2, 2), "sharded")
