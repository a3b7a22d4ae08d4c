"""What strategies themselves take: a step of a model that has next to nothing to compute, with and without them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from cordee.assembly import Assembly, assemble
from cordee.cluster import Team
from cordee.compute import NO_VOTES
from cordee.core import Job, Use
from cordee.core.errors import CordeeError
from cordee.planner.machine import Overhead
from cordee.planner.measuring import typical_s
from cordee.strategies import STRATEGIES

NUM_LAYERS = 8
NUM_STEPS = 24
NUM_SERVED_STEPS = 60
# Settings to try, and how many parts a step then has: micro-batches, units that are gathered one by one, sliced layers.
TRIALS: Mapping[str, tuple[tuple[dict[str, Any], int], ...]] = {
    "data_parallel": (({}, 1),),
    "sharded": (({}, 1), ({"unit_bytes": 1}, NUM_LAYERS + 2)),
    "pipeline": (({"microbatches": 2}, 2), ({"microbatches": 8}, 8)),
    "tensor": (({}, NUM_LAYERS + 1),),
}


def measure_overheads(index: int, num_workers: int) -> Iterator[Overhead]:
    """Yield what each strategy of this version adds to a step on this machine. Collective, on the default group."""
    bare_s = _step_s(_tiny_job("data_parallel", num_workers, {}), index, num_workers, is_bare=True)
    for strategy, trials in TRIALS.items():
        if strategy not in STRATEGIES:
            continue
        points = []
        for settings, num_parts in trials:
            # What a strategy refuses, it refuses on all workers alike and before it exchanges anything.
            with contextlib.suppress(CordeeError):
                job = _tiny_job(strategy, num_workers, settings)
                points.append((num_parts, _step_s(job, index, num_workers, is_bare=False) - bare_s))
        if not points:
            continue
        (few, low_s), (many, high_s) = points[0], points[-1]
        # From two trials the line through them; one of several parts is all theirs.
        part_s = max(0.0, (high_s - low_s) / (many - few) if many > few else low_s / few if few > 1 else 0.0)
        step_s = max(0.0, low_s - part_s * few)
        yield Overhead(strategy=strategy, num_processes=num_workers, step_s=step_s, part_s=part_s)


def served_jobs(num_workers: int) -> tuple[Job, Job]:
    """Return jobs with a server and next to nothing to compute: of few parameters, and of 8 MB."""
    small = _tiny_job("parameter_server", num_workers, {})
    large = msgspec.structs.replace(small, model=Use("mlp", args={"hidden": [1024, 1024, 1024]}))
    return (
        msgspec.structs.replace(small, training=msgspec.structs.replace(small.training, steps=NUM_SERVED_STEPS)),
        msgspec.structs.replace(large, training=msgspec.structs.replace(large.training, steps=NUM_SERVED_STEPS // 2)),
    )


def measure_bare(index: int, num_workers: int) -> tuple[float, ...]:
    """Return the seconds of a step of `served_jobs` while all members take one and nobody exchanges anything."""
    times = []
    for job in served_jobs(num_workers):
        strategy = msgspec.structs.replace(job.strategy, name="data_parallel")
        times.append(_step_s(msgspec.structs.replace(job, strategy=strategy), index, num_workers, is_bare=True))
    return tuple(times)


def _tiny_job(strategy: str, num_workers: int, settings: dict[str, Any]) -> Job:
    return Job.from_dict(
        {
            "model": {"use": "mlp", "hidden": [16] * NUM_LAYERS},
            "data": {"use": "synthetic", "shape": [16], "num_classes": 4, "size": 1024, "test_size": 0},
            "optimizer": {"use": "sgd", "lr": 0.001},
            "training": {"batch_size": 8 * num_workers, "steps": NUM_STEPS, "device": "cpu"},
            "strategy": {"name": strategy, "workers": num_workers, **settings},
            "checkpoint": {"every_steps": 0},
        }
    )


def _step_s(job: Job, index: int, num_workers: int, *, is_bare: bool) -> float:
    team = Team(index, num_workers, num_local_workers=num_workers, local_rank=index)
    parts = assemble(job, team)
    take = _bare_step(parts) if is_bare else _whole_step(parts)
    times = []
    with contextlib.closing(parts.train.batches(0)) as batches:
        for batch, step in zip(batches, range(NUM_STEPS), strict=False):
            started = time.perf_counter()
            take(batch, step)
            times.append(time.perf_counter() - started)
    return typical_s(times[4:])


def _whole_step(parts: Assembly) -> Callable[[Any, int], None]:
    parts.setup()

    def take(batch: Any, step: int) -> None:
        parts.strategy.forward_backward([batch], measure=False, vote=lambda: NO_VOTES)
        parts.strategy.update(step)

    return take


def _bare_step(parts: Assembly) -> Callable[[Any, int], None]:
    optimizer = parts.recipe.make(parts.model.named_parameters())

    def take(batch: Any, step: int) -> None:
        total = parts.computation.loss.count(batch.targets)
        parts.computation.forward_backward(parts.model, [batch], total_count=total, measure=False)
        optimizer.step()
        optimizer.zero_grad()

    return take
