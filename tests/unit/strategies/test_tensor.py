"""What `tensor` decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.core.errors import CordeeError
from cordee.models import gpt, mlp
from cordee.models.slicing import choose_slicing
from cordee.training.components import assemble

TOKENS = {"use": "synthetic", "kind": "tokens", "shape": [8], "num_classes": 30, "size": 40, "test_size": 8}
IMAGES = {"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, "size": 40, "test_size": 8}


PAIR = {"first": "column", "last": "row"}


class Softmaxed(nn.Module):
    """What is between its layers looks at all of the activations."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(input_shape[0], 8), nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        last: Tensor = self.last(torch.softmax(self.first(inputs), -1))
        return last


class Normalized(Softmaxed):
    """The weight of its first layer is computed from two parameters."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        nn.utils.parametrizations.weight_norm(self.first)


def perceptron(*hidden: int) -> nn.Module:
    return mlp(input_shape=(6,), num_classes=5, hidden=hidden)


def test_perceptrons_go_in_pairs() -> None:
    assert choose_slicing(perceptron(8), 2, {}) == {"linear1": "column", "classifier": "row"}
    assert choose_slicing(perceptron(8, 8), 2, {}) == {"linear1": "column", "linear2": "row", "classifier": "scatter"}
    assert choose_slicing(perceptron(7, 8), 2, {}) == {"linear1": "scatter", "linear2": "column", "classifier": "row"}
    assert choose_slicing(perceptron(), 3, {}) == {"classifier": "scatter"}


def test_both_ends_of_a_transformer_are_split_along_one_side() -> None:
    for words, ends in ((30, ("row", "gather")), (31, ("column", "scatter"))):
        model = gpt(input_shape=(8,), num_classes=words, num_layers=1, embedding_width=8, num_heads=2)
        plan = choose_slicing(model, 2, {})
        assert (plan["embedding.token"], plan["output.vocabulary"]) == ends
        assert plan["layer1.attention.query_key_value"] == "column"
        assert "embedding.position" not in plan


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ({}, {"workers": 1}, "'tensor' needs 2 workers or more, the job has 1"),
        ({"model": {"use": "lenet"}, "data": IMAGES}, {}, r"'conv1.0' is a convolution: use strategy.name"),
        ({"model": {"use": "gpt", "num_heads": 2, "embedding_width": 8}, "data": TOKENS}, {"workers": 4}, "2 heads of"),
        ({"model": {"use": "mlp", "hidden": [7]}}, {"workers": 4}, "no layer of the model divides by 4 workers"),
        ({"model": {"use": "small_jobs:Net"}}, {}, "has no plan for models of the class Net"),
        ({}, {"plan": {"linear9": "row"}}, "plan names 'linear9', which no layer has; did you mean 'linear1'"),
        ({}, {"plan": {"dropout1": "row"}}, "gives 'dropout1' the style 'row', and it is a Dropout"),
        ({}, {"plan": {"linear1": "rows"}}, "strategy.plan = .* does not fit"),
        (
            {},
            {"plan": {"linear1": "row"}, "workers": 4},
            "the 6 inputs of 'linear1' cannot be shared out evenly over 4",
        ),
        (
            {},
            {"plan": {"linear1": "column"}},
            r"plan does not fit the model \(mat1 and mat2 .*\): a layer of the",
        ),
        ({"data": IMAGES}, {"plan": {"classifier": "column"}}, "plan changes what the model computes: a layer of"),
        ({"model": {"use": "test_tensor:Softmaxed"}}, {"plan": PAIR}, "plan changes what the model computes"),
        (
            {"model": {"use": "test_tensor:Normalized"}},
            {"plan": {"first": "gather"}},
            "'first' has a weight that is computed from others",
        ),
        ({"optimizer": {"use": "adafactor"}}, {}, "'Adafactor' may look at whole parameters, and strategy 'tensor'"),
        ({}, {"stages": 2}, "strategy.stages is a setting of 'pipeline', the job's strategy is 'tensor'"),
    ],
)
def test_what_it_refuses(parts: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    job = small_job(strategy={"name": "tensor", "workers": 2, **settings}, **parts)
    with pytest.raises(CordeeError, match=message):
        assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=2))


def test_a_plan_that_keeps_the_result_passes_the_rehearsal() -> None:
    plan = {"linear1": "column", "linear2": "row", "classifier": "scatter"}
    for strategy in (
        {"name": "tensor", "workers": 2},
        {"name": "hybrid", "workers": 4, "mesh": {"sharded": 2, "tensor": 2}},
        {"name": "hybrid", "workers": 4, "mesh": {"pipeline": 2, "tensor": 2}},
    ):
        job = small_job(model={"use": "mlp", "hidden": [8, 8]}, strategy={**strategy, "plan": plan})
        assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=2))
        wrong = small_job(model={"use": "mlp", "hidden": [8, 8]}, strategy={**strategy, "plan": {"linear1": "row"}})
        with pytest.raises(CordeeError, match=r"strategy\.plan does not fit the model"):
            assemble(wrong, Team(num_workers=job.strategy.workers, num_local_workers=2))
