"""What members of a team make of the same outputs and targets must be the same."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from cordee.core.errors import TrainingError
from cordee.training.measuring import _agree


class OneOfThree:
    """A team as its first member sees it, whose others have the given values."""

    num_workers = 3
    numbers = (0, 2, 5)

    def __init__(self, *others: Sequence[float]) -> None:
        self._others = others

    def gather_rows(self, values: Sequence[int]) -> list[list[int]]:
        rows = [[struct.unpack("<q", struct.pack("<d", value))[0] for value in other] for other in self._others]
        return [list(values), *rows]


def agree(team: Any, **named: float) -> dict[str, float]:
    return _agree(named, team)


def test_the_first_members_values_are_everybodys() -> None:
    team = OneOfThree([0.5 + 1e-12, math.nan, math.inf], [0.5, math.nan, math.inf])
    agreed = agree(team, f1=0.5, rare=math.nan, ratio=math.inf)
    assert agreed["f1"] == 0.5 and math.isnan(agreed["rare"]) and agreed["ratio"] == math.inf


@pytest.mark.parametrize(
    ("odd", "said"), [(0.75, "0.75"), (math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5"), (0.0, "0")]
)
def test_a_metric_that_differs_between_workers_is_named(odd: float, said: str) -> None:
    team = OneOfThree([0.9, 0.5], [0.9, odd])
    with pytest.raises(TrainingError, match=rf"metric 'mine' is 0\.5 on worker 0 and {said} on worker 5, of the same"):
        agree(team, f1=0.9, mine=0.5)


def test_a_number_on_one_worker_only_is_named() -> None:
    with pytest.raises(TrainingError, match="metric 'mine' is nan on worker 0 and 1 on worker 2"):
        agree(OneOfThree([1.0], [math.nan]), mine=math.nan)
