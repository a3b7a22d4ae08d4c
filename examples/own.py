"""Your own model, Dataset and loss, and a job that uses them as live objects.

python examples/own.py
cordee train examples/own.toml      the same job, with these classes by name
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import cordee


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on three spiral arms; the class is the arm."""

    num_classes = 3  # Cordée passes it on to the model

    def __init__(self, size: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(0)
        self._radius = torch.rand(size, generator=generator)
        self._wobble = noise * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self._radius)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        arm = index % self.num_classes
        radius = float(self._radius[index])
        angle = 2 * math.pi * (radius + arm / self.num_classes)
        point = 2 * radius * torch.tensor([math.cos(angle), math.sin(angle)])
        return point + self._wobble[index], arm


class Net(nn.Module):
    """Two hidden layers. `input_shape` and `num_classes` are given by Cordée because they are asked for."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(math.prod(input_shape), hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x))
        return self.last(x + torch.sin(self.second(x)))


def focal_loss(outputs: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy that cares less about what is right already (Lin et al. 2017); the mean over the batch."""
    loss = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-loss)) ** gamma * loss).mean()


job = cordee.Job(
    name="own",
    model=cordee.Use(Net, hidden=48),
    data=cordee.Data(Spirals, args={"size": 3000, "noise": 0.1}, test_fraction=0.2),
    loss=cordee.Use(focal_loss, gamma=1.0),
    optimizer=cordee.Use("adamw", lr=0.01),
    schedule=cordee.Use("cosine", warmup_steps=20),
    training=cordee.Training(batch_size=64, epochs=12, threads=1),
)

if __name__ == "__main__":
    run = cordee.train(job, overrides=sys.argv[1:])
    print(f"the run can be repeated from its files: cordee train {run.directory}/job.toml")
