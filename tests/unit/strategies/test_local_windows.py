"""What a worker of `local_sgd` agrees on, here with itself."""

from __future__ import annotations

import torch
from small_jobs import small_job
from torch import nn

from cordee.cluster import Team
from cordee.compute import Computation, Votes, make_loss, make_optimizer_recipe, make_schedule
from cordee.core import Batch, Use
from cordee.strategies.choice import make_strategy
from cordee.strategies.local_sgd.strategy import LocalSgd

IGNORED = 2
INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
COUNTED, UNCOUNTED = Batch(INPUTS, torch.arange(8) % 2), Batch(INPUTS, torch.full((8,), IGNORED))


def test_fragments_that_were_learnt_before_are_in_the_end_of_a_run_whose_last_labels_do_not_count() -> None:
    """The last window has nothing to agree on, but a fragment that was not sent since the first one has."""
    strategy = {"name": "local_sgd", "workers": 1, "sync_every": 4, "fragments": 2}
    job = small_job(strategy=strategy, loss={"use": "cross_entropy", "ignore_index": IGNORED})
    computation = Computation(make_loss(job.loss), torch.device("cpu"), "fp32", True)
    made = make_strategy(job, computation)
    assert isinstance(made, LocalSgd)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    recipe = make_optimizer_recipe(Use("sgd", lr=0.5), make_schedule(Use("constant"), 4), lr_scale="none", num_shares=1)
    made.setup(model, recipe, Team(), COUNTED)

    def window(batch: Batch, first: int, *, is_end: bool) -> float:
        for step in (first, first + 1):
            made.train_alone([batch], step=step, measure=False)
        loss = made.agree(Votes, is_end=is_end)
        made.update(first + 1) if loss.count else made.skip(first + 1)
        return loss.count

    assert window(COUNTED, 0, is_end=False) == 16
    learnt = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert window(UNCOUNTED, 2, is_end=True) == 0
    made.consolidate()
    for name, tensor in made.model.state_dict().items():
        torch.testing.assert_close(tensor, learnt[name])
