"""The memory of each worker of a model that is shared out, beside the worker's own share of it.

A GPT is trained by `sharded` with Adam. The peak of each worker is read for each phase: until the first step, in steps,
while a checkpoint is saved, and while another run continues from it. What a tiny model takes in the same phase is
taken off: torch, the shared memory of the group, and activations, which are the same for both batches. A worker's share
is its part of the parameters and of Adam's state. In every phase a worker also has its part of the gradients, so that
0.33 of the share are no waste: `with_gradients` counts them as a part of it. Batches are small, so that activations do
not hide the rest. Resident pages of mapped files count as memory, the system's page cache does not.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from cordee.bench.harness import Report, describe_machine
from cordee.compute.devices import forget_peak, peak_bytes, release_unused
from cordee.launch import train
from cordee.models import gpt
from cordee.trainer import Trainer

ROUNDS = 3
WORKERS = 4
STEPS = 6
GOAL = 1.25  # of the share, in each phase
STALL_GOAL = 0.05  # of a step
PHASES = ("start", "steps", "saving", "loading")  # loading is a start as well: the whole way to the first step
_VOCABULARY, _LENGTH = 512, 16
SIZES = {"large": (18, 512), "tiny": (1, 8)}  # layers and width: 57 million parameters, and 5,400


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    share = 3 * 4 * _num_parameters("large") / WORKERS
    for number in range(rounds):
        found = {size: _measure(size) for size in SIZES}
        for phase in PHASES:
            large, tiny = (max(worker[phase] for worker in found[size]) for size in SIZES)
            raw.setdefault(f"{phase}, bytes above a tiny model", []).append(large - tiny)
        for what in ("stall_s", "step_s"):
            raw.setdefault(what, []).append(max(worker[what] for worker in found["large"]))
        say(f"round {number + 1} of {rounds}: " + _describe({name: values[-1] for name, values in raw.items()}, share))
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        value = statistics.median(raw[f"{phase}, bytes above a tiny model"])
        rows.append({"what": f"{phase}: peak", "megabytes": value / 1e6, "is_times": value / share, "goal": GOAL})
        rows[-1]["with_gradients"] = value / (share * 4 / 3)
    stalls = [stall_s / step_s for stall_s, step_s in zip(raw["stall_s"], raw["step_s"], strict=True)]
    rows.append({"what": "saving: stall in steps", "megabytes": None, "is_times": statistics.median(stalls)})
    rows[-1]["goal"] = STALL_GOAL
    settings = {
        "workers": WORKERS,
        "parameters": _num_parameters("large"),
        "share_bytes": share,
        "rounds": rounds,
        "steps": STEPS,
    }
    return Report("memory", describe_machine(), settings, raw, "bytes, seconds", rows)


def _describe(figures: dict[str, float], share: float) -> str:
    peaks = ", ".join(f"{phase} {figures[f'{phase}, bytes above a tiny model'] / share:.2f}" for phase in PHASES)
    return f"{peaks} times the share; stall {figures['stall_s']:.2f} s, step {figures['step_s']:.2f} s"


def _num_parameters(size: str) -> int:
    layers, width = SIZES[size]
    return _VOCABULARY * width * 2 + _LENGTH * width + layers * (12 * width * width + 13 * width) + 2 * width


def _measure(size: str) -> list[dict[str, float]]:
    """Return what each worker had in each phase, in bytes, and for how long it stood still."""
    layers, width = SIZES[size]
    job: dict[str, Any] = {
        "model": {"use": "cordee.bench.memory:watched_gpt", "num_layers": layers, "embedding_width": width},
        "data": {
            "use": "synthetic",
            "kind": "tokens",
            "shape": [_LENGTH],
            "num_classes": _VOCABULARY,
            "size": 64,
            "test_size": 0,
        },
        "optimizer": {"use": "adam", "lr": 1e-4},
        "training": {"batch_size": WORKERS, "steps": 2 * STEPS, "threads": 1},
        "stop": {"steps": STEPS},
        "strategy": {"name": "sharded", "workers": WORKERS},
        "checkpoint": {"every_steps": STEPS - 1, "keep": 1},
        "evaluation": {"every_epochs": 0},
    }
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as name:
        folder = Path(name)
        job["model"] = {**job["model"], "folder": name}
        train(job, run_dir=folder / "run", quiet=True)
        first = _read(folder)
        train({**job, "stop": {"steps": STEPS + 1}}, run_dir=folder / "run", resume=True, quiet=True)
        second = _read(folder)
    return [{**one, "loading": other["loading"]} for one, other in zip(first, second, strict=True)]


def _read(folder: Path) -> list[dict[str, float]]:
    """Return what the workers have written, and remove it."""
    found = []
    for path in sorted(folder.glob("*.json")):
        found.append(json.loads(path.read_text()))
        path.unlink()
    return found


# In a worker: the model's builder watches what the worker does from then on.


def watched_gpt(input_shape: tuple[int, ...], num_classes: int, *, folder: str, **arguments: Any) -> nn.Module:
    _Watch(Path(folder)).begin()
    num_heads = 8 if arguments["num_layers"] > 1 else 1
    return gpt(input_shape=input_shape, num_classes=num_classes, num_heads=num_heads, **arguments)


class _Watch:
    """Writes into `folder` what this process had at most in each phase, above what it had before the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = 0
        self._peaks = dict.fromkeys(PHASES, 0.0)
        self._steps_s: list[float] = []
        self._stall_s = 0.0

    def begin(self) -> None:
        """Watch the training of this process from here on: the process is the benchmark's own."""
        release_unused()
        self._before = _resident_bytes()
        forget_peak()
        take_step, save, resume = Trainer._take_step, Trainer._save, Trainer.resume
        is_loaded = False

        def watch_step(trainer: Trainer, *arguments: Any) -> None:
            nonlocal is_loaded
            is_first = not self._steps_s
            started_s = time.perf_counter()
            take_step(trainer, *arguments)
            self._steps_s.append(time.perf_counter() - started_s)
            # In the first step the memory of the model as it was built is given back.
            self._note(("loading" if is_loaded else "start") if is_first else "steps")
            self._write()

        def watch_save(trainer: Trainer, **arguments: Any) -> None:
            forget_peak()
            started_s = time.perf_counter()
            save(trainer, **arguments)
            self._stall_s = max(self._stall_s, time.perf_counter() - started_s)
            trainer.wait_for_checkpoint()
            self._note("saving")
            self._write()

        def watch_resume(trainer: Trainer, *arguments: Any) -> None:
            nonlocal is_loaded
            is_loaded = True
            resume(trainer, *arguments)

        Trainer._take_step, Trainer._save, Trainer.resume = watch_step, watch_save, watch_resume  # type: ignore

    def _note(self, phase: str) -> None:
        self._peaks[phase] = max(self._peaks[phase], peak_bytes() - self._before)
        forget_peak()

    def _write(self) -> None:
        found = {**self._peaks, "stall_s": self._stall_s, "step_s": statistics.median(self._steps_s)}
        path = self._folder / f"{os.getpid()}.json"
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").replace(path)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
