"""The strategy that others are measured against, beside a loop written by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.compute import Computation, Votes, make_loss, make_optimizer_recipe, make_schedule
from cordee.core import Batch, Use
from cordee.core.errors import CheckpointError, JobError, TrainingError
from cordee.strategies.choice import choose_strategy, make_strategy
from cordee.strategies.strategy import Strategy
from cordee.strategies.table import STRATEGIES

BATCHES = [
    Batch(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g))
    for g in [torch.Generator().manual_seed(seed) for seed in range(5)]
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def single(optimizer: Use | None = None, **training: Any) -> Strategy:
    job = small_job(training=training)
    computation = Computation(make_loss(job.loss), torch.device("cpu"), job.training.precision, True)
    strategy = make_strategy(job, computation)
    schedule = make_schedule(Use("linear"), 10)
    recipe = make_optimizer_recipe(optimizer or Use("sgd", lr=0.5), schedule, lr_scale="none", num_shares=1)
    strategy.setup(net(), recipe, Team(), BATCHES[0])
    return strategy


def take(strategy: Strategy, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = strategy.forward_backward([BATCHES[step]], measure=False, vote=Votes)
        losses.append(loss.mean)
        strategy.update(step)
    return losses


def weights(strategy: Strategy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.model.state_dict().items()}


def test_it_is_the_loop_one_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    expected = []
    for step, (inputs, targets) in enumerate(BATCHES):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 10)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    strategy = single()
    assert take(strategy, range(5)) == expected
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights(strategy).items())


def test_clipping() -> None:
    strategy = single(clip_norm=0.01)
    before = weights(strategy)
    strategy.forward_backward([BATCHES[0]], measure=False, vote=Votes)
    update = strategy.update(0)
    assert update.gradient_norm is not None and update.gradient_norm > 0.01
    after = weights(strategy)
    changes = [(after[n] - before[n]).flatten() for n, _ in strategy.model.named_parameters()]
    assert torch.cat(changes).norm().item() == pytest.approx(0.5 * 0.01, rel=1e-4)
    assert single().update(0).gradient_norm is None, "not measured where it is not clipped"


def test_a_gradient_that_cannot_be_clipped_changes_nothing() -> None:
    strategy = single(clip_norm=1.0)
    strategy.forward_backward([BATCHES[0]], measure=False, vote=Votes)
    next(strategy.model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    before = weights(strategy)
    with pytest.raises(TrainingError, match=r"the norm of the gradient is (inf|nan) at step 8"):
        strategy.update(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(strategy).items())


def test_the_vote_is_asked_once_and_handed_on() -> None:
    asked = []

    def vote() -> Votes:
        asked.append(1)
        return Votes(interrupt=1)

    loss = single().forward_backward(BATCHES[:2], measure=True, vote=vote)
    assert asked == [1]
    assert loss.votes == Votes(interrupt=1)
    assert (loss.count, loss.num_samples) == (16, 16)
    assert loss.accuracy is not None


@pytest.mark.parametrize("optimizer", [Use("sgd", lr=0.5, momentum=0.9), Use("adam", lr=0.01), Use("adagrad", lr=0.1)])
def test_it_goes_on_exactly_from_its_state(optimizer: Use) -> None:
    whole = single(optimizer)
    take(whole, range(5))
    first = single(optimizer)
    take(first, range(3))
    state = first.state_dict()
    # As read from a file: the other strategy must not share memory with the first.
    copied = type(state)({name: tensor.clone() for name, tensor in state.tensors.items()}, state.values)
    second = single(optimizer)
    second.load_state_dict(copied)
    take(second, range(3, 5))
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(second).items())


def test_a_state_of_another_optimizer_is_refused() -> None:
    state = single(Use("adam", lr=0.1)).state_dict()
    with pytest.raises(CheckpointError, match="the optimizer state is of Adam, the job uses SGD"):
        single().load_state_dict(state)


def test_which_strategy_a_job_gets() -> None:
    assert choose_strategy(small_job()) == "single"
    assert choose_strategy(small_job(strategy="single")) == "single"
    assert "single" in STRATEGIES
    with pytest.raises(JobError, match=r"'singel' is not known; did you mean 'single'\?"):
        choose_strategy(small_job(strategy="singel"))


def test_it_has_one_worker() -> None:
    with pytest.raises(JobError, match="'single' has one worker, the job has 3"):
        make_strategy(small_job(strategy={"name": "single", "workers": 3}), None)  # type: ignore[arg-type]


def test_it_has_no_settings() -> None:
    with pytest.raises(JobError, match="has no key 'momentum'"):
        make_strategy(small_job(strategy={"name": "single", "momentum": 3}), None)  # type: ignore[arg-type]


def test_a_setting_of_another_strategy_names_its_owner() -> None:
    with pytest.raises(JobError, match=r"strategy.reducer is a setting of 'data_parallel', .* is 'single'"):
        make_strategy(small_job(strategy={"name": "single", "reducer": "ddp"}), None)  # type: ignore[arg-type]


def only_the_last(named_parameters: list[tuple[str, Tensor]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in named_parameters if name.startswith("3.")], lr=lr)


def test_gradients_that_the_optimizer_leaves_out_do_not_pile_up_in_the_norm() -> None:
    strategy = single(Use(only_the_last, lr=0.5), clip_norm=0.1)
    for step, batch in enumerate(BATCHES):
        strategy.forward_backward([batch], measure=False, vote=Votes)
        alone = copy.deepcopy(strategy.model)
        alone.zero_grad()
        nn.functional.cross_entropy(alone(batch.inputs), batch.targets).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in alone.parameters()])
        assert strategy.update(step).gradient_norm == pytest.approx(norm.item(), rel=1e-5)
