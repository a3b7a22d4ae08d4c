"""What `hybrid` decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.core.errors import CordeeError
from cordee.core.job import Job
from cordee.core.mesh import Mesh
from cordee.strategies.hybrid import read_mesh
from cordee.training.components import assemble


def test_meshes() -> None:
    assert read_mesh({"data": 2, "pipeline": 3}, 6) == Mesh(data=2, pipeline=3)
    assert read_mesh({"tensor": 2, "data": 2, "pipeline": 2}, 8) == Mesh(data=2, pipeline=2, tensor=2)
    assert read_mesh({"sharded": 4}, 4) == Mesh(sharded=4)


def test_pairs_of_sliced_layers_are_not_cut_apart() -> None:
    """The mlp has five blocks, and linear1, its activation and linear2 must stay together."""
    mesh = {"pipeline": 4, "tensor": 2}
    job = small_job(model={"use": "mlp", "hidden": [8, 4]}, strategy={"name": "hybrid", "workers": 8, "mesh": mesh})
    assemble(job, Team(num_workers=8, num_local_workers=8))
    deeper = small_job(
        model={"use": "mlp", "hidden": [8, 4]},
        strategy={"name": "hybrid", "workers": 10, "mesh": {"pipeline": 5, "tensor": 2}},
    )
    with pytest.raises(CordeeError, match=r"at most 4 stages, the job has 5: .*flatten, linear1, activation2, classif"):
        assemble(deeper, Team(num_workers=10, num_local_workers=10))


class UsesItsWeight(nn.Module):
    """The weight of a layer without the layer."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(input_shape[0], 8), nn.Linear(input_shape[0], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs)) @ self.first.weight)


def test_weights_without_their_layer_are_not_sliced() -> None:
    strategy = {"name": "hybrid", "workers": 4, "mesh": {"pipeline": 2, "tensor": 2}, "plan": {"first": "gather"}}
    job = small_job(model={"use": UsesItsWeight}, strategy=strategy)
    with pytest.raises(CordeeError, match="uses the weight of 'first' without calling the layer"):
        assemble(job, Team(num_workers=4, num_local_workers=4))


def test_workers_of_one_copy_have_one_share_of_the_batch() -> None:
    job = small_job(strategy={"name": "hybrid", "workers": 4, "mesh": {"data": 2, "pipeline": 2}, "microbatches": 2})
    shards = [assemble(job, Team(index, 4, num_local_workers=4)).shards for index in range(4)]
    assert [(one.first, one.total) for one in shards] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert Job.from_dict(job.to_dict()) == job


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "'hybrid' needs strategy.mesh"),
        ({"mesh": {"data": 2, "pipeline": 3}}, r"\{data = 2, pipeline = 3\} has 6 workers, the job has 4: .* = 6"),
        ({"mesh": {"data": 2, "pipelin": 2}}, "mesh has no axis 'pipelin'; did you mean 'pipeline'"),
        ({"mesh": {"data": 4, "tensor": 0}}, "the size of 'tensor' must be at least 1"),
        ({"mesh": {"data": 4}}, "splits nothing: .* or set strategy.name = 'data_parallel'"),
        ({"mesh": {"pipeline": 2, "sharded": 2}, "unit_bytes": 9}, "unit_bytes does not go with a pipeline"),
        ({"mesh": {"pipeline": 2, "sharded": 2}, "microbatches": 5}, "microbatches = 5 cuts 4 samples"),
        ({"mesh": {"pipeline": 4, "tensor": 1}, "plan": {"a": "row"}}, "plan is a setting of 'tensor', which .*mesh"),
        ({"mesh": {"sharded": 2, "tensor": 2}, "batch_norm": "sync"}, "batch_norm = 'sync' .* along 'tensor'"),
        ({"mesh": {"data": 2, "tensor": 2}, "microbatches": 2}, "microbatches is a setting of 'pipeline', the job's"),
        ({"mesh": {"data": 2, "pipeline": 2}, "microbatches": 5}, "microbatches = 5 cuts 4 samples"),
        ({"mesh": {"data": 2, "pipeline": 2}, "stages": 4}, "one stage per worker, the job has 4 stages on 2 workers"),
        ({"mesh": {"data": 2, "sharded": 2}, "offload": True}, "strategy.offload = true"),
        ({"mesh": {"data": 2, "pipeline": 2}, "microbatch": 2}, "no key 'microbatch'; did you mean 'microbatches'"),
        (
            {
                "mesh": {"pipeline": 2, "tensor": 2},
                "placement": [["flatten", "linear1"], ["activation1", "dropout1", "classifier"]],
            },
            "puts 'linear1' and 'activation1' into different stages, and they cannot be cut apart",
        ),
        ({"mesh": [2, 2]}, "strategy.mesh = .* does not fit"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], message: str) -> None:
    job = small_job(strategy={"name": "hybrid", "workers": 4, **settings})
    with pytest.raises(CordeeError, match=message):
        assemble(job, Team(num_workers=4, num_local_workers=4))
