"""What reproducible mode costs: the same job in both modes, on one worker and on two, interleaved.

One kernel thread per worker in both modes, so that only the shards make the difference: 8 small passes and the tree
that adds up their gradients, instead of one pass per worker. In the ordinary mode a worker could have more threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.bench.harness import Clock, Contestant, Place, Report, compete, describe_machine, median_ratio, medians
from cordee.bench.loops import MODELS, endless_job, synthetic_images, train_for_ever
from cordee.core.settings import Data
from cordee.core.shards import DEFAULT_NUM_SHARDS

ROUNDS = 5
BATCH_SIZE = 128  # of all workers together: 16 samples a shard
WORKERS = (1, 2)
MODES = ("ordinary", "reproducible")

_GPT = {"use": "gpt", "num_layers": 2, "embedding_width": 128, "dropout": 0.1}
_TOKENS = {"kind": "tokens", "shape": [64], "num_classes": 128, "size": 4096, "test_size": 0}
# Steps per round: half a second to two on one worker.
_WORK: dict[str, tuple[dict[str, Any], Data, int]] = {
    "mlp": (MODELS["mlp"], synthetic_images(1, 28, test_size=0), 200),
    "lenet": (MODELS["lenet"], synthetic_images(1, 28, test_size=0), 40),
    "resnet20": (MODELS["resnet20"], synthetic_images(3, 32, test_size=0), 3),
    "gpt": (_GPT, Data("synthetic", args=_TOKENS), 3),
}


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for model, (_, _, num_steps) in _WORK.items():
        say(f"{model}: {num_steps} steps of {BATCH_SIZE} a round, both modes on {WORKERS} workers")
        contestants = {
            f"{model}, {size} workers, {mode}": Contestant(
                partial(_train, model=model, is_reproducible=mode == "reproducible"),
                size,
                num_steps,
                BATCH_SIZE // size,
            )
            for size in WORKERS
            for mode in MODES
        }
        figures, _ = compete(contestants, rounds, say)
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
        "steps_per_round": {model: num_steps for model, (_, _, num_steps) in _WORK.items()},
    }
    return Report("reproducible", describe_machine(), settings, raw, "samples/s", rows)


def _train(place: Place, clock: Clock, *, model: str, is_reproducible: bool) -> None:
    use, data, _ = _WORK[model]
    train_for_ever(endless_job(use, data, BATCH_SIZE, place.size, reproducible=is_reproducible), place, clock)
