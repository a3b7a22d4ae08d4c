"""Benchmarks that are measured in parts: which cases are wanted, and how the parts become one report."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordee.bench import engines, registry
from cordee.bench.harness import Report, describe_machine, is_wanted, measure_cases
from cordee.core.errors import JobError


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], {"speed/ray", "speed/spark", "loss/ray"}),
        (["speed"], {"speed/ray", "speed/spark"}),
        (["*/ray"], {"speed/ray", "loss/ray"}),
        (["loss/ray", "speed/spark"], {"loss/ray", "speed/spark"}),
        (["spee"], set()),
    ],
)
def test_a_pattern_names_cases_or_their_first_parts(patterns: list[str], expected: set[str]) -> None:
    assert {name for name in ("speed/ray", "speed/spark", "loss/ray") if is_wanted(name, patterns)} == expected


def test_what_is_measured_again_replaces_its_own_figures_only() -> None:
    def figures(value: float) -> Callable[[], dict[str, list[float]]]:
        return lambda: {"ours": [value]}

    raw, dates = measure_cases({"a": figures(1.0), "b": figures(2.0)}, [], None, silent)
    assert raw == {"a: ours": [1.0], "b: ours": [2.0]} and set(dates) == {"a", "b"}
    earlier = Report("x", {}, {"measured": {"a": "then", "b": "then"}}, raw, "s", [])
    raw, dates = measure_cases({"a": figures(3.0), "b": figures(4.0)}, ["b"], earlier, silent)
    assert raw == {"a: ours": [1.0], "b: ours": [4.0]}
    assert dates["a"] == "then" and dates["b"] != "then"


def test_a_case_that_is_none_is_refused() -> None:
    with pytest.raises(JobError, match=r"--cases 'rya' names no case: there are ray"):
        measure_cases({"ray": dict}, ["rya"], None, silent)


def test_the_output_file_is_added_to_only_with_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Report | None] = []

    def measure(*, rounds: int, say: Any, cases: list[str], earlier: Report | None = None) -> Report:
        seen.append(earlier)
        return Report("engines", describe_machine(), {}, {"speed/env: ours": [1.0]}, "s", [{"case": "speed/env"}])

    monkeypatch.setattr(engines, "measure", measure)
    path = tmp_path / "engines.json"
    for cases in ([], ["speed"], []):
        registry.run_benchmark("engines", rounds=1, output=path, cases=cases)
    assert [earlier is None for earlier in seen] == [True, False, True]
    assert seen[1] is not None and seen[1].raw == {"speed/env: ours": [1.0]}
    path.write_text("{}")
    with pytest.raises(JobError, match="cannot add to"):
        registry.run_benchmark("engines", rounds=1, output=path, cases=["speed"])


def test_rows_say_which_goals_were_missed() -> None:
    raw = {
        "loss/ray: ray, next step s": [1.0, -1.0],
        "loss/ray: ray, steps redone": [0.0, -1.0],
        "loss/ray: ray, replacement s": [4.0, -1.0],
        "loss/ray: ray train, next step s": [-1.0, -1.0],
        "loss/ray: ray train, steps redone": [-1.0, -1.0],
    }
    ours, peer = engines._loss_rows("ray", raw)
    assert ours["goals"] == "next step MISSED, redone MISSED, replaced MISSED", "once it did not continue"
    assert (ours["loss_to_next_step_s"], ours["never_continued"]) == (1.0, 1)
    assert (peer["loss_to_next_step_s"], peer["never_continued"], peer["goals"]) == (None, 2, "")


def test_a_benchmark_that_is_terminated_clears_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []

    def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the signal was ignored")
        finally:
            cleared.append(rounds)

    monkeypatch.setattr("cordee.bench.overhead.measure", measure)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        registry.run_benchmark("overhead", rounds=1, output=None)
    assert cleared == [1] and ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
