"""The memory of each worker of a model that is shared out, beside the worker's own share of it.

A GPT is trained by `sharded` with Adam. The peak of each worker is read for each phase: until the first step ends, in
steps, while checkpoints are saved (from the first byte to the end of the step beside which they are written), and while
another run continues from one. What a tiny model takes in the same phase is taken off: torch, and the shared memory of
the group. What is left is compared with a worker's share of parameters, gradients and Adam's state, and what a pass
keeps for the way back (`activations`, which are counted, not measured). `without_gradients` compares with the share of
parameters and Adam's state alone. Resident pages of mapped files count as memory, the system's page cache does not.

The stall is the time that the training of a worker stands still for a checkpoint. The first one of a run is written
before training continues; the others beside the next step, which becomes longer on cores that are busy.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from cordee.bench.harness import Report, describe_machine
from cordee.compute.devices import forget_peak, peak_bytes, release_unused
from cordee.launch import train
from cordee.models import gpt
from cordee.trainer import Trainer

ROUNDS = 3
WORKERS = 4
STEPS = 10
SAVED = (4, 8)  # steps after which there is a checkpoint, beside the one at the end
GOAL = 1.25  # of the share, in each phase
STALL = "saving: stall in steps"
STALL_GOAL = 0.05  # of a step
PHASES = ("start", "steps", "saving", "loading")  # loading is a start as well: the whole way to the first step
_VOCABULARY, _LENGTH, _NUM_HEADS = 512, 16, 8
SIZES = {"large": (18, 512), "tiny": (1, 8)}  # layers and width: 57 million parameters, and 5,400


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    share, kept = 4 * 4 * _num_parameters("large") / WORKERS, activation_bytes()
    for number in range(rounds):
        found = {size: _measure(size) for size in SIZES}
        for phase in PHASES:
            large, tiny = (max(worker[phase] for worker in found[size]) for size in SIZES)
            raw.setdefault(f"{phase}, bytes above a tiny model", []).append(large - tiny)
        for what in ("stall_s", "first_stall_s", "beside_s", "step_s"):
            raw.setdefault(what, []).append(max(worker[what] for worker in found["large"]))
        last = {name: values[-1] for name, values in raw.items()}
        say(f"round {number + 1} of {rounds}: " + _describe(last, share + kept))
    settings = {
        "workers": WORKERS,
        "parameters": _num_parameters("large"),
        "share_bytes": share,
        "activation_bytes": kept,
        "rounds": rounds,
        "steps": STEPS,
    }
    return Report("memory", describe_machine(), settings, raw, "bytes, seconds", rows_of(raw, share, kept))


def rows_of(raw: Mapping[str, Sequence[float]], share: float, kept: float) -> list[dict[str, Any]]:
    """Return what the figures say; `kept` are the bytes of activations. Pure."""
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        value = statistics.median(raw[f"{phase}, bytes above a tiny model"])
        rows.append({"what": f"{phase}: peak", "megabytes": value / 1e6, "is_times": value / (share + kept)})
        rows[-1] |= {"goal": GOAL, "without_gradients": value / (share * 3 / 4 + kept)}
    times = {
        STALL: [s / step_s for s, step_s in zip(raw["stall_s"], raw["step_s"], strict=True)],
        "the first of a run": [s / step_s for s, step_s in zip(raw["first_stall_s"], raw["step_s"], strict=True)],
        "the step beside it is longer by": [
            s / step_s - 1 for s, step_s in zip(raw["beside_s"], raw["step_s"], strict=True)
        ],
    }
    for what, values in times.items():
        goal = STALL_GOAL if what == STALL else None
        rows.append({"what": what, "megabytes": None, "is_times": statistics.median(values), "goal": goal})
        rows[-1]["without_gradients"] = None
    return rows


def activation_bytes() -> int:
    """Return what a worker's forward pass keeps for the backward pass, beside parameters: of its one sample."""
    layers, width = SIZES["large"]
    with torch.device("meta"):
        model = gpt(
            input_shape=(_LENGTH,),
            num_classes=_VOCABULARY,
            num_layers=layers,
            embedding_width=width,
            num_heads=_NUM_HEADS,
        )
        tokens = torch.zeros(1, _LENGTH, dtype=torch.int64)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(tokens)
        nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), tokens.reshape(-1))
    return sum(storage.nbytes() for storage in kept.values())


def _describe(figures: dict[str, float], share: float) -> str:
    peaks = ", ".join(f"{phase} {figures[f'{phase}, bytes above a tiny model'] / share:.2f}" for phase in PHASES)
    times = f"stall {figures['stall_s']:.2f} s, the first {figures['first_stall_s']:.2f} s"
    return f"{peaks} times the share; {times}; step {figures['step_s']:.2f} s, beside {figures['beside_s']:.2f} s"


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
        "checkpoint": {"every_steps": SAVED[0], "keep": 1},
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
    num_heads = _NUM_HEADS if arguments["num_layers"] > 1 else 1
    return gpt(input_shape=input_shape, num_classes=num_classes, num_heads=num_heads, **arguments)


class _Watch:
    """Writes into `folder` what this process had at most in each phase, above what it had before the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = 0
        self._peaks = dict.fromkeys(PHASES, 0.0)
        self._steps_s: list[float] = []
        self._stalls_s: dict[int, float] = {}  # by the step that is saved

    def begin(self) -> None:
        """Watch the training of this process from here on: the process is the benchmark's own."""
        release_unused()
        self._before = _resident_bytes()
        forget_peak()
        take_step, save, settle, resume = Trainer._take_step, Trainer._save, Trainer._settle_checkpoint, Trainer.resume
        is_loaded = False

        def watch_step(trainer: Trainer, *arguments: Any) -> None:
            nonlocal is_loaded
            is_first, is_saving = not self._steps_s, trainer.progress.step in SAVED
            started_s = time.perf_counter()
            take_step(trainer, *arguments)
            self._steps_s.append(time.perf_counter() - started_s)
            # In the first step the memory of the model as it was built is given back.
            self._note(("loading" if is_loaded else "start") if is_first else "saving" if is_saving else "steps")
            self._write()

        def stalled(trainer: Trainer, action: Callable[[], None]) -> None:
            step, started_s = trainer.progress.step, time.perf_counter()
            action()
            self._stalls_s[step] = self._stalls_s.get(step, 0.0) + time.perf_counter() - started_s

        def watch_save(trainer: Trainer, **arguments: Any) -> None:
            self._note("steps")
            stalled(trainer, lambda: save(trainer, **arguments))

        def watch_settle(trainer: Trainer) -> None:
            if trainer._saver.is_open:
                stalled(trainer, lambda: settle(trainer))

        def watch_resume(trainer: Trainer, *arguments: Any) -> None:
            nonlocal is_loaded
            is_loaded = True
            resume(trainer, *arguments)

        Trainer._take_step, Trainer._save, Trainer.resume = watch_step, watch_save, watch_resume  # type: ignore
        Trainer._settle_checkpoint = watch_settle  # type: ignore[assignment, method-assign]

    def _note(self, phase: str) -> None:
        self._peaks[phase] = max(self._peaks[phase], peak_bytes() - self._before)
        forget_peak()

    def _write(self) -> None:
        first, later = SAVED
        found = {**self._peaks, "step_s": statistics.median(self._steps_s)}
        found |= {"first_stall_s": self._stalls_s.get(first, 0.0), "stall_s": self._stalls_s.get(later, 0.0)}
        found["beside_s"] = self._steps_s[later] if len(self._steps_s) > later else 0.0
        path = self._folder / f"{os.getpid()}.json"
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").replace(path)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
