"""What trials of strategies say about their overhead."""

from __future__ import annotations

import pytest

from cordee.core.errors import CordeeError
from cordee.planner.measurements import Amount
from cordee.planner.trials import fit, step_of

FIELDS = ("step_s", "part_s", "tensor_s", "byte_s")
AMOUNTS = (Amount(1, 18, 9e3), Amount(10, 18, 9e3), Amount(1, 66, 35e3), Amount(3, 8, 8e6))


def test_trials_that_differ_in_one_thing_each_tell_what_it_takes() -> None:
    seconds = [2e-3 + 1e-3 * a.parts + 5e-5 * a.tensors + 1e-9 * a.num_bytes for a in AMOUNTS]
    found = fit(FIELDS, AMOUNTS, seconds)
    assert found == pytest.approx({"step_s": 2e-3, "part_s": 1e-3, "tensor_s": 5e-5, "byte_s": 1e-9})


def test_nothing_takes_less_than_no_time() -> None:
    quicker_when_large = [4e-3, 13e-3, 6e-3, 1e-3]
    found = fit(FIELDS, AMOUNTS, quicker_when_large)
    assert "byte_s" not in found
    assert min(found.values()) > 0
    assert fit(("step_s",), AMOUNTS[:1], [-1e-3]) == {}


def test_of_one_trial_all_is_its_parts() -> None:
    assert fit(("part_s",), [Amount(9, 18, 9e3)], [18e-3]) == pytest.approx({"part_s": 2e-3})


def test_a_trial_that_was_out_of_time_says_what_it_can() -> None:
    assert step_of([1.0, 5.0, 10.0, 10.0, 20.0], 40) == 4.0  # without the windows that warm up
    assert step_of([5.0], 40) == 8.0
    with pytest.raises(CordeeError, match="no step in its time"):
        step_of([], 40)
