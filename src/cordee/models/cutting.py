"""Where a chain of blocks is cut into stages: by time, or by hand. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase

from cordee.core.errors import JobError, nearest


def cut_by_time(times: Sequence[float], num_stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets, so that the slowest stage is as fast as it can be.

    Among the cuts that are equally good in this the most even one is taken. Every stage gets at least one block.
    """
    num_blocks = len(times)
    assert 1 <= num_stages <= num_blocks
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    # best[k][n]: the slowest stage, the sum of squares, and where the last of k stages over n blocks starts
    best = [[(float("inf"), float("inf"), 0)] * (num_blocks + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for k in range(1, num_stages + 1):
        for n in range(k, num_blocks - (num_stages - k) + 1):
            best[k][n] = min(
                (max(best[k - 1][m][0], sums[n] - sums[m]), best[k - 1][m][1] + (sums[n] - sums[m]) ** 2, m)
                for m in range(k - 1, n)
            )
    counts: list[int] = []
    end = num_blocks
    for k in range(num_stages, 0, -1):
        start = best[k][end][2]
        counts.append(end - start)
        end = start
    return counts[::-1]


def cut_by_hand(blocks: Sequence[Sequence[str]], placement: Sequence[Sequence[str]]) -> list[int]:
    """Return how many consecutive blocks each stage gets where its modules are named, by patterns like "layer[1-3]".

    `blocks` are the names of the modules of each. A name also stands for the modules inside it. Raises JobError for
    names that no module has, for modules that are in no stage or in two, for stages that are empty or not runs of
    consecutive blocks, and where a block would be cut apart.
    """
    names = [name for block in blocks for name in block]
    stage_of: dict[str, int] = {}
    unused = {pattern for patterns in placement for pattern in patterns}
    for name in names:
        found = [(k, p) for k, patterns in enumerate(placement) for p in patterns if _matches(name, p)]
        unused -= {pattern for _, pattern in found}
        stages = sorted({stage for stage, _ in found})
        if len(stages) != 1:
            where = f"in stages {', '.join(map(str, stages))}" if stages else "in no stage"
            raise JobError(
                f"strategy.placement puts block '{name}' {where}: it must be in one (blocks: {listed(names)})"
            )
        stage_of[name] = stages[0]
    if unused:
        pattern = sorted(unused)[0]
        raise JobError(f"strategy.placement names '{pattern}', which no block has{nearest(pattern, names)}")
    for stage in range(len(placement)):
        if stage not in stage_of.values():
            raise JobError(f"strategy.placement gives stage {stage} no blocks: name some, or remove it")
    for before, after in itertools.pairwise(names):
        if stage_of[after] not in (stage_of[before], stage_of[before] + 1):
            raise JobError(
                f"strategy.placement puts block '{after}' into stage {stage_of[after]} after one of stage "
                f"{stage_of[before]}: stages must be runs of consecutive blocks, in order (blocks: {listed(names)})"
            )
    for first, *others in blocks:
        for other in others:
            if stage_of[other] != stage_of[first]:
                raise JobError(
                    f"strategy.placement puts '{first}' and '{other}' into different stages, and they cannot be cut "
                    "apart, since one changes the other's output in place or takes slices of it: put them into one"
                )
    return [sum(stage_of[block[0]] == stage for block in blocks) for stage in range(len(placement))]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return the names as one text that is not too long."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
