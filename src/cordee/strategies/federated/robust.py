"""Aggregations that some wrong updates cannot move far. Pure; every update weighs the same.

An aggregation reads all updates of a round, some columns at a time: its memory is that of a few columns of all updates,
and not of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cordee.core.errors import TrainingError
from cordee.strategies.federated.settings import RobustSettings

# Returns the columns [start, stop) of all updates, one row for each.
ReadColumns = Callable[[int, int], Tensor]
_CHUNK_NUMBERS = 1 << 22  # that are in memory at once
_ITERATIONS = 100  # of the geometric median, at most
_ROUNDING = 1e-9  # 0.29 · 100 is 28.999999999999996
_PRECISION = 1e-10  # relative change of the geometric median at which it ends


def aggregate(settings: RobustSettings, read: ReadColumns, num_updates: int, length: int) -> Tensor:
    """Return what the rule makes of the updates, in double precision. Raises TrainingError for too few updates."""
    if num_updates < 1:
        raise TrainingError("no client took part: there is nothing to aggregate")
    num_wrong = math.floor(settings.wrong * num_updates + _ROUNDING)
    columns = list(_chunks(num_updates, length))
    match settings.use:
        case "median":
            return torch.cat([_median(_read(read, *chunk)) for chunk in columns])
        case "trimmed_mean":
            return torch.cat([_trimmed(_read(read, *chunk), num_wrong) for chunk in columns])
        case "geometric_median":
            return _geometric_median(read, columns, num_updates)
        case "krum":
            return _mean_of(read, columns, _krum_order(read, columns, num_updates, num_wrong)[:1])
        case "multi_krum":
            kept = max(1, num_updates - num_wrong)
            return _mean_of(read, columns, _krum_order(read, columns, num_updates, num_wrong)[:kept])


def _chunks(num_updates: int, length: int) -> Iterator[tuple[int, int]]:
    width = max(1, _CHUNK_NUMBERS // num_updates)
    for start in range(0, length, width):
        yield start, min(start + width, length)


def _read(read: ReadColumns, start: int, stop: int) -> Tensor:
    return read(start, stop).to(torch.float64)


def _median(rows: Tensor) -> Tensor:
    ordered = rows.sort(dim=0).values
    middle = len(rows) // 2
    return ordered[middle] if len(rows) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _trimmed(rows: Tensor, num_wrong: int) -> Tensor:
    ordered = rows.sort(dim=0).values
    return ordered[num_wrong : len(rows) - num_wrong].mean(dim=0)


def _mean_of(read: ReadColumns, columns: list[tuple[int, int]], chosen: Tensor) -> Tensor:
    places = chosen.sort().values  # in the order of the round, so that the sum has the same bits
    return torch.cat([_read(read, *chunk)[places].mean(dim=0) for chunk in columns])


def _krum_order(read: ReadColumns, columns: list[tuple[int, int]], num_updates: int, num_wrong: int) -> Tensor:
    """Return the updates, those first whose nearest others are nearest (Blanchard et al. 2017)."""
    if num_updates < 2 * num_wrong + 3:
        raise TrainingError(
            f"Krum needs at least 2 · f + 3 updates for f wrong ones, and a round has {num_updates} with f = "
            f"{num_wrong}: ask more clients (strategy.clients_per_round), or set a smaller strategy.robust.wrong"
        )
    distances = torch.zeros(num_updates, num_updates, dtype=torch.float64)
    for chunk in columns:
        rows = _read(read, *chunk)
        for place in range(num_updates):  # not by products: differences of close vectors would be rounded away
            distances[place] += (rows - rows[place]).square_().sum(dim=1)
    nearest = distances.sort(dim=1).values[:, 1 : num_updates - num_wrong - 1]
    return nearest.sum(dim=1).argsort(stable=True)


def _geometric_median(read: ReadColumns, columns: list[tuple[int, int]], num_updates: int) -> Tensor:
    """Return the point whose distances to the updates have the smallest sum (Weiszfeld's iteration)."""
    here = torch.cat([_read(read, *chunk).mean(dim=0) for chunk in columns])
    for _ in range(_ITERATIONS):
        squares = torch.zeros(num_updates, dtype=torch.float64)
        for start, stop in columns:
            squares += (_read(read, start, stop) - here[start:stop]).square_().sum(dim=1)
        weights = 1 / squares.sqrt().clamp_min(1e-12)
        weights /= weights.sum()
        there = torch.cat([weights @ _read(read, *chunk) for chunk in columns])
        moved = float(torch.linalg.vector_norm(there - here))
        here = there
        if moved <= _PRECISION * max(float(torch.linalg.vector_norm(here)), 1e-30):
            break
    return here
