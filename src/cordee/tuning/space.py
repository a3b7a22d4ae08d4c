"""What a search goes through: the keys of a job and the values that each may have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cordee.core.errors import JobError, nearest

KINDS = ("log", "lin", "int")
# Keys that change where a run is written or which processes train, not what is learnt.
_NOT_SEARCHED = ("name", "python_path", "cluster", "checkpoint", "monitoring", "callbacks")
_FORMS = (
    "write KEY=log:1e-4..1e-1 (by powers), KEY=lin:0..0.5 (evenly), KEY=int:16..256 (whole numbers, int:16..256/16 in "
    "steps) or KEY=a|b|c (one of these)"
)


class Range(msgspec.Struct, frozen=True, kw_only=True, tag="range"):
    """Numbers between two bounds, both of which are taken."""

    key: str
    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False
    step: int = 1  # of whole numbers

    @property
    def edges(self) -> list[Any]:
        """Values by which a job can be checked before the search."""
        return [int(self.low), int(self.high)] if self.is_whole else [self.low, self.high]


class Choice(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """One of some values, each as it is written behind `--set`: lists and numbers are stored alike."""

    key: str
    texts: tuple[str, ...]

    @property
    def edges(self) -> list[Any]:
        return list(self.texts)


Dimension = Range | Choice


def parse_search(texts: Sequence[str]) -> list[Dimension]:
    """Return what `--search` options say. Raises JobError that names the option and what is wrong with it."""
    if not texts:
        raise JobError(f"there is nothing to search: give --search at least once; {_FORMS}")
    found = [parse_dimension(text) for text in texts]
    keys = [dimension.key for dimension in found]
    for key in keys:
        if keys.count(key) > 1:
            raise JobError(f"--search {key} is given {keys.count(key)} times: one range, or one list of choices, a key")
    return found


def parse_dimension(text: str) -> Dimension:
    """Return one key and its values. Raises JobError."""
    key, equals, values = text.partition("=")
    key, values = key.strip(), values.strip()
    if not equals or not values or not all(key.split(".")):
        raise JobError(f"--search {text!r} has no key or no values: {_FORMS}")
    if key.split(".")[0] in _NOT_SEARCHED:
        raise JobError(f"--search {key}: this key does not change what is learnt; set it with --set")
    kind, colon, rest = values.partition(":")
    if colon and kind in KINDS:
        return _parse_range(key, kind, rest)
    if "|" in values:
        return _parse_choice(key, values)
    if ".." in values and colon:
        raise JobError(f"--search {key}={values}: there is no range {kind!r}{nearest(kind, KINDS)}; {_FORMS}")
    if ".." in values:
        raise JobError(f"--search {key}={values}: say how the range is gone through, log:, lin: or int:; {_FORMS}")
    raise JobError(f"--search {key}={values} is one value, and one value is no search: use --set {key}={values}")


def _parse_range(key: str, kind: str, text: str) -> Range:
    shown = f"--search {key}={kind}:{text}"
    bounds, slash, step_text = text.partition("/")
    low_text, dots, high_text = bounds.partition("..")
    if not dots:
        raise JobError(f"{shown} has no '..' between its bounds: {_FORMS}")
    low, high = _number(shown, low_text), _number(shown, high_text)
    if not low < high:
        raise JobError(f"{shown}: the lower bound {low_text.strip()} must be below the upper bound {high_text.strip()}")
    if kind == "log" and low <= 0:
        raise JobError(f"{shown}: powers go down to 0 and never reach it: the lower bound must be above 0, or use lin:")
    if slash and kind != "int":
        raise JobError(f"{shown}: only int: has steps ('/')")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise JobError(f"{shown}: int: takes whole numbers")
    step = _number(shown, step_text) if slash else 1.0
    if slash and not (step.is_integer() and 1 <= step <= high - low):
        raise JobError(f"{shown}: the step must be a whole number from 1 to {high - low:g}")
    return Range(key=key, low=low, high=high, is_log=kind == "log", is_whole=kind == "int", step=int(step))


def _parse_choice(key: str, text: str) -> Choice:
    texts = tuple(part.strip() for part in text.split("|"))
    if not all(texts):
        raise JobError(f"--search {key}={text}: a choice is empty; write '\"\"' for an empty text")
    if len(set(texts)) < len(texts):
        raise JobError(f"--search {key}={text}: a choice is there twice")
    if len(texts) < 2:
        raise JobError(f"--search {key}={text} is one value, and one value is no search: use --set")
    return Choice(key=key, texts=texts)


def _number(shown: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise JobError(f"{shown}: {text.strip()!r} is no number") from None
    if not math.isfinite(value):
        raise JobError(f"{shown}: {text.strip()!r} is not finite")
    return value


def corners(space: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Yield few points that have each edge of each dimension at least once, to check the job by."""
    edges = {each.key: each.edges for each in space}
    for place in range(max(map(len, edges.values()))):
        yield {key: values[place % len(values)] for key, values in edges.items()}


def place(point: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as `--set` takes them."""
    return [f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}" for key, value in point.items()]


def describe(space: Sequence[Dimension]) -> list[str]:
    """Return the dimensions as `--search` takes them."""
    return [f"{each.key}={_values(each)}" for each in space]


def _values(each: Dimension) -> str:
    if isinstance(each, Choice):
        return "|".join(each.texts)
    kind = "int" if each.is_whole else "log" if each.is_log else "lin"
    return f"{kind}:{each.low:g}..{each.high:g}" + (f"/{each.step}" if each.step > 1 else "")
