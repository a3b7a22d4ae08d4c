"""What comparing the members costs: LeNet and ResNet-20 on two workers, with the comparison and without, interleaved.

`share_of_time` is what hashing and gathering took inside the run, waiting for the other worker included;
`with_over_without` is the speed with the comparison over the speed without, which the machine's noise is in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.bench.harness import Clock, Contestant, Place, Report, compete, describe_machine, median_ratio, medians
from cordee.bench.loops import MODELS, endless_job, synthetic_images, train_for_ever
from cordee.checkpoint import Comparison, Digest

ROUNDS = 5
BATCH_SIZE = 128  # of both workers together
SIZE = 2
# Image and steps per round: some seconds, so that a round has several comparisons.
_WORK = {"lenet": ((1, 28), 400), "resnet20": ((3, 32), 40)}


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for model, (_, num_steps) in _WORK.items():
        say(f"{model}: {num_steps} steps of {BATCH_SIZE} a round on {SIZE} workers")
        compared, plain = f"{model}, compared", f"{model}, not compared"
        contestants = {
            name: Contestant(partial(_train, model=model, is_compared=is_compared), SIZE, num_steps, BATCH_SIZE // SIZE)
            for name, is_compared in ((compared, True), (plain, False))
        }
        figures, busy_shares = compete(contestants, rounds, say)
        raw |= figures
        middle = medians(figures)
        rows.append(
            {
                "model": model,
                "samples_per_second": middle[compared],
                "without_samples_per_second": middle[plain],
                "share_of_time": statistics.median(busy_shares[compared]),
                "with_over_without": median_ratio(figures[compared], figures[plain]),
            }
        )
    settings = {
        "batch_size": BATCH_SIZE,
        "workers": SIZE,
        "rounds": rounds,
        "steps_per_round": {model: num_steps for model, (_, num_steps) in _WORK.items()},
    }
    return Report("commit_check", describe_machine(), settings, raw, "samples/s", rows)


def _train(place: Place, clock: Clock, *, model: str, is_compared: bool) -> None:
    compare = Comparison.compare

    def timed(self: Comparison, *arguments: Any) -> Digest:
        started_s = time.perf_counter()
        digest = compare(self, *arguments)
        clock.busy_s += time.perf_counter() - started_s
        return digest

    Comparison.compare = timed  # type: ignore  # this is a process of its own
    if not is_compared:
        Comparison.is_due = lambda self, step: False  # type: ignore[method-assign]
    data = synthetic_images(*_WORK[model][0], test_size=0)
    train_for_ever(endless_job(MODELS[model], data, BATCH_SIZE, SIZE), place, clock)
