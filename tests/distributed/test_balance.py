"""Shares of the batch by measured speed: a slow worker gets less, and the result is that of one worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from driving import Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool

from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_slow_worker_gets_less_and_each_sample_counts_once(two: ProcessPool, accumulate: int, tmp_path: Path) -> None:
    # 150 = 4 · 32 + 22: the last batch of an epoch is shorter.
    table = job(model={"use": "networks:SlowSecond"}, training={"accumulate": accumulate})
    alone = train_alone(table, tmp_path / "alone")
    strategy = {"name": "data_parallel", "workers": 2}
    together = train_together(two, {**table, "strategy": strategy, "cluster": {"balance": True}}, tmp_path / "two")
    changes = together[0].of("balance")
    assert changes, "nothing was balanced"
    for change in changes:
        assert sum(change["shares"]) == 32 and min(change["shares"]) >= 1
    assert changes[0]["step"] == 11 and changes[0]["shares"][1] < 16 < changes[0]["shares"][0], changes
    assert changes[0]["samples_per_second"][1] < changes[0]["samples_per_second"][0]
    assert largest_difference(alone, together[0]) <= 1e-5
    np.testing.assert_allclose(together[0].losses(), alone.losses(), rtol=2e-5, atol=2e-6)
    for key in ("samples", "epoch", "step"):
        assert [e[key] for e in together[0].of("step")] == [e[key] for e in alone.of("step")], key


REFUSED: dict[str, tuple[Table, str]] = {
    "strategies without shares": ({"strategy": {"name": "sharded", "workers": 2}}, "strategy 'sharded' with 2 workers"),
    "work on demand": ({"strategy": {"name": "parameter_server", "workers": 2}}, "use 'data_parallel'"),
    "one worker": ({"strategy": {"name": "data_parallel", "workers": 1}}, "with 1 worker cannot"),
    "reproducible mode": ({"training": {"reproducible": True}}, "training.reproducible = true rules out"),
    "passes that wait": ({"strategy": {"name": "data_parallel", "workers": 2, "reducer": "ddp"}}, "reducer = 'ddp'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_balanced_is_refused(case: str) -> None:
    sections, message = REFUSED[case]
    table = job(**{"strategy": {"name": "data_parallel", "workers": 2}, "cluster": {"balance": True}, **sections})
    with pytest.raises(JobError, match=message):
        assemble(Job.from_dict(table), Team(0, 2))
