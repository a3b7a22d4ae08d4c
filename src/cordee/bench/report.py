"""What all benchmarks have in common: interleaving, the raw figures, the table."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from cordee.compute import usable_cores
from cordee.version import __version__


class Report(msgspec.Struct):
    """The outcome of a benchmark: where it ran, every raw figure, and the rows a person reads."""

    name: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    raw: dict[str, list[float]]  # contestant -> one figure per round, in the order measured
    unit: str
    rows: list[dict[str, Any]]


def describe_machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which JSON does not know
        "cordee": __version__,
    }


def interleave(
    contestants: Mapping[str, Callable[[], float]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Call every contestant once per round, starting each round with another, and return all figures.

    A first, uncounted call warms each of them up.
    """
    names = list(contestants)
    for name in names:
        contestants[name]()
    raw: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            raw[name].append(contestants[name]())
        say(f"round {index + 1} of {rounds} ({time.perf_counter() - started:.0f} s)")
    return raw


def medians(raw: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(figures) for name, figures in raw.items()}


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of our figure divided by theirs: drifts of the machine cancel out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
