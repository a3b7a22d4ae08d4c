"""`tensor` computes what `single` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driving import Table, job, train_together
from networks import Dropped
from process_pool import CaseError, ProcessPool
from splitting import JOBS, TOKENS, References, check_equal
from torch import Tensor

from cordee.cluster import Team
from cordee.compute import NO_VOTES
from cordee.core import Job
from cordee.strategies.tensor import TensorParallel
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", ["mlp", "mlp, momentum and clipping", "gpt"])
def test_two_workers_equal_one(two: ProcessPool, name: str, references: References, tmp_path: Path) -> None:
    check_equal(two, JOBS[name], {"name": "tensor"}, references(JOBS[name]), tmp_path)


def test_a_vocabulary_that_does_not_divide(two: ProcessPool, references: References, tmp_path: Path) -> None:
    table = {**JOBS["gpt"], "data": {**TOKENS, "num_classes": 31}}
    check_equal(two, table, {"name": "tensor"}, references(table), tmp_path)


def test_four_workers_equal_one(four: ProcessPool, references: References, tmp_path: Path) -> None:
    check_equal(four, JOBS["gpt"], {"name": "tensor"}, references(JOBS["gpt"]), tmp_path)


PLANS = [
    {"words": "row", "blocks.*.fc1": "column", "blocks.*.fc2": "row", "head": "gather"},
    {"words": "column", "blocks.0.fc1": "gather", "blocks.0.fc2": "scatter", "head": "scatter"},
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_users_model_by_a_plan(two: ProcessPool, plan: Table, references: References, tmp_path: Path) -> None:
    table = job(model={"use": "networks:TwoBranches"}, data=TOKENS, optimizer={"use": "sgd", "lr": 0.02})
    check_equal(two, table, {"name": "tensor", "plan": plan}, references(table), tmp_path)


def test_a_plan_that_changes_the_model_is_refused(two: ProcessPool, tmp_path: Path) -> None:
    table = job(model={"use": "mlp", "hidden": [32, 32]})
    for plan in ({"linear1": "column"}, {"linear1": "column", "linear2": "gather", "classifier": "scatter"}):
        with pytest.raises(CaseError, match=r"JobError: strategy.plan (changes what|does not fit)"):
            train_together(two, {**table, "strategy": {"name": "tensor", "plan": plan}}, tmp_path)


def masks_of_three_steps(index: int, size: int, table: Table) -> list[list[Tensor]]:
    """Return the masks of each dropout of `networks:with_dropout`, step by step."""
    team = Team(index, size, num_local_workers=size, local_rank=index)
    parts = assemble(Job.from_dict({**table, "strategy": {**table["strategy"], "workers": size}}), team)
    parts.setup()
    strategy = parts.strategy
    assert isinstance(strategy, TensorParallel)
    for step in range(3):
        torch.manual_seed(step)
        strategy.forward_backward([parts.example], measure=False, vote=lambda: NO_VOTES)
        strategy.update(step)
    return [module.masks for module in strategy._working.modules() if isinstance(module, Dropped)]


def test_slices_have_masks_of_their_own_and_whole_activations_have_one(two: ProcessPool) -> None:
    plan = {"1": "column", "3": "row"}
    table = job(model={"use": "networks:with_dropout"}, strategy={"name": "tensor", "plan": plan})
    first, second = two.run(masks_of_three_steps, table)
    for step in range(3):
        before, inside, after = ((ours[step], theirs[step]) for ours, theirs in zip(first, second))
        assert inside[0].shape == (2, 8)  # of two samples, half of the 16 units
        assert not torch.equal(*inside)
        assert torch.equal(*before) and torch.equal(*after)
    assert not torch.equal(first[1][0], first[1][1])  # and other ones in every step
