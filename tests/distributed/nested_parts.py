"""Nested data and models of several inputs and outputs, for jobs that name them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, IGNORED = 11, -100


class Sentences(Dataset[dict[str, Any]]):
    """Sequences of 2 to 9 tokens, which are to be continued."""

    def __init__(self, size: int = 41, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (size,), generator=generator).tolist()
        self._rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index].tolist()}


def sentences() -> Any:
    return Sentences(), Sentences(17, seed=1)


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest: what is padded is masked, and its labels are ignored."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    made = {
        "input_ids": torch.zeros(len(samples), longest, dtype=torch.int64),
        "attention_mask": torch.zeros(len(samples), longest, dtype=torch.bool),
        "labels": torch.full((len(samples), longest), IGNORED),
    }
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        made["input_ids"][row, :length] = torch.tensor(sample["input_ids"])
        made["attention_mask"][row, :length] = True
        made["labels"][row, :length] = made["input_ids"][row, :length]
    return made


class Continues(nn.Module):
    """Predicts the next token from the mean of those so far, and computes its loss itself, as others do."""

    def __init__(self, returns: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        self.returns = returns
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        mask = attention_mask.unsqueeze(-1).float()
        summed = (self.embed(input_ids) * mask).cumsum(1)
        logits = self.out(self.dropout(torch.tanh(summed / mask.cumsum(1).clamp(min=1.0))))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        if self.returns == "dict":
            return {"loss": loss, "logits": logits}
        return (loss, logits) if self.returns == "tuple" else SimpleNamespace(loss=loss, logits=logits)


def pairs(size: int = 37, seed: int = 0) -> list[tuple[Tensor, Tensor, int]]:
    """Samples of two inputs and a class."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)
    labels = ((left.sum(1) + right.sum(1)) > 0).long() + (right[:, 0] > 0.5).long()
    return [(left[i], right[i], int(labels[i])) for i in range(size)]


class Pairs(Dataset[Any]):
    num_classes = 3

    def __init__(self, size: int = 37, seed: int = 0, kind: str = "tuple") -> None:
        self._samples, self._kind = pairs(size, seed), kind

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        left, right, label = self._samples[index]
        if self._kind == "dict":
            return {"left": left, "right": right, "label": label}
        if self._kind == "dataclass":
            return Sides(left, right, label)
        return {"nested": ({"left": left, "right": [right]}, label)}.get(self._kind, (left, right, label))


@dataclass
class Sides:
    left: Tensor
    right: Tensor
    target: int


def two_inputs(kind: str = "tuple") -> Any:
    return Pairs(kind=kind), Pairs(19, seed=1, kind=kind)


class TwoInputs(nn.Module):
    """Takes two tensors, and returns predictions among other things."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, num_classes)

    def forward(self, left: Tensor, right: Any) -> dict[str, Tensor]:
        right = right[0] if isinstance(right, list) else right
        hidden = self.norm(torch.tanh(self.left(left) + self.right(right)))
        return {"hidden": hidden, "logits": self.out(hidden)}


def weighed(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """A loss that is given all outputs, and counts labels of class 0 twice."""
    losses = F.cross_entropy(outputs["logits"], targets, reduction="none") + 0.1 * outputs["hidden"].square().mean(1)
    weights = 1.0 + (targets == 0).float()
    return (losses * weights).sum() / weights.sum()


def _count(targets: Tensor) -> float:
    return float((1.0 + (targets == 0).float()).sum())


weighed.count = _count  # type: ignore[attr-defined]


def count_next(targets: Tensor) -> int:
    """The same as loss.count = "next_labels"."""
    return int((targets[:, 1:] != IGNORED).sum())
