"""Parameter servers when workers are unlike, and what free-running workers learn.

- Four workers, one of them four times slower for a third of its time: how much the others wait, synchronous and with
  `staleness = 8`.
- Four workers, one of them always four times slower: the time against ideal sharing of the work.
- LeNet on Fashion-MNIST, four free-running workers against four synchronous ones, three seeds.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cordee.bench.harness import Report, describe_machine
from cordee.core import Job
from cordee.core.errors import DataError
from cordee.data import find_files
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.run import Run

PACE_S = 0.05
NUM_WORKERS = 4
STEPS = 150
SEEDS = 3
RATE = 0.05  # for a gradient over the whole batch; one over a worker's share, a quarter of it, gets a quarter


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    rounds = min(rounds, 3)
    raw: dict[str, list[float]] = {}
    cases: dict[str, tuple[Any, float]] = {
        "others wait, staleness 0": (0, 1 / 3),
        "others wait, staleness 8": (8, 1 / 3),
        "time to ideal, staleness 8, one always slow": (8, 1.0),
        "time to ideal, unbounded, one always slow": ("unbounded", 1.0),
    }
    for number in range(rounds):
        for name, (staleness, slow_share) in cases.items():
            run, ended = _run_paced(staleness, slow_share)
            figure = _waiting_share(ended) if name.startswith("others") else _over_ideal(run)
            raw.setdefault(name, []).append(figure)
        say(f"uneven workers: round {number + 1} of {rounds}")
    rows = [_row(name, raw[name]) for name in cases]
    try:
        find_files("fashion-mnist")
    except DataError:
        say("fashion-mnist: no files on this machine (cordee doctor says where they are looked for)")
    else:
        for seed in range(SEEDS):
            for name, settings_of_case in QUALITY.items():
                raw.setdefault(name, []).append(_accuracy(settings_of_case, seed))
                say(f"fashion-mnist, seed {seed}, {name}: {raw[name][-1]:.4f}")
        rows += [_row(name, raw[name]) for name in QUALITY]
    settings = {"workers": NUM_WORKERS, "pace_s": PACE_S, "steps": STEPS, "rounds": rounds, "seeds": SEEDS}
    return Report("staleness", describe_machine(), settings, raw, "share, ratio or accuracy", rows)


QUALITY: dict[str, dict[str, Any]] = {
    "accuracy, synchronous": {"staleness": 0},
    "accuracy, unbounded, staleness_lr": {"staleness": "unbounded", "staleness_lr": "inverse"},
    "accuracy, unbounded, delay compensation": {"staleness": "unbounded", "delay_compensation": 0.04},
}
GOALS = {
    "others wait, staleness 0": "about 0.5",
    "others wait, staleness 8": "≤ 0.05",
    "time to ideal, staleness 8, one always slow": "≤ 1.15",
    "time to ideal, unbounded, one always slow": "≤ 1.15",
}


def _row(name: str, figures: list[float]) -> dict[str, Any]:
    return {
        "measured": name,
        "median": statistics.median(figures),
        "lowest": min(figures),
        "highest": max(figures),
        "goal": GOALS.get(name, "within 0.01 of synchronous" if "unbounded" in name else "–"),
    }


def _run_paced(staleness: Any, slow_share: float) -> tuple[Run, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        job = Job.from_dict({
            "name": "paced",
            "model": {"use": f"{__name__}:Paced", "folder": folder, "pace_s": PACE_S, "slow_share": slow_share},
            "data": {"use": "synthetic", "shape": [8], "num_classes": 3, "size": 4000, "test_size": 8},
            "optimizer": {"use": "sgd", "lr": 0.01},
            "training": {"batch_size": NUM_WORKERS, "steps": STEPS, "threads": 1},
            "strategy": {"name": "parameter_server", "workers": NUM_WORKERS, "staleness": staleness},
            "checkpoint": {"every_steps": 0},
            "evaluation": {"every_epochs": 0},
        })  # fmt: skip
        run = train(job, run_dir=Path(folder) / "run", quiet=True)
        return run, [event for event in read_events(run.directory / "events.jsonl") if event["type"] == "worker_ended"]


def _waiting_share(ended: list[dict[str, Any]]) -> float:
    """Return what share of their time the workers but the slow one waited for leave to continue."""
    others = sorted(ended, key=lambda event: -event["waited_seconds"] / event["seconds"])[: NUM_WORKERS - 1]
    waited_s, seconds = (sum(float(event[key]) for event in others) for key in ("waited_seconds", "seconds"))
    return waited_s / seconds


def _over_ideal(run: Run) -> float:
    """Return the time the units took against that of three workers at full pace and one at a quarter."""
    assert run.summary.samples_per_second is not None
    seconds = run.summary.samples / run.summary.samples_per_second
    ideal_s = STEPS * NUM_WORKERS * PACE_S / (NUM_WORKERS - 1 + 0.25)
    return seconds / ideal_s


def _accuracy(settings: dict[str, Any], seed: int) -> float:
    rate = RATE if settings["staleness"] == 0 else RATE / NUM_WORKERS
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        job = Job.from_dict({
            "name": "quality",
            "seed": seed,
            "model": {"use": "lenet"},
            "data": {"use": "fashion-mnist"},
            "optimizer": {"use": "sgd", "lr": rate, "momentum": 0.9},
            "training": {"batch_size": 128, "epochs": 2, "threads": 1},
            "strategy": {"name": "parameter_server", "workers": NUM_WORKERS, **settings},
            "checkpoint": {"every_steps": 0},
        })  # fmt: skip
        run = train(job, run_dir=Path(folder) / "run", quiet=True)
        assert run.summary.test_accuracy is not None
        return run.summary.test_accuracy


class Paced(nn.Module):
    """A linear layer that takes `pace_s` for every training pass, and on the slow worker four times that.

    It sleeps instead of computing, so that four workers fit on two cores. One worker of a run is the slow one: the
    first that claims it, by a file in `folder`, which all of them know. `slow_share` is the share of its passes that
    are slow, in spells of four; 1 is always.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, folder: str, pace_s: float, slow_share: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(input_shape[0], num_classes)
        self._folder, self._pace_s, self._slow_share = Path(folder), pace_s, slow_share
        self._is_slow: bool | None = None  # not known before the first pass: servers never make one
        self._random = random.Random(0)
        self._spell, self._is_in_spell = 0, False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._pace_s * (4 if self._draw() else 1))
        outputs: Tensor = self.linear(inputs)
        return outputs

    def _draw(self) -> bool:
        if self._is_slow is None:
            self._is_slow = self._claim()
        if not self._is_slow:
            return False
        if self._spell == 0:
            self._spell, self._is_in_spell = 4, self._random.random() < self._slow_share
        self._spell -= 1
        return self._is_in_spell

    def _claim(self) -> bool:
        try:
            os.close(os.open(self._folder / "slow", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
