"""Amounts as people write and read them: "80 GiB", "25 Gbit/s", "20us"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from cordee.core.errors import JobError

_SIZES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
_RATES = {"bit/s": 0.125, "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6, "tbit/s": 125e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)


def parse_size(value: str | float, key: str) -> float:
    return _parse(value, _SIZES, key)


def parse_rate(value: str | float, key: str) -> float:
    """Return bytes per second from "25 Gbit/s", "3 GB/s" or a bare number of bytes per second."""
    if isinstance(value, str) and re.search(r"[0-9.\s][kmgt]?b/s\s*$", value, re.IGNORECASE) and "b/s" in value:
        raise JobError(f"{key} = {value!r} may mean bits or bytes: write Gbit/s, Mbit/s ... or GB/s, MB/s ...")
    rates = {**_RATES, **{f"{unit}/s": size for unit, size in _SIZES.items()}}
    return _parse(value, rates, key)


def parse_latency(value: str | float, key: str) -> float:
    return _parse(value, _TIMES, key)


def _parse(value: str | float, units: Mapping[str, float], key: str) -> float:
    """Return a number with a unit, such as "25 Gbit/s", in base units. Bare numbers are in base units already."""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else _NUMBER.fullmatch(repr(value))
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in units):
        raise JobError(f"{key} = {value!r} is not an amount: write a number and one of {', '.join(units)}")
    try:
        amount = float(match[1]) * units.get(unit, 1.0)
    except ValueError:
        amount = 0.0
    if amount <= 0 and units is not _TIMES:
        raise JobError(f"{key} = {value!r} must be above 0")
    if not math.isfinite(amount):
        raise JobError(f"{key} = {value!r} is more than can be computed with: write a smaller number")
    return amount


def in_bytes(num_bytes: float) -> str:
    """Return "46 MB"."""
    return _in_units(num_bytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3}) or f"{num_bytes:.0f} B"


def in_time(seconds: float) -> str:
    """Return "38 ms"."""
    return _in_units(seconds, {"s": 1.0, "ms": 1e-3}) or f"{seconds * 1e6:.0f} µs"


def _in_units(value: float, units: Mapping[str, float]) -> str:
    """Return three digits and the largest unit that fits; nothing for less than one of the smallest."""
    for unit, size in units.items():
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:,.0f} {unit}"
    return ""
