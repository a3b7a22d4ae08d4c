"""Where a federated run may be: its workers share files, so all of them are on one host, whatever starts them."""

from __future__ import annotations

import msgspec
import pytest

from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.communication.this_host import host_id
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.runs.federated.facts import check_federated, check_host
from cordee.training.components import assemble

JOB = {
    "model": {"use": "mlp"},
    "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": 80},
    "training": {"batch_size": 4},
    "strategy": {"name": "federated", "workers": 2, "rounds": 2, "partition": {"clients": 4}},
}
SPEC = MemberSpec(
    kind="rounds",
    role="worker",
    index=0,
    run_dir="run",
    run_id="run",
    run_host=host_id(),
    job="",
    address="",
    client_keys="",
    failure_timeout_s=2.0,
    startup_timeout_s=10.0,
)


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


def test_a_worker_on_another_host_is_refused() -> None:
    check_host(SPEC, "federated")
    with pytest.raises(JobError, match="and this worker is on host "):
        check_host(msgspec.structs.replace(SPEC, run_host="elsewhere"), "federated")
