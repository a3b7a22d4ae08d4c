"""What comparing the members costs: LeNet and ResNet-20 on two workers, with the comparison and without, interleaved.

`share_of_time` is what hashing and gathering took inside the run, waiting for the other worker included;
`with_over_without` is the speed with the comparison over the speed without, which the machine's noise is in.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.bench.contest import Clock, Contestant, Place
from cordee.bench.loops import train_for_ever
from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians
from cordee.checkpoint import Comparison, Digest
from cordee.core import Job

ROUNDS = 5
BATCH_SIZE = 128  # of both workers together
SIZE = 2

_IMAGES = {"use": "synthetic", "num_classes": 10, "size": 8192, "test_size": 0}
# Steps per round: some seconds, so that a round has several comparisons.
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "lenet": ({"use": "lenet"}, {**_IMAGES, "shape": [1, 28, 28]}, 400),
    "resnet20": ({"use": "resnet", "depth": 20}, {**_IMAGES, "shape": [3, 32, 32]}, 40),
}


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for model, (_, _, num_steps) in _MODELS.items():
        say(f"{model}: {num_steps} steps of {BATCH_SIZE} a round on {SIZE} workers")
        shares: list[float] = []
        with contextlib.ExitStack() as stack:
            compared = stack.enter_context(contextlib.closing(_start(model, is_compared=True)))
            plain = stack.enter_context(contextlib.closing(_start(model, is_compared=False)))
            names = (f"{model}, compared", f"{model}, not compared")
            figures = interleave({names[0]: partial(_round, compared, shares), names[1]: plain}, rounds, say)
        raw |= figures
        middle = medians(figures)
        rows.append(
            {
                "model": model,
                "samples_per_second": middle[names[0]],
                "without_samples_per_second": middle[names[1]],
                "share_of_time": statistics.median(shares),
                "with_over_without": median_ratio(figures[names[0]], figures[names[1]]),
            }
        )
    settings = {
        "batch_size": BATCH_SIZE,
        "workers": SIZE,
        "rounds": rounds,
        "steps_per_round": {model: num_steps for model, (_, _, num_steps) in _MODELS.items()},
    }
    return Report("commit_check", describe_machine(), settings, raw, "samples/s", rows)


def _round(contestant: Contestant, shares: list[float]) -> float:
    speed = contestant()
    shares.append(contestant.busy_share)
    return speed


def _start(model: str, *, is_compared: bool) -> Contestant:
    loop = partial(_train, model=model, is_compared=is_compared)
    return Contestant(loop, size=SIZE, num_steps=_MODELS[model][2], batch_size=BATCH_SIZE // SIZE)


def _train(place: Place, clock: Clock, *, model: str, is_compared: bool) -> None:
    use, data, _ = _MODELS[model]
    compare = Comparison.compare

    def timed(self: Comparison, *arguments: Any) -> Digest:
        started_s = time.perf_counter()
        digest = compare(self, *arguments)
        clock.busy_s += time.perf_counter() - started_s
        return digest

    Comparison.compare = timed  # type: ignore  # this is a process of its own
    if not is_compared:
        Comparison.is_due = lambda self, step: False  # type: ignore[method-assign]
    tables: dict[str, Any] = {
        "model": use,
        "data": data,
        "optimizer": {"use": "adam", "lr": 0.001},
        "training": {"batch_size": BATCH_SIZE, "steps": 10**9, "threads": 1},
        "strategy": {"name": "data_parallel", "workers": SIZE},
        "evaluation": {"every_epochs": 0},
        "checkpoint": {"every_steps": 0},
    }
    train_for_ever(Job(**tables), place, clock)
