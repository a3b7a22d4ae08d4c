"""Programs of one's own and of other frameworks, beside what their users have. Each part is a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cordee.bench import elastic_loops, horovod, transformer
from cordee.bench.harness import Report, describe_machine, measure_cases


def measure(
    *, rounds: int, say: Callable[[str], None], cases: Sequence[str] = (), earlier: Report | None = None
) -> Report:
    """Measure the cases that are named, or all; figures of other cases in `earlier` are kept."""
    parts = (elastic_loops, horovod, transformer)
    measures = {case: take for part in parts for case, take in part.measures(rounds, say).items()}
    raw, dates = measure_cases(measures, cases, earlier, say)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "elastic": {"batch_size_per_worker": elastic_loops.BATCH_SIZE, "steps": elastic_loops.NUM_STEPS, "workers": 2},
        "horovod": horovod.SETTINGS,
        "transformer": {"batch_size_per_worker": transformer.BATCH_SIZE, "steps": transformer.NUM_STEPS, "threads": 1},
        "measured": dates,
    }
    rows = [row for part in parts for row in part.rows(raw)]
    return Report("frameworks", describe_machine(), settings, raw, "as each row says", rows)
