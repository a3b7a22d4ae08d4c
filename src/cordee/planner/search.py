"""Which candidates there are, and which of them is best. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cordee.core.mesh import Mesh
from cordee.planner.cost_model import predict
from cordee.planner.pipelines import SCHEDULES
from cordee.planner.prediction import Candidate, Prediction, Work
from cordee.strategies.table import STRATEGIES, CostModel

MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)
CLOSE = 0.05  # predictions nearer to each other than this are equal


def degrees(most: int) -> list[int]:
    """Return the numbers of workers worth a look: powers of two, those that divide `most`, and `most`."""
    powers = {1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most}
    return sorted(powers | set(_divisors(most)))


def candidates(work: Work, most_workers: int, refused_slices: Collection[int] = ()) -> Iterator[Candidate]:
    """Yield every strategy with every degree, micro-batch and schedule worth a look, up to `most_workers`.

    Meshes with slices for `refused_slices` workers are left out, so that others are found.
    """
    for workers in degrees(most_workers):
        if workers == 1 or workers <= work.batch_size:
            for strategy, entry in STRATEGIES.items():
                for settings in _settings(entry.cost_model, work, workers, refused_slices):
                    yield Candidate(strategy=strategy, workers=workers, settings=settings)


def _settings(
    cost_model: CostModel, work: Work, workers: int, refused_slices: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Yield the settings worth a look of strategies with a cost model; none where there is nothing to be had."""
    blocks = work.profile.blocks
    num_blocks = len(blocks) if work.profile.is_chain else 1
    can_slice = any(block.splittable for block in blocks)
    match cost_model:
        case "alone" if workers == 1:
            yield {}
        case _ if workers == 1:
            return
        case "replicas" | "shards":
            yield {}
        case "windows":
            yield {"sync_every": 50}
        case "slices" if can_slice:
            yield {}
        case "servers":
            for staleness in (0, "unbounded"):
                yield {"servers": max(1, workers // 4), "staleness": staleness}
        case "stages" if workers <= num_blocks:
            # Where stages share cores, others use them while one waits: there is nothing to gain by more chunks.
            num_chunkable = num_blocks if work.hardware.num_lanes(workers) >= workers else 0
            for schedule, num_micro in _schedules(workers, num_chunkable, work.batch_size):
                yield {"microbatches": num_micro, "schedule": schedule}
        case "mesh":
            for mesh in _meshes(workers, work.batch_size):
                if mesh.tensor == 1 or (can_slice and mesh.tensor not in refused_slices):
                    yield from _mesh_settings(mesh, num_blocks, work.batch_size)


def _schedules(num_stages: int, num_chunkable: int, samples: int) -> Iterator[tuple[str, int]]:
    for per_stage in MICRO_BATCHES_PER_STAGE:
        num_micro = per_stage * num_stages
        if num_micro > samples:
            return
        for schedule in SCHEDULES:
            if schedule != "interleaved" or num_chunkable >= 2 * num_stages:
                yield schedule, num_micro


def _meshes(workers: int, batch_size: int) -> Iterator[Mesh]:
    """Yield every way to share the workers out over two axes or more."""
    for data, sharded, tensor in itertools.product(_divisors(workers), repeat=3):
        mesh = Mesh(data=data, sharded=sharded, pipeline=workers // (data * sharded * tensor), tensor=tensor)
        if mesh.num_workers == workers and len(mesh.used) > 1 and mesh.num_shares <= batch_size:
            yield mesh


def _mesh_settings(mesh: Mesh, num_blocks: int, batch_size: int) -> Iterator[dict[str, Any]]:
    num_micro = min(4 * mesh.pipeline, batch_size // mesh.num_shares)
    if mesh.pipeline == 1:
        yield {"mesh": mesh.used}
    elif mesh.pipeline <= num_blocks and num_micro >= mesh.pipeline:
        yield {"mesh": mesh.used, "microbatches": num_micro, "schedule": "1f1b"}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def search(work: Work, most_workers: int, refused_slices: Collection[int] = ()) -> list[Prediction]:
    """Return the best prediction of every strategy and number of workers, the fastest first; what fits comes first."""
    best: dict[tuple[object, ...], Prediction] = {}
    for candidate in candidates(work, most_workers, refused_slices):
        found = predict(candidate, work)
        key = (found.strategy, found.workers, found.settings.get("staleness"))
        if key not in best or _order(found) < _order(best[key]):
            best[key] = found
    return sorted(best.values(), key=_order)


def choose(predictions: Sequence[Prediction]) -> tuple[Prediction | None, Prediction | None]:
    """Return the best prediction that fits and trains as one worker does, and the next best.

    Of those that are equal, as far as can be predicted, the plainest counts as the best: fewer workers and parts, and
    less that can go wrong.
    """
    able = [prediction for prediction in predictions if is_candidate(prediction)]
    if not able:
        return None, None
    equal = [prediction for prediction in able if prediction.step_s <= able[0].step_s * (1 + CLOSE)]
    plainest_first = list(STRATEGIES)
    best = min(equal, key=lambda p: (plainest_first.index(p.strategy), p.workers, p.step_s))
    return best, next((prediction for prediction in able if prediction is not best), None)


def is_candidate(prediction: Prediction) -> bool:
    """Return whether it may be chosen: it fits, and all workers agree at every step, as one does with itself."""
    return prediction.fits and is_synchronous(prediction)


def is_synchronous(prediction: Prediction) -> bool:
    """Return whether all workers agree at every step."""
    settings = prediction.settings
    return bool(settings.get("staleness", 0) == 0 and settings.get("sync_every", 1) == 1)


def _order(prediction: Prediction) -> tuple[bool, float, float, float]:
    # Of equals the one that needs fewer workers, then less memory.
    return (not prediction.fits, round(prediction.step_s, 9), prediction.workers, prediction.memory_bytes)
