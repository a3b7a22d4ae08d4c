"""The factors of the learning rate, exactly, at the steps where they matter."""

from __future__ import annotations

import math

import pytest

from cordee.compute import make_schedule
from cordee.core import Use
from cordee.core.errors import JobError


def factors(part: Use, steps: list[int], total_steps: int | None = 10) -> list[float]:
    schedule = make_schedule(part, total_steps)
    return [schedule(step) for step in steps]


def test_constant() -> None:
    assert factors(Use("constant"), [0, 5, 10**6], None) == [1.0, 1.0, 1.0]


def test_constant_after_a_warm_up() -> None:
    assert factors(Use("constant", warmup_steps=4), [0, 1, 2, 3, 4, 5]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine() -> None:
    found = factors(Use("cosine"), [0, 5, 9, 10, 11])
    assert found == pytest.approx([1.0, 0.5, 0.5 * (1 + math.cos(0.9 * math.pi)), 0.0, 0.0], abs=1e-15)


def test_cosine_after_a_warm_up_to_a_final_value() -> None:
    found = factors(Use("cosine", warmup_steps=2, final=0.2), [0, 1, 2, 6, 10])
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2], abs=1e-15)


def test_linear() -> None:
    assert factors(Use("linear", warmup_steps=2, final=0.5), [0, 1, 2, 6, 10, 12]) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]


def test_step() -> None:
    found = factors(Use("step", every_steps=3, factor=0.5), [0, 2, 3, 5, 6, 9], None)
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


def test_a_warm_up_climbs_to_where_the_schedule_is_by_then() -> None:
    # At step 4 the rate has already been halved once: the warm-up leads there, without a jump.
    assert factors(Use("step", every_steps=3, factor=0.5, warmup_steps=4), [0, 3, 4, 6], None) == [
        0.125,
        0.5,
        0.5,
        0.25,
    ]


def test_a_warm_up_longer_than_the_run() -> None:
    assert factors(Use("cosine", warmup_steps=20), [0, 9], 10) == [0.05, 0.5]


def test_the_number_of_steps_can_be_set() -> None:
    assert factors(Use("linear", total_steps=4), [2], total_steps=100) == [0.5]
    assert factors(Use("linear", total_steps=4), [2], total_steps=None) == [0.5]


def halving(period: int, total_steps: int | None = None):  # type: ignore[no-untyped-def]
    return lambda step: (0.5 ** (step // period), total_steps)


def test_a_schedule_of_the_users_may_ask_for_the_number_of_steps() -> None:
    assert make_schedule(Use(halving, period=2), 10)(4) == (0.25, 10)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Use("cosin"), r"schedule.use = 'cosin' is not known; did you mean 'cosine'\?"),
        (Use("cosine"), "'cosine' must know the number of steps.* set training.steps or schedule.total_steps"),
        (Use("linear"), "'linear' must know the number of steps"),
        (Use("constant", warmup_steps=-1), "schedule.warmup_steps = -1 must be at least 0"),
        (Use("step"), "schedule needs 'every_steps': set schedule.every_steps"),
        (Use("step", every_steps=0), "schedule.every_steps = 0 must be at least 1"),
        (Use("step", every_steps=2.5), "schedule.every_steps = 2.5 does not fit"),
        (Use("constant", final=0.1), r"schedule has no setting 'final' \(it takes: warmup_steps\)"),
        (Use("math:sqrt"), "schedule needs 'x'"),
        (Use("builtins:int"), "'builtins:int' gives a int; it must give a function of the step"),
        (Use(lambda: 1 / 0), "raised ZeroDivisionError: division by zero .at .*test_schedules.py"),
    ],
)
def test_schedules_that_cannot_be_made(part: Use, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_schedule(part, None)
