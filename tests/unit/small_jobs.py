"""Jobs that train in a few milliseconds, and models that misbehave on purpose."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from cordee.core import Job
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.run import Run

NUM_FEATURES, NUM_CLASSES, BATCHES_PER_EPOCH = 6, 3, 5


def small_job(**sections: Any) -> Job:
    """Return a job of 5 steps an epoch, the last one uneven: 38 samples in batches of 8, 20 to test on."""
    table: dict[str, Any] = {
        "name": "small",
        "model": {"use": "mlp", "hidden": [8], "dropout": 0.2},
        "data": {
            "use": "synthetic",
            "shape": [NUM_FEATURES],
            "num_classes": NUM_CLASSES,
            "size": 38,
            "test_size": 20,
        },
        "optimizer": {"use": "adam", "lr": 0.01},
    }
    training = {"batch_size": 8, "epochs": 2, "threads": 1, "device": "cpu"}
    given = sections.pop("training", {})
    if "steps" in given:
        del training["epochs"]
    return Job.from_dict({**table, **sections, "training": {**training, **given}})


def run(job: Job, path: Path, **options: Any) -> Run:
    return train(job, run_dir=path, quiet=True, **options)


def events_of(result: Run | Path, kind: str) -> list[dict[str, Any]]:
    folder = result if isinstance(result, Path) else result.directory
    return [event for event in read_events(folder / "events.jsonl") if event["type"] == kind]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def copy_as_killed_after(finished: Path, step: int, copy: Path) -> Path:
    """Copy a run as kill -9 right after the checkpoint of `step` would have left it."""
    shutil.copytree(finished, copy)
    (copy / "summary.json").unlink(missing_ok=True)
    for later in (copy / "checkpoints").iterdir():
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)
    return copy


class Net(nn.Module):
    """Calls `at_step` with the number of each training step, before computing it."""

    at_step: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            type(self).at_step(self.steps)
        outputs: Tensor = self.linear(inputs)
        return outputs


def failing_at(step: int) -> type[Net]:
    class FailingNet(Net):
        @staticmethod
        def at_step(now: int) -> None:
            if now == step:
                raise ZeroDivisionError("the user's own mistake")

    return FailingNet


def interrupted_at(*steps: int, number: signal.Signals = signal.SIGINT) -> type[Net]:
    class InterruptedNet(Net):
        @staticmethod
        def at_step(now: int) -> None:
            if now in steps:
                os.kill(os.getpid(), number)

    return InterruptedNet


class NanNet(Net):
    """Gives outputs that are not numbers in training step 7."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs * float("nan") if self.steps == 7 and self.training else outputs


class NanGradientNet(Net):
    """A finite loss with a gradient that is not: the root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + (self.root * 0).sqrt()


class MaskedNet(Net):
    """Has minus infinities in a buffer, as attention masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))


def samples(num_samples: int = 38) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.arange(num_samples) % NUM_CLASSES
    inputs = torch.randn((num_samples, NUM_FEATURES), generator=generator)
    inputs[:, :NUM_CLASSES] += 2 * nn.functional.one_hot(targets, NUM_CLASSES)
    return inputs, targets


class MapData(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = samples()
        return inputs[index] + 0.1 * torch.randn(NUM_FEATURES), int(targets[index])


class StreamData(IterableDataset[tuple[Tensor, Tensor]]):
    num_classes = NUM_CLASSES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(zip(*samples(), strict=True)))


class OneShotData(StreamData):
    """Can be read only once, as a wrapped generator. (The first sample is read when the data is loaded.)"""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.times += 1
        return super().__iter__() if self.times <= 2 else iter(())


def regression_data() -> tuple[Tensor, Tensor]:
    inputs, _ = samples(64)
    return inputs, inputs @ torch.linspace(-1, 1, NUM_FEATURES) + 3
