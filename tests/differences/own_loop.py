"""A training loop of a user's own, as drawn: `python own_loop.py CHOICES.json RESULT.safetensors`.

The same script runs alone and on many workers; the first worker writes weights, optimizer state and what was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cordee
from differences import parts

NUM_CLASSES, IGNORED = 4, 3


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size - 1, -1, -1))

    def __len__(self) -> int:
        return self._size


class Generated:
    """Batches that no DataLoader makes."""

    def __init__(self, data: TensorDataset, batch_size: int) -> None:
        self._data, self._batch_size = data, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self._data), self._batch_size):
            yield self._data[start : start + self._batch_size]


def make_loader(kind: str, size: int, batch_size: int, seed: int) -> Any:
    data = TensorDataset(*parts._classes(size, (6,), NUM_CLASSES, seed))
    match kind:
        case "shuffled":
            return DataLoader(data, batch_size, shuffle=True)
        case "dropped":
            return DataLoader(data, batch_size, shuffle=True, drop_last=True)
        case "backwards":
            return DataLoader(data, batch_size, sampler=Backwards(size))
        case "in order":
            return DataLoader(data, batch_size)
        case "generated":
            return Generated(data, batch_size)
    raise ValueError(kind)


def loss_of(kind: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return a loss and what `team.backward` has to know of it."""
    match kind:
        case "mean":
            return F.cross_entropy(outputs, targets), {}
        case "sum":
            return F.cross_entropy(outputs, targets, reduction="sum") / 8, {"reduction": "sum"}
        case "ignored":
            count = int((targets != IGNORED).sum())
            return F.cross_entropy(outputs, targets, ignore_index=IGNORED), {"count": count}
        case "weighted":
            weight = torch.arange(1.0, NUM_CLASSES + 1, dtype=outputs.dtype)
            return F.cross_entropy(outputs, targets, weight=weight), {"count": float(weight[targets].sum())}
    raise ValueError(kind)


def main() -> None:
    choices = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(choices["seed"])
    models = [
        parts.build(input_shape=(6,), num_classes=NUM_CLASSES, blocks=choices["blocks"])
        for _ in range(choices["num_models"])
    ]
    optimizers = [getattr(torch.optim, choices["optimizer"])(model.parameters(), lr=0.05) for model in models]
    train = make_loader(choices["loader"], choices["size"], choices["batch_size"], 1)
    test = make_loader("in order", choices["test_size"], 4, 2)
    measured: list[float] = []
    with cordee.join() as team:
        if choices["prepares_apart"]:
            for index, (model, optimizer) in enumerate(zip(models, optimizers)):
                models[index], optimizers[index] = team.prepare(model, optimizer)
            train = team.prepare(train)
            test = team.prepare(test)
        else:
            train, *rest, test = team.prepare(train, *models, *optimizers, test)
            models, optimizers = rest[: len(models)], rest[len(models) :]
        torch.manual_seed(choices["seed"])
        for _ in range(choices["epochs"]):
            for number, (inputs, targets) in enumerate(train):
                for model, optimizer in zip(models, optimizers):
                    step(team, choices, model, optimizer, inputs, targets)
                if number % 2 == 0 and choices["evaluates"]:
                    measured += evaluate(team, models[0], test)
        measured += evaluate(team, models[0], test)
        if team.is_first:
            save(models, optimizers, measured)


def step(
    team: Any, choices: Any, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    loss, known = loss_of(choices["loss"], model(inputs), targets)
    if choices["accumulates"]:  # the same batch twice, with half the weight
        team.backward(loss / 2, exchange=False, **known)
        loss, known = loss_of(choices["loss"], model(inputs), targets)
        loss = loss / 2
    team.backward(loss, **known)
    if choices["clips"]:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(team: Any, model: nn.Module, test: Any) -> list[float]:
    """Return how many test samples there were, the sum of their losses, and how many were right."""
    model.eval()
    losses, num_right = [], []
    for inputs, targets in test:
        outputs = model(inputs)
        losses.append(team.gather(F.cross_entropy(outputs, targets, reduction="none")))
        num_right.append(team.gather((outputs.argmax(1) == targets).double()))
    model.train()
    return [float(len(torch.cat(losses))), float(torch.cat(losses).sum()), float(torch.cat(num_right).sum())]


def save(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], measured: list[float]) -> None:
    tensors = {"measured": torch.tensor(measured, dtype=torch.float64)}
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        tensors |= {f"{number}.{name}": value.clone() for name, value in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors |= {f"{number}.optimizer.{index}.{key}": value.clone() for key, value in found.items()}
    save_file(tensors, sys.argv[2])


if __name__ == "__main__":
    main()
