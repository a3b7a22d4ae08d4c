"""Which candidates there are, and which of them is best. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cordee.planner.costs import predict
from cordee.planner.pipelines import SCHEDULES
from cordee.planner.prediction import Candidate, Prediction, Work

MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)
# Strategies that train in another way than `single` does: shown, never chosen over one that keeps the promise that
# the result does not depend on the crowd.
OTHER_TRAINING = ("local_sgd",)

PLAINEST_FIRST = ("single", "data_parallel", "sharded", "pipeline", "tensor", "hybrid", "parameter_server")
CLOSE = 0.05  # predictions nearer to each other than this are equal


def degrees(most: int) -> list[int]:
    """Return the numbers of workers worth a look: powers of two, those that divide `most`, and `most`."""
    powers = {1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most}
    return sorted(powers | set(_divisors(most)))


def candidates(work: Work, most_workers: int) -> Iterator[Candidate]:
    """Yield every strategy with every degree, micro-batch and schedule worth a look, up to `most_workers`."""
    yield Candidate(strategy="single", workers=1)
    num_blocks = len(work.profile.blocks) if work.profile.is_chain else 1
    can_slice = any(block.splittable for block in work.profile.blocks)
    for workers in degrees(most_workers):
        if workers == 1 or workers > work.batch_size:
            continue
        for strategy in ("data_parallel", "sharded", "local_sgd"):
            yield Candidate(strategy=strategy, workers=workers)
        for staleness in (0, "unbounded"):
            settings = {"servers": max(1, workers // 4), "staleness": staleness}
            yield Candidate(strategy="parameter_server", workers=workers, settings=settings)
        if can_slice:
            yield Candidate(strategy="tensor", workers=workers)
        if workers <= num_blocks:
            # Where stages share cores, others use them while one waits: there is nothing to gain by more chunks.
            num_chunkable = num_blocks if work.site.num_lanes(workers) >= workers else 0
            for schedule, num_micro in _schedules(workers, num_chunkable, work.batch_size):
                settings = {"microbatches": num_micro, "schedule": schedule}
                yield Candidate(strategy="pipeline", workers=workers, settings=settings)
        yield from _meshes(workers, num_blocks, work.batch_size, can_slice)


def _schedules(num_stages: int, num_chunkable: int, samples: int) -> Iterator[tuple[str, int]]:
    for per_stage in MICRO_BATCHES_PER_STAGE:
        num_micro = per_stage * num_stages
        if num_micro > samples:
            return
        for schedule in SCHEDULES:
            if schedule != "interleaved" or num_chunkable >= 2 * num_stages:
                yield schedule, num_micro


def _meshes(workers: int, num_blocks: int, batch_size: int, can_slice: bool) -> Iterator[Candidate]:
    """Yield the meshes that `hybrid` has: every way to share the workers out over two axes or more."""
    for data, sharded, tensor in itertools.product(_divisors(workers), repeat=3):
        num_shares, pipeline = data * sharded, workers // (data * sharded * tensor)
        if num_shares * tensor * pipeline != workers or (tensor > 1 and not can_slice):
            continue
        axes = {"data": data, "sharded": sharded, "pipeline": pipeline, "tensor": tensor}
        mesh = {axis: size for axis, size in axes.items() if size > 1}
        if len(mesh) < 2 or num_shares > batch_size:
            continue
        settings: dict[str, Any] = {"mesh": mesh}
        if pipeline > 1:
            num_micro = min(4 * pipeline, batch_size // num_shares)
            if pipeline > num_blocks or num_micro < pipeline:
                continue
            settings |= {"microbatches": num_micro, "schedule": "1f1b"}
        yield Candidate(strategy="hybrid", workers=workers, settings=settings)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def search(work: Work, most_workers: int, refused_slices: Collection[int] = ()) -> list[Prediction]:
    """Return the best prediction of every strategy and number of workers, the fastest first; what fits comes first.

    Meshes along whose axis 'tensor' there are `refused_slices` workers are passed over, so that others are found.
    """
    best: dict[tuple[object, ...], Prediction] = {}
    for candidate in candidates(work, most_workers):
        if candidate.settings.get("mesh", {}).get("tensor") in refused_slices:
            continue
        found = predict(candidate, work)
        key = (found.strategy, found.workers, found.settings.get("staleness"))
        if key not in best or _order(found) < _order(best[key]):
            best[key] = found
    return sorted(best.values(), key=_order)


def choose(
    predictions: Sequence[Prediction], available: Collection[str], workers: int | None = None
) -> tuple[Prediction | None, Prediction | None]:
    """Return the best prediction that fits and can be run, and the next best.

    Of those that are equal, as far as can be predicted, the plainest counts as the best: fewer workers and parts, and
    less that can go wrong.
    """
    able = [
        prediction
        for prediction in predictions
        if prediction.strategy in available and is_candidate(prediction) and workers in (None, prediction.workers)
    ]
    if not able:
        return None, None
    equal = [prediction for prediction in able if prediction.step_s <= able[0].step_s * (1 + CLOSE)]
    best = min(equal, key=lambda p: (PLAINEST_FIRST.index(p.strategy), p.workers, p.step_s))
    return best, next((prediction for prediction in able if prediction is not best), None)


def is_candidate(prediction: Prediction) -> bool:
    """Return whether it may be chosen: it fits, and trains as `single` does."""
    return prediction.fits and is_in_step(prediction)


def is_in_step(prediction: Prediction) -> bool:
    """Return whether all workers agree at every step, as one worker does with itself."""
    return prediction.settings.get("staleness", 0) == 0 and prediction.strategy not in OTHER_TRAINING


def _order(prediction: Prediction) -> tuple[bool, float, float, float]:
    # Of equals the one that needs fewer workers, then less memory.
    return (not prediction.fits, round(prediction.step_s, 9), prediction.workers, prediction.memory_bytes)
