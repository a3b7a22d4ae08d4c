"""What `pipeline` decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import small_job
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from cordee.checkpoint import State, load_optimizer_state, optimizer_state
from cordee.cluster import Team
from cordee.compute import Computation, make_loss, split_batch
from cordee.core import Batch
from cordee.core.errors import CordeeError, JobError, ModelError
from cordee.models import gpt
from cordee.models.cutting import make_chain
from cordee.strategies.choice import make_strategy
from cordee.strategies.pipeline.stages import make_stages, merge_states, schedule_class, share_out, split_evenly
from cordee.strategies.slices import Held, Holdings
from cordee.training.components import assemble


@given(st.integers(1, 100), st.integers(1, 40))
def test_micro_batches_are_the_parts_of_accumulation(num_samples: int, num_microbatches: int) -> None:
    whole = Batch(torch.zeros(num_samples, 1), torch.zeros(num_samples))
    expected = [part.num_samples for part in split_batch(whole, num_microbatches) if part.num_samples]
    found = [size for count, size in split_evenly(num_samples, num_microbatches) for _ in range(count)]
    assert found == expected


def test_which_schedule_of_torch() -> None:
    assert schedule_class("1f1b", 4, 4, 4) is Schedule1F1B
    assert schedule_class("1f1b", 3, 4, 4) is ScheduleGPipe
    assert schedule_class("gpipe", 9, 4, 4) is ScheduleGPipe
    assert schedule_class("interleaved", 8, 4, 8) is ScheduleInterleaved1F1B
    assert schedule_class("interleaved", 9, 4, 8) is ScheduleLoopedBFS
    assert schedule_class("zero-bubble", 8, 4, 4) is ScheduleInterleavedZeroBubble
    assert schedule_class("zero-bubble", 9, 4, 4) is ScheduleGPipe


def test_a_tied_weight_is_held_by_both_ends() -> None:
    model = gpt(input_shape=(8,), num_classes=20, num_layers=2, embedding_width=8, num_heads=2)
    stages = make_stages(make_chain(model, torch.zeros(1, 8, dtype=torch.int64)), [1, 1, 2])
    owned = share_out(model, stages, [0, 1, 2])
    assert owned.tied() == {"embedding.token.weight": (0, 2)}
    assert owned.parameters["layer1.attention.project.weight"] == (1,)
    assert owned.parameters.keys() == dict(model.named_parameters()).keys()
    assert [stage.is_trained_before for stage in stages] == [False, True, True]
    assert share_out(model, stages, [0, 1, 0]).tied() == {}, "both ends on one worker: there is nothing to keep equal"


def test_what_no_stage_uses_is_kept_by_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    stages = make_stages(make_chain(model, torch.zeros(1, 3)), [1, 1])
    assert share_out(model, stages, [0, 1]).parameters["spare"] == (0,)


def test_parameters_of_something_else_are_noticed() -> None:
    model, other = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    stages = make_stages(make_chain(other, torch.zeros(1, 3)), [1])
    with pytest.raises(ModelError, match="2 parameters of the stages are not the model's"):
        share_out(model, stages, [0])


def test_a_batch_norm_in_two_places_cannot_be_in_two_stages() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.Linear(3, 3), norm)
    stages = make_stages(make_chain(model, torch.zeros(2, 3)), [1, 2])
    with pytest.raises(ModelError, match=r"buffer '0.running_mean' belongs to a module that is used in several stages"):
        share_out(model, stages, [0, 1])


def test_states_of_parts_make_the_state_of_the_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    parts = []
    for names in (["0.weight", "0.bias"], ["0.weight", "1.bias"]):
        named = dict(model.named_parameters())
        optimizer = torch.optim.Adam([named[name] for name in names], lr=torch.tensor(0.1))
        for name in names:
            named[name].grad = torch.ones_like(named[name])
        optimizer.step()
        parts.append(optimizer_state(optimizer, Holdings([Held(name, named[name]) for name in names])))
    whole = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    load_optimizer_state(whole, model, merge_states(parts))
    assert whole.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert [whole.state[p]["step"].item() for p in model.parameters()] == [1.0, 1.0, 1.0]
    assert isinstance(merge_states(parts[:1]), State)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 1}, "a pipeline needs 2 workers or more, the job has 1"),
        ({"stages": 3}, "cannot share 3 stages out evenly over 2 workers"),
        ({"stages": 4}, "schedule = '1f1b' has one stage per worker, the job has 4 stages on 2 workers"),
        ({"stages": 4, "schedule": "gpipe"}, "schedule = 'gpipe' has one stage per worker"),
        ({"workers": 4, "schedule": "interleaved"}, "can be cut into at most 5 stages, the job has 8"),
        ({"microbatches": 9}, "microbatches = 9 cuts 8 samples into empty parts"),
        ({"microbatches": 1}, "'1f1b' needs as many micro-batches as stages, the job has 1 and 2"),
        ({"schedule": "interleaved", "microbatches": 5}, "cannot share 5 micro-batches out over 2 workers"),
        (
            {"schedule": "zero-bubble", "recompute": True},
            "recompute, does not go with strategy.schedule = 'zero-bubble'",
        ),
        ({"schedule": "1f2b"}, "strategy.schedule = '1f2b' does not fit.*did you mean '1f1b'"),
        ({"stages": -1}, "strategy.stages = -1 must be at least 0"),
        ({"stages": 2, "placement": [["flatten"], ["linear1"], ["x"]]}, "contradict each other"),
        ({"placement": [["flatten", "linear1"], ["classifier"]]}, "puts block 'activation1' in no stage"),
        ({"placement": [["*1"], ["flatten"], ["classifier"]]}, "placement has 3 stages, which 2 workers cannot share"),
        ({"unit_bytes": 1000}, "strategy.unit_bytes is a setting of 'sharded', the job's strategy is 'pipeline'"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], message: str) -> None:
    job = small_job(strategy={"name": "pipeline", "workers": 2, **settings})
    with pytest.raises(CordeeError, match=message):
        assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=2))


class SkipsAll(nn.Module):
    """Its input is needed at its end."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(input_shape[0], 8), nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs))) + inputs.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            SkipsAll,
            "SkipsAll cannot be cut into stages: the input 'inputs' is needed again by 'sum_1': write the model",
        ),
        (lambda input_shape, num_classes: nn.Sequential(nn.Linear(input_shape[0], num_classes)), "one block only, '0'"),
    ],
)
def test_models_that_cannot_be_cut(model: Any, message: str) -> None:
    job = small_job(model={"use": model}, strategy={"name": "pipeline", "workers": 2})
    with pytest.raises(CordeeError, match=message):
        assemble(job, Team(num_workers=2, num_local_workers=2))


def test_accumulation_leaves_smaller_parts() -> None:
    job = small_job(strategy={"name": "pipeline", "workers": 2, "microbatches": 5}, training={"accumulate": 2})
    computation = Computation(make_loss(job.loss), torch.device("cpu"), "fp32", True)
    with pytest.raises(JobError, match="microbatches = 5 cuts 4 samples"):
        make_strategy(job, computation)
