"""A client of federated learning that is a team: the update of one worker, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from process_pool import ProcessPool
from torch import Tensor

from cordee.cluster import Team
from cordee.core import Job
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import ClientTrainer, Sent, Update
from cordee.strategies.federated.client_team import ClientTeam
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(60)


def train_client(index: int, size: int, strategy: dict[str, Any]) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """Return what one worker of a team of `size` would send after two rounds: 37 samples in batches of 7 and fewer."""
    job = Job.from_dict(
        {
            "model": {"use": "mlp", "hidden": [8]},
            "data": {"use": "digits"},
            "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9},
            "training": {"batch_size": 7, "threads": 1, "clip_norm": 1.0},
            "strategy": {"name": "federated", "local_epochs": 2, **strategy},
        }
    )
    torch.manual_seed(0)
    parts, settings = assemble(job, Team()), settings_of(job)
    algorithm = make_algorithm(settings.use, job.python_path)
    flat = FlatModel(parts.model, settings.is_personal)
    trainer = ClientTrainer(job, settings, algorithm, flat, parts.computation, parts.recipe)
    trainer.team = ClientTeam(index, size)
    own = algorithm.begin_server(flat.shared) if algorithm.sends_own else {}
    sent, state, updates = Sent(0, flat.shared.clone(), flat.read_buffers(), own), {}, list[Update]()
    for number in range(2):
        indices = torch.arange(37)
        updates.append(trainer.train(sent._replace(round=number), state, parts.splits.train, indices, client="a"))
        state = updates[-1].state
    numbers = [float(n) for u in updates for n in (u.num_samples, u.num_steps, u.num_trained, u.loss_sum, u.loss_count)]
    return [u.payload[0] for u in updates], numbers, list(updates[-1].state.values())


@pytest.mark.parametrize("strategy", [{}, {"algorithm": "scaffold"}, {"personal": ["*.bias"]}], ids=str)
def test_a_team_makes_the_update_of_one_worker(two: ProcessPool, strategy: dict[str, Any]) -> None:
    """Gradients are added up in another order: 22 steps in float32 differ by less than 1e-5. The members do not."""
    alone = train_client(0, 1, strategy)
    one, other = two.run(train_client, strategy)
    for mine, theirs in zip([*one[0], *one[2]], [*other[0], *other[2]], strict=True):
        assert torch.equal(mine, theirs)
    assert one[1] == other[1] == pytest.approx(alone[1], rel=1e-5)
    for mine, theirs in zip([*one[0], *one[2]], [*alone[0], *alone[2]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
