"""The kinds of run: which processes there are, and which run needs none but the launcher."""

from __future__ import annotations

import pytest

from cordee.core import Job
from cordee.runs.kind import KINDS, describe_without_slot, kind_of, needs_engine


def job(name: str, workers: int, **settings: int) -> Job:
    return Job.coerce(
        {
            "name": "j",
            "model": {"use": "mlp"},
            "data": {"use": "iris"},
            "strategy": {"name": name, "workers": workers, **settings},
        }
    )


@pytest.mark.parametrize(
    ("job", "kind", "roles", "is_engine_needed"),
    [
        (job("single", 1), "team", {"worker": 1}, False),
        (job("data_parallel", 1), "team", {"worker": 1}, False),
        (job("data_parallel", 3), "team", {"worker": 3}, True),
        (
            job("parameter_server", 1, servers=2, replicas=2),
            "dispatched",
            {"worker": 1, "server": 4, "evaluator": 1},
            True,
        ),
    ],
)
def test_roles(job: Job, kind: str, roles: dict[str, int], is_engine_needed: bool) -> None:
    assert kind_of(job) == kind
    assert {role.name: role.num_processes for role in KINDS[kind].roles(job)} == roles
    assert needs_engine(job) == is_engine_needed


def test_what_takes_no_slot_is_said() -> None:
    assert describe_without_slot(job("data_parallel", 3)) == describe_without_slot(job("federated", 2)) == ""
    assert describe_without_slot(job("parameter_server", 1, servers=2)) == (
        "2 servers and 1 evaluator on this host, without a slot"
    )
    assert describe_without_slot(job("parameter_server", 1, servers_on="slots")) == (
        "1 server and 1 evaluator beside workers, without a slot"
    )
