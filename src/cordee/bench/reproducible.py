"""What reproducible mode costs: the same job in both modes, on one worker and on two, interleaved.

One kernel thread per worker in both modes, so that only the shards make the difference: 8 small passes and the tree
that adds up their gradients, instead of one pass per worker. In the ordinary mode a worker could have more threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.bench.contest import Clock, Contestant, Place
from cordee.bench.loops import train_for_ever
from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians
from cordee.core import Job
from cordee.core.shards import DEFAULT_NUM_SHARDS

ROUNDS = 5
BATCH_SIZE = 128  # of all workers together: 16 samples a shard
WORKERS = (1, 2)
MODES = ("ordinary", "reproducible")

_IMAGES = {"use": "synthetic", "num_classes": 10, "size": 8192, "test_size": 0}
_TOKENS = {"use": "synthetic", "kind": "tokens", "shape": [64], "num_classes": 128, "size": 4096, "test_size": 0}
# Steps per round: half a second to two on one worker.
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "mlp": ({"use": "mlp"}, {**_IMAGES, "shape": [1, 28, 28]}, 200),
    "lenet": ({"use": "lenet"}, {**_IMAGES, "shape": [1, 28, 28]}, 40),
    "resnet20": ({"use": "resnet", "depth": 20}, {**_IMAGES, "shape": [3, 32, 32]}, 3),
    "gpt": ({"use": "gpt", "num_layers": 2, "embedding_width": 128, "dropout": 0.1}, _TOKENS, 3),
}


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for model, (_, _, num_steps) in _MODELS.items():
        say(f"{model}: {num_steps} steps of {BATCH_SIZE} a round, both modes on {WORKERS} workers")
        with contextlib.ExitStack() as stack:
            running = {
                f"{model}, {size} workers, {mode}": stack.enter_context(contextlib.closing(_start(model, size, mode)))
                for size in WORKERS
                for mode in MODES
            }
            figures = interleave(running, rounds, say)
        raw |= figures
        middle = medians(figures)
        for size in WORKERS:
            ordinary, reproducible = (f"{model}, {size} workers, {mode}" for mode in MODES)
            rows.append(
                {
                    "model": model,
                    "workers": size,
                    "ordinary_samples_per_second": middle[ordinary],
                    "reproducible_samples_per_second": middle[reproducible],
                    "takes_times_as_long": median_ratio(figures[ordinary], figures[reproducible]),
                }
            )
    settings = {
        "batch_size": BATCH_SIZE,
        "shards": DEFAULT_NUM_SHARDS,
        "threads_per_worker": 1,
        "rounds": rounds,
        "steps_per_round": {model: num_steps for model, (_, _, num_steps) in _MODELS.items()},
    }
    return Report("reproducible", describe_machine(), settings, raw, "samples/s", rows)


def _start(model: str, size: int, mode: str) -> Contestant:
    loop = partial(_train, model=model, is_reproducible=mode == "reproducible")
    return Contestant(loop, size=size, num_steps=_MODELS[model][2], batch_size=BATCH_SIZE // size)


def _train(place: Place, clock: Clock, *, model: str, is_reproducible: bool) -> None:
    use, data, _ = _MODELS[model]
    tables: dict[str, Any] = {
        "model": use,
        "data": data,
        "optimizer": {"use": "adam", "lr": 0.001},
        "training": {"batch_size": BATCH_SIZE, "steps": 10**9, "threads": 1, "reproducible": is_reproducible},
        "strategy": {"name": "single" if place.size == 1 else "data_parallel", "workers": place.size},
        "evaluation": {"every_epochs": 0},
        "checkpoint": {"every_steps": 0},
    }
    train_for_ever(Job(**tables), place, clock)
