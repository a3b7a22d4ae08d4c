"""Lengths of time as people write them: "90s", "10m", "1h30m"."""

from __future__ import annotations

import re

from cordee.core.errors import JobError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str, key: str = "duration") -> float:
    """Return the seconds in `text`; `key` names the setting in the error."""
    compact = text.replace(" ", "").lower()
    parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise JobError(f"{key} = {text!r} is not a length of time: write for example '90s', '10m' or '1h30m'")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """Return a short reading of `seconds`: '0.8 s', '42 s', '3 m 05 s', '2 h 04 m'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
