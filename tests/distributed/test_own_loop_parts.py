"""Own loops with several models, optimizers and loaders, and with losses that are not plain means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from process_pool import CaseError, ProcessPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from cordee.cluster import Team
from cordee.core.errors import JobError
from cordee.loop import LoopTeam

pytestmark = pytest.mark.timeout(200)
Weights = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads of tiny computations wait for each other, for seconds on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_team(index: int, size: int) -> LoopTeam:
    torch.manual_seed(3 if index == 0 else 50 + index)  # the first worker's weights and order are taken
    return LoopTeam(Team(index, size, num_local_workers=size, local_rank=index))


def loader(num_samples: int = 21, batch_size: int = 10, seed: int = 1, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size, **settings)


def net(outputs: int = 2, inputs: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)


def values(*models: nn.Module) -> Weights:
    return {
        f"{number} {name}": value.detach().numpy().copy()
        for number, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def assert_as_alone(pool: ProcessPool, function: Callable[..., Weights], *arguments: Any) -> None:
    """1e-6: sums in another order, over a few steps of tiny models. The workers have the very same."""
    alone = function(0, 1, *arguments)
    first, *others = pool.run(function, *arguments)
    for name, value in alone.items():
        np.testing.assert_allclose(first[name], value, rtol=0, atol=1e-6, err_msg=name)
        for other in others:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)


# Several models -----------------------------------------------------------------------------------------------


def train_gan(index: int, size: int, calls: str, is_detached: bool, parts: int = 1) -> Weights:
    team = make_team(index, size)
    generator, critic, batches = net(6, 4), net(1), loader(shuffle=True)
    optimizers = [sgd(generator), torch.optim.Adam(critic.parameters(), lr=0.01)]
    match calls:
        case "one call":
            batches, critic, generator, *optimizers = team.prepare(batches, critic, generator, *optimizers)
        case "two calls":
            generator, optimizers[0], batches = team.prepare(generator, optimizers[0], batches)
            critic, optimizers[1] = team.prepare(critic, optimizers[1])
        case "optimizers first":
            team.prepare(*optimizers)
            assert team.prepare(generator) is generator and team.prepare(critic) is critic
            assert team.prepare(generator, critic) == (generator, critic), "twice is once"
            batches = team.prepare(batches)
            assert team.prepare(batches) is batches
    for _ in range(2):
        for real, _ in batches:
            made = generator(torch.cos(real[:, :4]))
            seen = made.detach() if is_detached else made
            for number, (x, y) in enumerate(zip(real.tensor_split(parts), seen.tensor_split(parts), strict=True)):
                loss = F.softplus(-critic(x)).sum() / len(real) + F.softplus(critic(y)).sum() / len(real)
                team.backward(loss, exchange=number == parts - 1)
            optimizers[1].step()
            # Only the critic's: what its loss has left in the generator is added to the generator's own.
            optimizers[1].zero_grad()
            made = generator(torch.cos(real[:, :4]))
            team.backward(F.softplus(-critic(made)).mean())
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=len(real) % 2 == 0)
    return values(generator, critic)


@pytest.mark.parametrize("calls", ["one call", "two calls", "optimizers first"])
@pytest.mark.parametrize("is_detached", [True, False])
def test_two_models_with_an_optimizer_each(two: ProcessPool, calls: str, is_detached: bool) -> None:
    assert_as_alone(two, train_gan, calls, is_detached)


def test_two_models_on_three_workers_in_parts(three: ProcessPool) -> None:
    assert_as_alone(three, train_gan, "one call", True, 2)
    assert_as_alone(three, train_gan, "two calls", False)


def train_together(index: int, size: int) -> Weights:
    """One optimizer for two models that share a layer; a part that is used on some workers only; a frozen one."""
    team = make_team(index, size)
    encoder, head, rare, teacher = net(4), net(2, 4), nn.Linear(4, 2), net(2).requires_grad_(False)
    tied = nn.Sequential(encoder[0], nn.Linear(8, 2))
    optimizer = sgd(encoder, head, rare, teacher, nn.ModuleList([tied[1]]))
    batches, *_ = team.prepare(loader(), optimizer, encoder, head, tied, rare, teacher)
    for epoch in range(3):
        if epoch == 2:
            teacher.requires_grad_(True)  # from here on it is trained too
        for x, y in batches:
            code = encoder(x)
            logits = head(code) + tied(x) + teacher(x)
            if bool((x[:, 0] > 1).any()):
                logits = logits + (x[:, :1] > 1) * rare(code)
            team.backward(F.cross_entropy(logits, y))
            optimizer.step()
            optimizer.zero_grad()
    return values(encoder, head, tied, rare, teacher)


def test_models_that_share_layers_and_one_optimizer(two: ProcessPool, three: ProcessPool) -> None:
    assert_as_alone(two, train_together)
    assert_as_alone(three, train_together)


def accumulate(index: int, size: int, how: str) -> Weights:
    """Gradients that add up in odd ways over two losses of two models."""
    team = make_team(index, size)
    one, other = net(2), net(2)
    optimizer = sgd(one, other)
    batches = team.prepare(one, other, optimizer, loader())[-1]
    for number, (x, y) in enumerate(batches):
        team.backward(F.cross_entropy(one(x), y), exchange=how != "both at once")
        if how == "scaled":
            for parameter in one.parameters():
                parameter.grad = parameter.grad * 0.5  # another tensor, the same on all workers
        if how == "regularised":
            sum(p.square().sum() for p in one.parameters()).backward()  # does not depend on the data
        if how == "dropped" and number == 1:
            team.backward(F.cross_entropy(other(x) + one(x), y), exchange=False)
            optimizer.zero_grad()
        team.backward(F.cross_entropy(other(x) + one(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "zeros")
    return values(one, other)


@pytest.mark.parametrize("how", ["plain", "both at once", "scaled", "regularised", "dropped", "zeros"])
def test_gradients_add_up_as_alone(three: ProcessPool, how: str) -> None:
    assert_as_alone(three, accumulate, how)


# Several loaders ----------------------------------------------------------------------------------------------


def evaluate_in_between(index: int, size: int, when: str) -> Weights:
    team = make_team(index, size)
    model, test = net(), loader(13, 5, seed=2)
    optimizer = sgd(model)
    model, optimizer, batches = team.prepare(model, optimizer, loader(shuffle=True))
    test = team.prepare(test)
    num_right = 0.0
    for _ in range(2):
        for number, (x, y) in enumerate(batches):
            if when == "inside":
                model.eval()
                for number_inside, (tx, ty) in enumerate(test):
                    rows = team.gather((model(tx).argmax(1) == ty).float())
                    num_right += rows.sum().item()
                    if number_inside == number:
                        break
                model.train()
            team.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if when == "after":
            num_right += sum(team.gather((model(tx).argmax(1) == ty).float()).sum().item() for tx, ty in test)
    return {**values(model), "right": np.array(num_right)}


@pytest.mark.parametrize("when", ["never", "after", "inside"])
def test_an_evaluation_loader_changes_nothing(two: ProcessPool, three: ProcessPool, when: str) -> None:
    assert_as_alone(two, evaluate_in_between, when)
    assert_as_alone(three, evaluate_in_between, when)


def train_on_two(index: int, size: int, is_named: bool) -> Weights:
    team = make_team(index, size)
    model = net()
    model, optimizer, first, second = team.prepare(model, sgd(model), loader(21, 10), loader(22, 10, seed=2))
    for (x, y), (u, v) in zip(first, second, strict=True):
        for inputs, targets, batches in ((x, y, first), (u, v, second)):
            loss = F.cross_entropy(model(inputs), targets)
            team.backward(loss, **({"batches": batches} if is_named else {}))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_two_loaders_in_one_step(two: ProcessPool) -> None:
    assert_as_alone(two, train_on_two, True)
    with pytest.raises(CaseError, match=r"batches are of 1 and 2 samples: write team.backward\(loss, batches=loader\)"):
        two.run(train_on_two, False)


def use_wrongly(index: int, size: int, how: str) -> None:
    team = make_team(index, size)
    model, own = net(), loader()
    model, optimizer, batches = team.prepare(model, sgd(model), own)
    stray = net(6, 6)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    match how:
        case "loader not prepared":
            for x, y in loader():
                team.backward(loss_of(x, y))
        case "after the loop":
            *_, (x, y) = batches
            team.backward(loss_of(x, y))
        case "unknown loader named":
            for x, y in batches:
                team.backward(loss_of(x, y), batches=loader())
        case "model not prepared":
            for x, y in batches:
                team.backward(loss_of(stray(x), y))
        case "parameters not prepared":
            team.prepare(sgd(model, stray))
            for x, y in batches:
                team.backward(loss_of(x, y))
        case "plain backward":
            for x, y in batches:
                loss_of(x, y).backward()
                team.backward(loss_of(x, y))
        case "other models":
            team.prepare(net(2 + index))
        case "other order":
            for x, y in team.prepare(loader(sampler=Unseeded(own.dataset))):
                team.backward(loss_of(x, y))
        case "other rates":
            for x, y in batches:
                team.backward(loss_of(x, y))
                optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * index
                optimizer.step()
        case "other weights":
            with torch.no_grad():
                model[2].bias += index
            team.compare()


class Unseeded(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.data_source)).tolist())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loader not prepared", "There is no open loop over prepared batches: prepare the loader"),
        ("after the loop", "There is no open loop over prepared batches: prepare the loader"),
        ("unknown loader named", "this loader has not been prepared"),
        ("model not prepared", r"depends on a parameter of shape \(6, 8\) that is not of a prepared model"),
        ("parameters not prepared", r"SGD has a parameter of shape \(8, 6\) that is not of a prepared model"),
        ("plain backward", "use team.backward for every loss that depends on the data"),
        ("other models", "worker 1 has other models than worker 0"),
        ("other order", "has been given other batches than the others"),
        ("other rates", r"lr of group 0 of optimizer 0 \(SGD\)|of worker 1 differ"),
        ("other weights", r"2.bias of model 0 \(Sequential\) of worker 1 differs from that of worker 0"),
    ],
)
def test_mistakes_are_named(two: ProcessPool, how: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        two.run(use_wrongly, how)


# Losses that are not plain means ------------------------------------------------------------------------------


def train_weighted(index: int, size: int, kind: str, num_parts: int = 1) -> Weights:
    """Tokens of which some are ignored, on the last worker all of a batch; classes with weights; sums."""
    team = make_team(index, size)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(21, 5, 6, generator=generator), torch.randint(3, (21, 5), generator=generator)
    targets[torch.rand(21, 5, generator=generator) < 0.4] = -100
    targets[8:10] = -100
    model, weight = net(3), torch.tensor([0.1, 1.0, 5.0])
    model, optimizer, batches = team.prepare(model, sgd(model), DataLoader(TensorDataset(inputs, targets), 10))
    for x, y in batches:
        parts = list(zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True))
        for number, (u, v) in enumerate(parts):
            settings: dict[str, Any] = {"exchange": number == len(parts) - 1}
            logits, labels = model(u).flatten(0, 1), v.flatten()
            is_counted = labels != -100
            match kind:
                case "ignored":
                    loss, settings["count"] = F.cross_entropy(logits, labels), is_counted.sum()
                case "class weights":
                    loss = F.cross_entropy(logits, labels, weight)
                    settings["count"] = weight[labels[is_counted]].sum()
                case "sum":
                    loss, settings["reduction"] = F.cross_entropy(logits, labels, reduction="sum") / 50, "sum"
            team.backward(loss, **settings)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("kind", ["ignored", "class weights", "sum"])
def test_means_over_something_else_than_samples(two: ProcessPool, three: ProcessPool, kind: str) -> None:
    assert_as_alone(two, train_weighted, kind)
    assert_as_alone(three, train_weighted, kind)


def train_in_given_parts(index: int, size: int) -> Weights:
    """Accumulates over batches, each with a count of its own."""
    team = make_team(index, size)
    model = net(3)
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(24) % 3
    targets[torch.tensor([0, 1, 2, 9, 13, 17, 18])] = -100
    model, optimizer, batches = team.prepare(model, sgd(model), DataLoader(TensorDataset(inputs, targets), 6))
    for number, (x, y) in enumerate(batches):
        team.backward(F.cross_entropy(model(x), y), count=(y != -100).sum(), exchange=number % 2 == 1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def test_accumulating_with_counts(two: ProcessPool, three: ProcessPool) -> None:
    """On three workers the first has a share of two ignored samples, and a loss that is not a number."""
    assert_as_alone(two, train_in_given_parts)
    assert_as_alone(three, train_in_given_parts)


def ignore_all(index: int, size: int) -> bool:
    team = make_team(index, size)
    model = net()
    model, batches = team.prepare(model, [(torch.ones(4, 6), torch.full((4,), -100))])
    for x, y in batches:
        team.backward(F.cross_entropy(model(x), y), count=0)
    return all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_that_counts_for_nothing_adds_nothing(two: ProcessPool) -> None:
    assert ignore_all(0, 1) and all(two.run(ignore_all))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_counts_that_are_none(count: float) -> None:
    with pytest.raises(JobError, match="must be a number of at least 0"):
        LoopTeam(Team()).backward(torch.ones((), requires_grad=True), count=count)


def test_what_cannot_be_prepared() -> None:
    team = LoopTeam(Team())
    for things, message in (((), "give it models"), ((3,), "a int is no model"), ((torch.ones(3),), "a Tensor is no")):
        with pytest.raises(JobError, match=message):
            team.prepare(*things)
    with pytest.raises(JobError, match=r"weight of model 0 .* has no shape yet"):
        team.prepare(nn.LazyLinear(3))
    with pytest.raises(JobError, match="must be 'mean', or 'sum' without a count"):
        team.backward(torch.ones(()), reduction="sum", count=3)
