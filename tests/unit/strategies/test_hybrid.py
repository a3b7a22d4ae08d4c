"""What `hybrid` decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest
from small_jobs import small_job

from cordee.assembly import assemble
from cordee.cluster import Team
from cordee.core.errors import CordeeError
from cordee.core.job import Job
from cordee.strategies.hybrid.mesh import Mesh, read_mesh


def test_meshes() -> None:
    assert read_mesh({"data": 2, "pipeline": 3}, 6) == Mesh(2, "pipeline", 3)
    assert read_mesh({"tensor": 2, "data": 2, "pipeline": 1}, 4) == Mesh(2, "tensor", 2)
    assert read_mesh({"sharded": 4}, 4) == Mesh(1, "sharded", 4)


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
        ({"mesh": {"pipeline": 2, "tensor": 2}}, "combines 'data' with one of .*, not 'pipeline' with 'tensor'"),
        ({"mesh": {"data": 2, "tensor": 2}, "microbatches": 2}, "microbatches is a setting of 'pipeline', the job's"),
        ({"mesh": {"data": 2, "pipeline": 2}, "microbatches": 5}, "microbatches = 5 cuts 4 samples"),
        ({"mesh": {"data": 2, "pipeline": 2}, "stages": 4}, "one stage per worker, the job has 4 stages on 2 workers"),
        ({"mesh": {"data": 2, "sharded": 2}, "offload": True}, "strategy.offload = true"),
        ({"mesh": [2, 2]}, "strategy.mesh = .* does not fit"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], message: str) -> None:
    job = small_job(strategy={"name": "hybrid", "workers": 4, **settings})
    with pytest.raises(CordeeError, match=message):
        assemble(job, Team(num_workers=4, num_local_workers=4))
