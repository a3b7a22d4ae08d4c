"""Where a federated run may be."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.runs.federated.facts import check_federated
from cordee.training.components import assemble

JOB = {
    "model": {"use": "mlp"},
    "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": 80},
    "training": {"batch_size": 4},
    "strategy": {"name": "federated", "workers": 2, "rounds": 2, "partition": {"clients": 4}},
}


def check(**cluster: str) -> None:
    check_job({**JOB, "cluster": cluster})


def check_job(table: dict[str, Any]) -> None:
    parts = assemble(Job.from_dict(table), Team())
    try:
        check_federated(parts)
    finally:
        parts.train.close()


def test_every_engine_may_start_the_workers() -> None:
    for engine in ("local", "env", "ray", "spark"):
        check(engine=engine)
    check(engine="agents", address="127.0.0.1")


def test_workers_that_join_from_other_hosts_are_refused() -> None:
    with pytest.raises(JobError, match="which strategy 'federated' with 2 workers cannot have"):
        check(address="127.0.0.1")


def normed(input_shape: Any, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))


@pytest.mark.parametrize(
    ("training", "strategy", "is_refused"),
    [
        ({"batch_size": 19}, {}, True),  # a client has 20 samples
        ({"batch_size": 20}, {}, False),
        ({"batch_size": 19}, {"local_steps": 1}, False),  # the last batch is never reached
        ({"batch_size": 20, "accumulate": 15}, {}, True),
        ({"batch_size": 13}, {"client_test": 0.3}, True),
    ],
)
def test_a_batch_norm_is_not_given_one_sample(
    training: dict[str, int], strategy: dict[str, Any], is_refused: bool
) -> None:
    table = {**JOB, "model": {"use": normed}, "training": training, "strategy": {**JOB["strategy"], **strategy}}
    if not is_refused:
        check_job(table)
        return
    with pytest.raises(JobError, match=r"client 0 trains on [0-9]+ samples, .* on one of them by itself, which this"):
        check_job(table)
    check_job({**table, "model": {"use": "mlp"}})
