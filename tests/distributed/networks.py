"""Models that are hard on data parallelism, named by the jobs of the tests as "networks:name"."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

from cordee.models import resnet


class InDouble(nn.Module):
    """A model that computes in double precision, where rounding is too small to be amplified into anything."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs.double())


def double_resnet(*, input_shape: tuple[int, ...], num_classes: int, depth: int = 20) -> nn.Module:
    return InDouble(resnet(input_shape=input_shape, num_classes=num_classes, depth=depth))


class Branching(nn.Module):
    """`only_first` is used by the first worker alone, `unused` by none, `frozen` is not to be trained."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        (width,) = input_shape
        self.common = nn.Linear(width, num_classes)
        self.only_first = nn.Linear(width, num_classes)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.common(inputs + 0.1 * self.frozen(inputs))
        if self.training and dist.is_initialized() and dist.get_rank() == 0:
            outputs = outputs + self.only_first(inputs)
        return outputs


class Repeated(nn.Module):
    """A layer that is used twice, each time under checkpointing."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int, reentrant: bool) -> None:
        super().__init__()
        (width,) = input_shape
        self.first = nn.Linear(width, 16)
        self.shared = nn.Linear(16, 16)
        self.last = nn.Linear(16, num_classes)
        self._reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            # Re-entrant checkpointing warns where it has nothing to do, as in an evaluation.
            is_checkpointed = hidden.requires_grad
            hidden = (
                checkpoint(self.shared, hidden, use_reentrant=self._reentrant)
                if is_checkpointed
                else self.shared(hidden)
            )
            hidden = hidden.tanh()
        return self.last(hidden)


