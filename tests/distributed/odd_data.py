"""Data sets and losses whose batches do not weigh as much as they have samples, named by jobs as "odd_data:name"."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

NUM_CLASSES, WIDTH = 4, 12
IGNORED = 3


def mostly_ignored(*, num_samples: int = 60, num_test: int = 24) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Six of seven labels are of the class IGNORED: many batches, and more shares, have no other."""

    def split(size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.full((size,), IGNORED)
        labels[::7] = torch.arange(len(labels[::7])) % IGNORED
        return torch.randn((size, WIDTH), generator=generator), labels

    return split(num_samples, 3), split(num_test, 4)


def uneven(*, num_samples: int = 90, num_test: int = 40) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Four classes of unequal size; the test set ends with a batch of the class IGNORED only."""
    train, test = mostly_ignored(num_samples=num_samples, num_test=num_test)
    labels = torch.tensor([0, 1, 1, 2, IGNORED, IGNORED])
    train = train[0], labels[torch.arange(num_samples) % 6]
    test = test[0], labels[torch.arange(num_test) % 6]
    test[1][-10:] = IGNORED
    return train, test


CLASS_WEIGHTS = torch.tensor([4.0, 1.0, 0.3, 2.0])


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Does not say that it ignores a class: NaN for a batch of nothing else."""
    return F.cross_entropy(outputs, targets, ignore_index=IGNORED)


def own_loss_that_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = CLASS_WEIGHTS * (torch.arange(NUM_CLASSES) != IGNORED)
    losses = F.cross_entropy(outputs, targets, reduction="none") * weights[targets]
    return losses.sum() / weights[targets].sum()


own_loss_that_counts.count = lambda targets: (CLASS_WEIGHTS * (torch.arange(NUM_CLASSES) != IGNORED))[targets].sum()  # type: ignore[attr-defined]
own_loss_that_counts.ignore_index = IGNORED  # type: ignore[attr-defined]


class WeightedLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(weight=CLASS_WEIGHTS, ignore_index=IGNORED, label_smoothing=0.1)


class Unsound(Dataset[tuple[Tensor, int]]):
    """Sample 23 has an input that is not finite."""

    num_classes = NUM_CLASSES

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((WIDTH,), float("inf") if index == 23 else 0.1 * index), index % NUM_CLASSES


def by_name(named_parameters: list[tuple[str, nn.Parameter]], lr: float = 0.1) -> torch.optim.Optimizer:
    """Needs to be called with this very model: a bias for each weight, and names."""
    biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
    weights = [parameter for name, parameter in named_parameters if name.endswith("weight")]
    assert len(biases) == len(weights) > 0, [name for name, _ in named_parameters]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}], lr=lr)


class Recording(Dataset[tuple[Tensor, int]]):
    """Appends to a file which reading process a sample was read by; -1 is none."""

    def __init__(self, file: str, size: int = 60) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        reader = get_worker_info()
        with open(self._file, "a") as file:  # noqa: PTH123
            file.write(f"{-1 if reader is None else reader.id}\n")
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index % NUM_CLASSES


def recording(*, file: str) -> Recording:
    return Recording(file)


def median_margin(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that is no mean over samples: the median, over them, of how far the right class is ahead."""
    right = outputs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (right - outputs.scatter(-1, targets.unsqueeze(-1), -1e9).amax(-1)).median()
