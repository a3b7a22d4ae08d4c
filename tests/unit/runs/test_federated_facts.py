"""Where a federated run may be."""

from __future__ import annotations

import pytest

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
    parts = assemble(Job.from_dict({**JOB, "cluster": cluster}), Team())
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
