"""Pipelines on paper: where to cut a model, and how long a schedule takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("gpipe", "1f1b", "interleaved")
CHUNKS_PER_STAGE = 2  # of `interleaved`


def cut(weights: Sequence[Sequence[float]], num_stages: int) -> list[tuple[int, int]]:
    """Return the blocks of each stage, as (first, after the last), so that the longest stage is as short as can be.

    `weights[stage][block]` is how long a block takes on the device of a stage. Every stage gets a block; raises
    ValueError if there are too few.
    """
    num_blocks = len(weights[0])
    if num_blocks < num_stages:
        raise ValueError(f"{num_blocks} blocks cannot make {num_stages} stages")
    low, high = 0.0, max(sum(row) for row in weights)
    for _ in range(50):  # to 15 digits; each trial goes once over the blocks
        middle = (low + high) / 2
        if _fill(weights, num_stages, middle) is None:
            low = middle
        else:
            high = middle
    bounds = _fill(weights, num_stages, high * (1 + 1e-9))
    assert bounds is not None
    return bounds


def _fill(weights: Sequence[Sequence[float]], num_stages: int, limit: float) -> list[tuple[int, int]] | None:
    """Return stages of at most `limit` each, or None if that cannot be. Leaves a block for each stage to come."""
    num_blocks, bounds, start = len(weights[0]), [], 0
    for stage in range(num_stages):
        end, total = start, 0.0
        last = num_blocks - (num_stages - stage - 1)
        while end < last and (end == start or total + weights[stage][end] <= limit):
            total += weights[stage][end]
            end += 1
        if total > limit:
            return None
        bounds.append((start, end))
        start = end
    return bounds if start == num_blocks else None


def slots(forward: Sequence[float], backward: Sequence[float], send_s: float, num_micro: int, schedule: str) -> float:
    """Return the seconds from the first forward pass of a step to its last backward pass.

    The longest stage is busy for all micro-batches; before and after it the pipeline fills and drains. Interleaved
    stages have two chunks each, so that filling takes half the time at twice the messages.
    """
    num_stages = len(forward)
    busiest = max(f + b for f, b in zip(forward, backward, strict=True))
    whole = sum(forward) + sum(backward)
    if num_stages == 1:
        return num_micro * whole
    fill = whole - busiest  # the other stages' passes of the first and the last micro-batch
    hops = 2 * (num_stages - 1) * send_s
    if schedule in ("interleaved", "zero-bubble"):
        return num_micro * busiest + fill / CHUNKS_PER_STAGE + hops * CHUNKS_PER_STAGE
    # A message is on its way while its sender goes on; in 1f1b each micro-batch waits for one now and then.
    return num_micro * busiest + fill + hops + (num_micro * send_s if schedule == "1f1b" else 0.0)
