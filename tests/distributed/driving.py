"""Training inside processes that are already there: one pool runs many cases, with no launch for each.

What runs in a pool is what a worker runs (`cordee.runs.team.worker`), without the launcher and its channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from process_pool import ProcessPool

from cordee.checkpoint import weights_sha256
from cordee.cluster import Team
from cordee.core import Job
from cordee.monitoring import AnyEvent, Monitor, Summary
from cordee.training.components import assemble
from cordee.training.session import Session

HERE = str(Path(__file__).parent)

Table = dict[str, Any]


@dataclass(repr=False)
class Outcome:
    """What one worker ended with."""

    weights: dict[str, np.ndarray[Any, Any]]
    events: list[AnyEvent]
    summary: Summary

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [msgspec.structs.asdict(event) for event in self.events if event.__struct_config__.tag == kind]

    def losses(self) -> np.ndarray[Any, Any]:
        """The loss of every step."""
        return np.array([fields["loss"] for fields in self.of("step")])


def job(**sections: Any) -> Table:
    """Return a job of a small mlp, with every step recorded; sections are merged into it, key by key."""
    table: Table = {
        "model": {"use": "mlp", "hidden": [32]},
        "data": {"use": "synthetic", "shape": [20], "num_classes": 5, "size": 150, "test_size": 47},
        "optimizer": {"use": "sgd", "lr": 0.05},
        "training": {"batch_size": 32, "steps": 50, "threads": 1},
        "evaluation": {"every_epochs": 0, "batch_size": 10},
        "checkpoint": {"every_steps": 0},
        "monitoring": {"every_steps": 1},
        "python_path": [HERE],
    }
    for name, section in sections.items():
        is_merged = isinstance(section, dict) and not {"use"} & section.keys()
        table[name] = {**table.get(name, {}), **section} if is_merged else section
    return table


def train(
    index: int,
    num_workers: int,
    table: Table,
    run_dir: str,
    resume: bool = False,
    stop_at: StopAt | None = None,
) -> Outcome:
    """Train as worker `index` of those in this process's group, or alone."""
    strategy = {"name": "data_parallel" if num_workers > 1 else "single", **table.get("strategy", {})}
    if num_workers == 1 and strategy["name"] == "single":
        strategy = {"name": "single"}
    team = Team(index, num_workers, num_local_workers=num_workers, local_rank=index, generation=1)
    num_threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    try:
        parts = assemble(Job.from_dict({**table, "strategy": {**strategy, "workers": num_workers}}), team)
        parts.setup()
        events: list[AnyEvent] = []
        with Monitor([_Recorder(events)]) as monitor:
            should_stop = stop_at.on(index) if stop_at else lambda: False
            session = Session(parts, monitor, Path(run_dir), should_stop)
            session.run(resume=resume, log_file=Path(run_dir) / f"worker-{index}.log")
            summary = session.summarise(None)
    finally:
        torch.set_num_threads(num_threads)
        torch.set_rng_state(random_state)
    if not parts.is_whole:
        parts.strategy.consolidate()  # the run itself puts together only what somebody looks at
    state = parts.strategy.model.state_dict()
    assert weights_sha256(state) == summary.weights_sha256
    weights = {name: value.detach().double().numpy() for name, value in state.items()}
    return Outcome(weights, events, summary)


class StopAt:
    """Says to stop when it is asked on one worker for the n-th time: once for each step and each test batch."""

    def __init__(self, worker_index: int, call: int) -> None:
        self._worker_index, self._call, self._num_calls = worker_index, call, 0

    def on(self, worker_index: int) -> Callable[[], bool]:
        return self if worker_index == self._worker_index else lambda: False

    def __call__(self) -> bool:
        self._num_calls += 1
        return self._num_calls >= self._call


class _Recorder:
    def __init__(self, events: list[AnyEvent]) -> None:
        self._events = events

    def emit(self, event: AnyEvent) -> None:
        self._events.append(event)

    def close(self) -> None:
        pass


def train_alone(table: Table, run_dir: Path, **options: Any) -> Outcome:
    run_dir.mkdir(parents=True, exist_ok=True)
    return train(0, 1, table, str(run_dir), **options)


def train_together(pool: ProcessPool, table: Table, run_dir: Path, **options: Any) -> list[Outcome]:
    """Train on all members of the pool; all must end with the same weights."""
    run_dir.mkdir(parents=True, exist_ok=True)
    outcomes = pool.run(_train_member, table, str(run_dir), options)
    assert len({outcome.summary.weights_sha256 for outcome in outcomes}) == 1, "the workers' weights differ"
    return outcomes


def _train_member(index: int, num_workers: int, table: Table, run_dir: str, options: dict[str, Any]) -> Outcome:
    return train(index, num_workers, table, run_dir, **options)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Return the largest difference of any weight, relative to the largest weight of its tensor."""
    assert one.weights.keys() == other.weights.keys()
    return max(
        float(np.abs(value - other.weights[name]).max() / max(np.abs(value).max(), 1e-30))
        for name, value in one.weights.items()
        if value.size and np.isfinite(value).all()
    )
