"""`local_sgd` with workers that are teams themselves (`workers_per_group`), against plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_local_sgd import DILOCO, Simulated, job_of, train

from cordee.cluster import Team
from cordee.core import Job, fault_points
from cordee.core.errors import JobError
from cordee.strategies.local_sgd.group import cut_groups
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(300)


class SimulatedGroups(Simulated):
    """Groups of workers, each as one worker that computes the shares of all its members at once."""

    def steps(self, group: Sequence[int], start: int, stop: int) -> list[int]:
        """Take a group's steps with the model of its first member; return what each member has counted."""
        first, counts = group[0], [0] * len(group)
        for step in range(start, stop):
            shares = [next(iter(self.shares(self.parts[index], step, step + 1))) for index in group]
            inputs = torch.cat([share.inputs for share in shares])
            targets = torch.cat([share.targets for share in shares])
            counts = [count + len(share.targets) for count, share in zip(counts, shares, strict=True)]
            if len(inputs):
                self.optimizers[first].zero_grad()
                torch.nn.functional.cross_entropy(self.models[first](inputs), targets).backward()
                self.optimizers[first].step()
        return counts

    def agree(self, ends: Sequence[tuple[int, int]], outer: bool) -> None:
        """Apply the mean of the differences of models, each given with its items."""
        total = sum(count for _, count in ends)
        self.samples += total
        for place, begin in enumerate(self.start):
            learnt = [(list(self.models[index].parameters())[place].detach(), count) for index, count in ends]
            mean = torch.stack([(end - begin) * (count / total) for end, count in learnt]).sum(0)
            if outer:
                self.velocity[place] = 0.9 * self.velocity[place] - mean
                begin -= 0.7 * (-mean + 0.9 * self.velocity[place])
            else:
                begin += mean
        with torch.no_grad():
            for model in self.models:
                for parameter, begin in zip(model.parameters(), self.start, strict=True):
                    parameter.copy_(begin)


@pytest.mark.parametrize(
    ("outer", "optimizer"),
    [
        pytest.param(DILOCO, {}, id="diloco"),
        pytest.param({}, {"use": "adam", "lr": 0.01, "momentum": None}, id="mean, Adam", marks=pytest.mark.long),
    ],
)
def test_a_group_is_one_worker_with_the_shares_of_its_members(
    tmp_path: Path, outer: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    job = job_of(tmp_path, strategy={"workers": 4, "workers_per_group": 2, "outer": outer}, training={"steps": 18})
    if optimizer:
        tables = job.to_dict()
        tables["optimizer"] = {key: value for key, value in optimizer.items() if value is not None}
        job = Job.from_dict(tables)
    summary, weights = train(tmp_path, job, "run")
    simulated = SimulatedGroups(job, 4)
    for start, stop in ((0, 5), (5, 10), (10, 15), (15, 18)):
        groups = [([0, 1], simulated.steps([0, 1], start, stop)), ([2, 3], simulated.steps([2, 3], start, stop))]
        simulated.agree([(members[0], sum(counts)) for members, counts in groups], bool(outer))
    simulated.assert_equal(weights)
    assert (summary["samples"], summary["samples_lost"]) == (simulated.samples, 0)


def test_one_group_of_all_workers_is_one_worker(tmp_path: Path) -> None:
    job = job_of(tmp_path, strategy={"workers_per_group": 2}, training={"clip_norm": 0.5})
    _, grouped = train(tmp_path, job, "grouped")
    alone = Job.from_dict({**job.to_dict(), "strategy": {"name": "single", "workers": 1}})
    _, weights = train(tmp_path, alone, "alone")
    for name, weight in weights.items():
        torch.testing.assert_close(grouped[name], weight, rtol=0, atol=1e-12)


def test_a_group_that_loses_a_member_trains_on_to_the_end_of_its_window(tmp_path: Path) -> None:
    """What was learnt together before stays; the samples of the one that was lost are not counted."""
    job = job_of(
        tmp_path,
        strategy={"workers_per_group": 2, "outer": DILOCO},
        cluster={"max_restarts": 0, "failure_timeout": "2s"},
    )
    fault = fault_points.Fault("step.taken", "worker-1", "kill", 7)
    summary, weights = train(tmp_path, job, "run", faults=[fault])
    simulated = SimulatedGroups(job, 2)
    simulated.agree([(0, sum(simulated.steps([0, 1], 0, 5)))], True)
    own, other = simulated.steps([0, 1], 5, 7)
    (rest,) = simulated.steps([0], 7, 10)
    simulated.agree([(0, own + rest)], True)
    lost = other + sum(len(inputs) for inputs, _ in simulated.shares(simulated.parts[1], 7, 10))
    simulated.job = job_of(tmp_path)  # nobody is left to be in a group with
    simulated.parts[0] = simulated.part(0, 1)
    for start in (10, 15):
        (count,) = simulated.steps([0], start, start + 5)
        simulated.agree([(0, count)], True)
    simulated.assert_equal(weights)
    assert (summary["samples"], summary["samples_lost"]) == (simulated.samples, lost)
    assert (summary["recoveries"], summary["steps_redone"]) == (1, 0)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ({"outer": DILOCO}, {}),
        pytest.param({"sync_every": 6, "delay": 2, "compress": "int8"}, {}, marks=pytest.mark.long),
        pytest.param({"sync_every": 6, "fragments": 2}, {"use": "adam", "lr": 0.01}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_groups_that_lose_and_gain_members_count_every_sample(
    tmp_path: Path, strategy: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """Members are compared at each commit. The one that replaces another has the optimizer state of its group."""
    job = job_of(
        tmp_path,
        strategy={**strategy, "workers": 4, "workers_per_group": 2},
        training={"steps": 60},
        cluster={"failure_timeout": "2s"},
    )
    if optimizer:
        job = Job.from_dict({**job.to_dict(), "optimizer": optimizer})
    summary, _ = train(tmp_path, job, "run", faults=[fault_points.Fault("step.taken", "worker-2", "kill", 16)])
    assert summary["recoveries"] == 1 and summary["steps"] == 60
    assert summary["samples"] + summary["samples_lost"] == 7 * 90 + 4 * 12
    assert 0 < summary["samples_lost"] <= 6 * 3
    assert summary["train_loss"] < 1.0


def test_groups_are_neighbours_of_about_the_same_size() -> None:
    assert cut_groups(4, 2) == [[0, 1], [2, 3]]
    assert cut_groups(3, 2) == [[0], [1, 2]]
    assert cut_groups(5, 4) == [[0, 1], [2, 3, 4]]
    assert cut_groups(1, 4) == [[0]]
    assert cut_groups(2, 1) == [[0], [1]]


@pytest.mark.parametrize(
    ("workers", "size", "message"),
    [
        (2, 0, "workers_per_group = 0 must be at least 1"),
        (2, 3, "workers_per_group = 3 is more than strategy.workers = 2"),
        (5, 2, "workers_per_group = 2 is no divisor of strategy.workers = 5"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, workers: int, size: int, message: str) -> None:
    with pytest.raises(JobError, match=message):
        assemble(job_of(tmp_path, strategy={"workers": workers, "workers_per_group": size}), Team(0, workers))
