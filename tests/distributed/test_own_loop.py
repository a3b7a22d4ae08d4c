"""One's own loop computes the same on any number of workers, whatever the script's batches are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from cordee.cluster import Team
from cordee.core.errors import DataError, JobError
from cordee.data.shared_batches import SharedBatches
from cordee.loop import LoopTeam

pytestmark = pytest.mark.timeout(200)
NUM_SAMPLES, BATCH_SIZE = 21, 10  # the last batch of an epoch has one sample: less than the team has members


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads of tiny computations wait for each other, for seconds on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def samples() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return inputs, (inputs.sum(1) > 0).long(), torch.arange(NUM_SAMPLES)


def make_batches(kind: str) -> Any:
    data = TensorDataset(*samples())
    match kind:
        case "shuffled":
            return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        case "in order, last dropped":
            return DataLoader(data, batch_size=BATCH_SIZE, drop_last=True)
        case "own sampler":
            sampler = RandomSampler(data, num_samples=13, generator=torch.Generator().manual_seed(5))
            return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
        case "iterable":
            return Generated()
        case "dicts":
            return DataLoader(data, batch_size=BATCH_SIZE, collate_fn=as_dict, sampler=range(NUM_SAMPLES))
    raise AssertionError(kind)


class Generated:
    """Batches without a length."""

    def __iter__(self) -> Any:
        inputs, targets, ids = samples()
        for at in range(0, NUM_SAMPLES, BATCH_SIZE):
            yield [part[at : at + BATCH_SIZE] for part in (inputs, targets, ids)]


def as_dict(rows: Any) -> dict[str, Any]:
    inputs, targets, ids = (torch.stack(column) for column in zip(*rows))
    names = [f"sample {int(number)}" for number in ids]
    return {
        "split": "train",
        "names": names,
        "inputs": (inputs, targets),
        "ids": ids.numpy(),
        "scale": torch.tensor(1.0),
    }


def unpack(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(batch, dict):
        return tuple(batch)
    assert batch["split"] == "train" and batch["scale"].ndim == 0
    assert batch["names"] == [f"sample {number}" for number in batch["ids"]], "cut like the tensors"
    return *batch["inputs"], torch.from_numpy(batch["ids"])


def train(index: int, size: int, kind: str, how: str = "plain") -> tuple[dict[str, Any], list[Any], list[float]]:
    """Return the weights, the ids gathered from each batch, and the loss of each epoch."""
    torch.manual_seed(3 if index == 0 else 99)  # the first worker's weights and order are taken
    team = LoopTeam(Team(index, size, num_local_workers=size, local_rank=index))
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = team.prepare(model, optimizer, make_batches(kind))
    seen, losses = [], []
    for _ in range(3):
        loss_sum = num_samples = 0.0
        for number, batch in enumerate(batches):
            inputs, targets, ids = unpack(batch)
            own_sum = step(team, model, inputs, targets, how)
            if not batches.is_standing_in:
                loss_sum, num_samples = loss_sum + own_sum, num_samples + len(targets)
            seen.append(team.gather(ids).tolist())
            if how != "sum over batches" or number % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=how != "zeros")
        optimizer.zero_grad()
        loss_sum, num_samples = team.sum(loss_sum, num_samples)
        losses.append(loss_sum / num_samples)
    assert team.gather(torch.full((2, 1), float(index))).flatten().tolist() == np.repeat(range(size), 2).tolist()
    assert team.gather(torch.tensor(float(index))).tolist() == list(range(size))
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}, seen, losses


def step(team: LoopTeam, model: nn.Module, inputs: Tensor, targets: Tensor, how: str) -> float:
    """Compute gradients; return the sum of the losses of this worker's samples."""
    if how != "in parts":
        loss = F.cross_entropy(model(inputs), targets)
        team.backward(loss)
        return loss.item() * len(targets)
    total = 0.0
    parts = list(zip(inputs.tensor_split(2), targets.tensor_split(2)))
    for number, (x, y) in enumerate(parts):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(targets)
        team.backward(loss, exchange=number == len(parts) - 1)
        total += loss.item() * len(targets)
    return total


KINDS = ["shuffled", "in order, last dropped", "own sampler", "iterable", "dicts"]
CASES = [(kind, "plain") for kind in KINDS] + [("shuffled", how) for how in ("in parts", "sum over batches", "zeros")]


@pytest.mark.parametrize(("kind", "how"), CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_on_any_number_of_workers(
    two: ProcessPool, three: ProcessPool, size: int, kind: str, how: str
) -> None:
    """1e-6: sums in another order, over 9 steps of a tiny model."""
    weights, seen, losses = train(0, 1, kind, how)
    outcomes = (two if size == 2 else three).run(train, kind, how)
    for own_weights, own_seen, own_losses in outcomes:
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(own_weights[name], value, rtol=0, atol=1e-6, err_msg=name)
        assert own_seen == seen, "gathered in order, each sample once"
    if kind != "own sampler":
        num_full = 20 if "dropped" in kind else NUM_SAMPLES
        for epoch in range(3):
            ids = [i for batch in seen[epoch * len(seen) // 3 : (epoch + 1) * len(seen) // 3] for i in batch]
            assert len(ids) == len(set(ids)) == num_full
    if kind == "shuffled":
        assert seen[:3] != seen[3:6], "another order in each epoch"


def count(index: int, size: int, how: str) -> list[float] | str:
    """Return the sum over a loop whose last batch has one sample, or what is said of it."""
    team = LoopTeam(Team(index, size, num_local_workers=size, local_rank=index))
    batches, others = team.prepare(torch.arange(9.0).split(4), torch.arange(8.0).split(4))
    total = 0.0
    for x in batches:
        if how == "asked":
            total += 0 if batches.is_standing_in else len(x)
        elif how == "gathered":
            total += len(team.gather(x)) / size
        else:
            total += len(x)
    if how == "another loop":
        total = float(sum(len(x) for x in others))
    try:
        return team.sum(total)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(("how", "total"), [("asked", 9.0), ("gathered", 9.0), ("another loop", 8.0), ("plain", None)])
def test_a_sample_that_was_computed_twice_is_not_summed_twice(two: ProcessPool, how: str, total: float | None) -> None:
    alone = count(0, 1, how)
    assert alone == [9.0 if total is None else total]
    for outcome in two.run(count, how):
        if total is None:
            assert "add to it only if not batches.is_standing_in" in str(outcome)
        else:
            assert outcome == [total]


# Mistakes ---------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    team = LoopTeam(Team())
    model, _ = team.prepare(nn.Linear(2, 2), optimizer)
    with pytest.raises(JobError, match=r"SGD has a parameter of shape \(2, 2\) that is not of a prepared model"):
        team.backward(model(torch.ones(1, 2)).sum())


def test_backward_without_prepare_is_refused_in_a_team() -> None:
    with pytest.raises(JobError, match=r"call team.prepare\(model, optimizer, batches\)"):
        LoopTeam(Team(0, 2)).backward(torch.tensor(1.0, requires_grad=True))


def test_batches_without_a_tensor_are_refused() -> None:
    with pytest.raises(DataError, match="a batch is a dict without a tensor"):
        list(SharedBatches([{"text": ["a", "b"]}], 0, 2, seed=0))


def test_length_is_that_of_the_scripts_batches() -> None:
    assert len(SharedBatches(make_batches("shuffled"), 0, 2, seed=0)) == 3
    with pytest.raises(TypeError, match="no length"):
        len(SharedBatches(Generated(), 0, 2, seed=0))
