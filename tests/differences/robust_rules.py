"""Robust rules by their definitions, in loops over updates."""

from __future__ import annotations

import torch
from torch import Tensor

from cordee.strategies.federated.settings import RobustSettings


class NobodyCountsError(Exception):
    """No update of a round counts."""


def robust_mean(settings: RobustSettings, rows: Tensor) -> Tensor:
    """Return what a robust rule makes of updates, by its definition."""
    num, wrong = len(rows), int(settings.wrong * len(rows))
    if settings.use == "median":
        return rows.quantile(0.5, dim=0)
    if settings.use == "trimmed_mean":
        kept = [column.sort().values[wrong : num - wrong].mean() for column in rows.T]
        return torch.stack(kept)
    if settings.use == "geometric_median":
        here = rows.mean(0)
        for _ in range(100):
            weights = [1 / max(float((row - here).norm()), 1e-12) for row in rows]
            here = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
        return here
    if num < 2 * wrong + 3:
        raise NobodyCountsError
    scores = []
    for row in rows:
        distances = sorted(float((row - other).square().sum()) for other in rows)[1:]
        scores.append(sum(distances[: num - wrong - 2]))
    order = sorted(range(num), key=lambda place: scores[place])
    chosen = order[:1] if settings.use == "krum" else order[: max(1, num - wrong)]
    return rows[sorted(chosen)].mean(0)