class Mixed(nn.Module):
    """Parameters of three dtypes, and one that is shared between two layers."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        (width,) = input_shape
        self.coarse = nn.Linear(width, width, dtype=torch.bfloat16)
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.last = nn.Linear(width, num_classes, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.coarse(inputs.bfloat16()).float()
        return self.last(self.second(torch.relu(self.first(hidden + inputs))).double()).float()


class Normed(nn.Module):
    """Batch norms, a reshape that no empty batch survives, a counter and a constant that is not finite."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels = input_shape[0]
        self.conv = nn.Conv2d(channels, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.LazyLinear(num_classes)
        self.register_buffer("mask", torch.tensor([0.1, float("-inf")]))
        self.register_buffer("num_calls", torch.tensor(0))
        with torch.no_grad():
            self.eval()
            self(torch.zeros(1, *input_shape))
            self.train()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        hidden = torch.relu(self.norm(self.conv(inputs)))
        return self.last(hidden.view(len(inputs), -1))


class Sparse(nn.Module):
    """Sparse gradients."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_classes, 8, sparse=True)
        self.last = nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.tokens(inputs))


class Skipping(nn.Module):
    """A forward of its own, with skips, dropout and an output layer that shares the first one's weight."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        (width,) = input_shape
        self.first = nn.Linear(width, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(width, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[1] < 2:  # torch.export follows this, torch.fx does not
            raise ValueError("too narrow")
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = self.dropout(hidden + layer(hidden))
        return self.last(hidden @ self.first.weight)


class TwoBranches(nn.Module):
    """An embedding and perceptrons with skips, to be sliced by a plan of the user's."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)}) for _ in "ab"])
        self.head = nn.Linear(16, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            hidden = hidden + block["fc2"](torch.tanh(block["fc1"](hidden)))
        return self.head(hidden)


class Dropped(nn.Module):
    """Dropout that keeps the masks it drew while training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(inputs))
        if self.training:
            self.masks.append(mask.detach())
        return inputs * mask


def with_dropout(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Dropout on slices, between layers of the styles column and row, and on whole activations before and after."""
    (width,) = input_shape
    return nn.Sequential(
        Dropped(), nn.Linear(width, 16), Dropped(), nn.Linear(16, 16), Dropped(), nn.Linear(16, num_classes)
    )


def partly_frozen(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The first layer is not trained, so that nothing is to be sent back to it."""
    (width,) = input_shape
    model = nn.Sequential(
        nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, num_classes, dtype=torch.float32)
    )
    model[0].requires_grad_(False)
    return model


def flat_with_norm(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A batch norm over samples alone, which needs two of them."""
    (width,) = input_shape
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_classes))


class Spare(nn.Module):
    """A layer that no pass uses."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(*input_shape, num_classes), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


def rows_of_rows(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A linear layer on three dimensions, whose output is a view."""
    (width,) = input_shape
    return nn.Sequential(
        nn.Linear(width, 16), nn.Unflatten(1, (4, 4)), nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, num_classes)
    )


def grouped_sgd(parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """Biases have another rate than matrices: the second group of a whole model, the first of a small part."""
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in parameters]
    groups = [
        {"params": [one for one in tensors if one.ndim > 1], "lr": lr},
        {"params": [one for one in tensors if one.ndim <= 1], "lr": 2 * lr},
    ]
    return torch.optim.SGD(groups if len(tensors) > 2 else groups[::-1], lr=lr)


class Stream(IterableDataset[tuple[Tensor, int]]):
    """37 samples one after the other, without a length."""

    num_classes = 5

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        generator = torch.Generator().manual_seed(3)
        for index in range(37):
            yield torch.randn(20, generator=generator) + index % 5, index % 5


class Recomputed(nn.Module):
    """One layer is used three times, twice of them under re-entrant checkpointing; another one never."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        width = input_shape[0]
        self.first, self.shared, self.idle = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            is_kept = not torch.is_grad_enabled()
            hidden = (self.shared(hidden) if is_kept else checkpoint(self.shared, hidden, use_reentrant=True)).tanh()
        outputs: Tensor = self.last(self.shared(hidden))
        return outputs


class Following(nn.Module):
    """Follows the mean of what passes, which it subtracts; puts a new tensor in the place of its buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.layer(hidden) - self.mean


class Decaying(Following):
    """The same in place."""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.layer(hidden) - self.mean


class WithMeans(nn.Module):
    """A model of the user's own with such modules inside."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        (width,) = input_shape
        self.first, self.one, self.two = nn.Linear(width, 16), Following(16), Decaying(16)
        self.last = nn.Linear(16, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.two(torch.relu(self.one(torch.relu(self.first(inputs)))))))


class SlowSecond(nn.Linear):
    """A linear model that takes the second worker 3 ms more for each sample."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape[0], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.003 * len(inputs))
        return super().forward(inputs)


class TiedLate(nn.Module):
    """Two layers with one weight, whose second name comes first in the alphabet."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        (width,) = input_shape
        self.late, self.early = nn.Linear(width, width), nn.Linear(width, width)
        self.early.weight = self.late.weight
        self.output = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(torch.relu(self.early(torch.relu(self.late(inputs)))))


class Odd(nn.Module):
    """Tied and frozen weights, buffers, and weights that a constructor computes from others."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        (width,) = input_shape
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        nn.init.orthogonal_(self.fixed.weight)
        self.derived = nn.Parameter(self.one.weight.detach().T @ self.fixed.weight)
        self.register_buffer("scale", self.derived.detach().abs().amax(0))
        self.norm = nn.BatchNorm1d(width, momentum=0.0)
        self.factor = float(self.derived.detach().sum().sigmoid())
        self.output = nn.Linear(width, num_classes)
        self.apply(self._draw_again)

    def _draw_again(self, module: nn.Module) -> None:
        if module is self.one:
            nn.init.trunc_normal_(self.one.weight, std=self.factor)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.two(torch.relu(self.one(inputs))))
        hidden = self.norm(self.fixed(hidden) @ self.derived / (1.0 + self.scale))
        return self.output(hidden * self.factor)
