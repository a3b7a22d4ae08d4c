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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cordee.bench.materials import build, image_data, silent, train_tensors, whole_batches
from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians
from cordee.core import Job
from cordee.core.settings import Data
from cordee.launch import train

BATCH_SIZE = 32
NUM_STEPS = 600
LEARNING_RATE = 0.001


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    data = image_data()
    inputs, targets = train_tensors(data)
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


def _by_hand(inputs: Tensor, targets: Tensor, *, fused: bool | None) -> float:
    model = build("lenet")
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


def _by_accelerate(inputs: Tensor, targets: Tensor) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build("lenet")
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, whole_batches(inputs, targets, BATCH_SIZE))
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
            self.model = build("lenet")

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

        def on_train_start(self) -> None:
            self.started_s = time.perf_counter()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.started_s

    with silent():
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
        ).fit(module, whole_batches(inputs, targets, BATCH_SIZE))
    return NUM_STEPS * BATCH_SIZE / module.seconds
