"""What the training loop costs: LeNet, batch 32, one worker, one kernel thread.

The hand-written loop gathers whole batches from the same normalised tensors, and is measured with torch's
default optimizer as well as with the fused one that Cordée picks by itself. Accelerate and Lightning get the
same tensors through a DataLoader that gathers whole batches too (a per-sample DataLoader, the usual one,
would be several times slower). Setting up, evaluating and saving are left out for everybody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians
from cordee.core import Job
from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import load_data
from cordee.launch import train
from cordee.models import lenet

BATCH_SIZE = 32
NUM_STEPS = 600
LEARNING_RATE = 0.001


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    data, inputs, targets = _tensors()
    say(f"data: {data.use}; {NUM_STEPS} steps of {BATCH_SIZE} per contestant and round")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        contestants: dict[str, Callable[[], float]] = {
            "hand-written": lambda: _by_hand(inputs, targets, fused=None),
            "hand-written, fused": lambda: _by_hand(inputs, targets, fused=True),
            "cordee": lambda: _by_cordee(data, Path(folder)),
        }
        if importlib.util.find_spec("accelerate"):
            contestants["accelerate"] = lambda: _by_accelerate(inputs, targets)
        if importlib.util.find_spec("lightning"):
            contestants["lightning"] = lambda: _by_lightning(inputs, targets, Path(folder))
        missing = [name for name in ("accelerate", "lightning") if name not in contestants]
        if missing:
            say(f"not installed, so left out: {', '.join(missing)} (pip install 'cordee[bench]')")
        try:
            raw = interleave(contestants, rounds, say)
        finally:
            torch.set_num_threads(before)
    middle = medians(raw)
    rows = [
        {
            "contestant": name,
            "samples_per_second": middle[name],
            "us_per_step": BATCH_SIZE / middle[name] * 1e6,
            "cordee_is_times": median_ratio(raw["cordee"], raw[name]),
        }
        for name in raw
    ]
    settings = {"model": "lenet", "data": data.use, "batch_size": BATCH_SIZE, "steps": NUM_STEPS, "threads": 1}
    return Report("overhead", describe_machine(), {**settings, "rounds": rounds}, raw, "samples/s", rows)


def _tensors() -> tuple[Data, Tensor, Tensor]:
    data = Data("fashion-mnist")
    try:
        splits = load_data(data, seed=0)
    except DataError:
        data = Data("synthetic", args={"shape": [1, 28, 28], "num_classes": 10, "size": 60_000})
        splits = load_data(data, seed=0)
    assert splits.train.num_samples is not None
    inputs, targets = splits.train.gather(torch.arange(splits.train.num_samples))
    return data, inputs, targets


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return lenet(input_shape=(1, 28, 28), num_classes=10)


def _by_hand(inputs: Tensor, targets: Tensor, *, fused: bool | None) -> float:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=fused)
    order = torch.randperm(len(targets))
    started = time.perf_counter()
    for step in range(NUM_STEPS):
        chosen = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[chosen]), targets[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return NUM_STEPS * BATCH_SIZE / (time.perf_counter() - started)


def _by_cordee(data: Data, folder: Path) -> float:
    job = Job(
        model="lenet",  # type: ignore[arg-type]
        data=data,
        optimizer={"use": "adam", "lr": LEARNING_RATE},  # type: ignore[arg-type]
        training={"batch_size": BATCH_SIZE, "steps": NUM_STEPS, "threads": 1},  # type: ignore[arg-type]
        evaluation={"every_epochs": 0},  # type: ignore[arg-type]
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the progress lines are made, as in a real run
        run = train(job, run_dir=folder / f"run-{time.monotonic_ns()}")
    assert run.summary.samples_per_second is not None
    return run.summary.samples_per_second


class _WholeBatches(Dataset[Any]):
    """Gives a DataLoader a whole batch at once, gathered from tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._inputs[chosen], self._targets[chosen]


def _batched(inputs: Tensor, targets: Tensor) -> DataLoader[Any]:
    dataset = _WholeBatches(inputs, targets)
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=lambda batch: batch)


def _by_accelerate(inputs: Tensor, targets: Tensor) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _batched(inputs, targets))
    started = time.perf_counter()
    for step, (x, y) in enumerate(loader):
        if step == NUM_STEPS:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    return NUM_STEPS * BATCH_SIZE / (time.perf_counter() - started)


def _by_lightning(inputs: Tensor, targets: Tensor, folder: Path) -> float:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

        def on_train_start(self) -> None:
            self.started_s = time.perf_counter()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.started_s

    with _silent():
        module = Module()
        lightning.Trainer(
            max_steps=NUM_STEPS,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        ).fit(module, _batched(inputs, targets))
    return NUM_STEPS * BATCH_SIZE / module.seconds


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep Lightning's advice about its own defaults off the screen."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
