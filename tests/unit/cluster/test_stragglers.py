"""Who is named as slow, and when."""

from __future__ import annotations

from cordee.cluster.policies import Stragglers


def named(*rounds: dict[str, float]) -> list[tuple[int, str]]:
    """Return (step, worker) of each naming when the workers report these times, step after step."""
    stragglers = Stragglers()
    found = []
    for step, times in enumerate(rounds, 1):
        for worker, seconds in times.items():
            if (slow := stragglers.record(worker, step, seconds)) is not None:
                found.append((slow.step, slow.worker))
    return found


def test_one_of_several_is_named_in_its_third_slow_step_and_once() -> None:
    times = {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.55}
    assert named(*[times] * 10) == [(3, "d")]


def test_a_member_is_named_as_everywhere() -> None:
    stragglers = Stragglers()
    slow = [
        stragglers.record(name, step, s) for step in (1, 2, 3) for name, s in (("worker-0", 0.1), ("worker-1", 1.0))
    ]
    (found,) = [each.describe() for each in slow if each is not None]
    assert found == "worker 1 is slow: step 3 took it 1 s, 10.0 times the median of the others"


def test_one_of_two_is_compared_with_the_other() -> None:
    assert named(*[{"a": 0.1, "b": 0.5}] * 4) == [(3, "b")]
    assert named(*[{"a": 0.1, "b": 0.4}] * 9) == []


def test_several_slow_ones_do_not_hide_each_other() -> None:
    assert named(*[{"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.9, "e": 0.8}] * 4) == [(3, "d"), (3, "e")]


def test_a_slow_step_now_and_then_is_an_accident() -> None:
    slow, usual = {"a": 0.1, "b": 2.0}, {"a": 0.1, "b": 0.1}
    assert named(slow, slow, usual, slow, slow, usual) == []
    assert named(slow, slow, slow, usual, slow, slow, slow) == [(3, "b"), (7, "b")]


def test_what_lasts_a_moment_is_no_reason() -> None:
    assert named(*[{"a": 0.001, "b": 0.015}] * 9) == []
    assert named(*[{"a": 0.0, "b": 0.5}] * 3) == [(3, "b")]  # the others had nothing to compute


def test_those_who_are_gone_do_not_count() -> None:
    stragglers = Stragglers()
    for step in range(5):
        assert stragglers.record("a", step, 0.1) is None
    stragglers.forget("a")
    assert [stragglers.record("b", step, 9.0) for step in range(5)] == [None] * 5
    stragglers.forget()
    assert stragglers.record("a", 9, 0.1) is None
