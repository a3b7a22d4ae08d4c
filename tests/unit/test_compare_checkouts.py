"""The deciding parts of `benchmarks/compare_checkouts.py`: what counts as a difference between two revisions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from compare.cases import CASES
from compare.checkouts import CheckoutError, check_out_both
from compare.comparing import Difference, Outcome, describe_events, explain, facts, judge
from compare.processes import run_command
from compare.speed import Timed, find_recovery

SUMMARY = {"status": "completed", "steps": 40, "weights_sha256": "ab12", "test_loss": 0.5, "wall_seconds": 1.0}


def outcome(**changes: Any) -> Outcome:
    events = [{"type": "step", "time": 1.0, "step": 1, "loss": 2.0}, {"type": "run_ended", "time": 2.0, **SUMMARY}]
    base = Outcome(exit_codes=[0], summary=SUMMARY, events=events, files=["summary.json"])
    return dataclasses.replace(base, **changes)


def names_of(differences: list[Difference]) -> list[str]:
    return [difference.fact for difference in differences]


def test_times_and_what_events_say_are_not_compared() -> None:
    later = [{**event, "time": 9.0, "loss": 7.0} for event in outcome().events if event["type"] == "step"]
    other = outcome(
        summary={**SUMMARY, "wall_seconds": 3.0}, seconds=5.0, events=[*later, outcome().events[1]]
    )  # fmt: skip
    verdict = judge([outcome()], [other], "exact")
    assert verdict.is_same
    assert not verdict.varying


@pytest.mark.parametrize(
    "field, value", [("weights_sha256", "cd34"), ("test_loss", 0.25), ("steps", 41), ("status", "failed")]
)
def test_a_result_that_differs_is_found(field: str, value: Any) -> None:
    verdict = judge([outcome()], [outcome(summary={**SUMMARY, field: value})], "exact")
    assert verdict.differences == [Difference(fact=field, before=SUMMARY[field], after=value)]


def test_of_asynchronous_runs_only_counts_are_compared() -> None:
    other = outcome(summary={**SUMMARY, "weights_sha256": "cd34", "test_loss": 0.25}, files=["other"])
    assert judge([outcome()], [other], "counted").is_same
    assert names_of(judge([outcome()], [other], "exact", ignored=("test_loss",)).differences) == [
        "weights_sha256",
        "files of the run directory",
    ]
    fewer = outcome(summary={**SUMMARY, "steps": 39})
    assert names_of(judge([outcome()], [fewer], "counted").differences) == ["steps"]


def test_exit_codes_files_and_processes_left_behind_count() -> None:
    other = outcome(exit_codes=[1], files=["summary.json", "new"], left_behind=["python worker"])
    found = names_of(judge([outcome()], [other], "exact").differences)
    assert found == ["exit codes", "processes left behind", "files of the run directory"]


def test_events_are_compared_by_type_fields_and_number() -> None:
    step = outcome().events[0]
    more = outcome(events=[*outcome().events, step])
    assert names_of(judge([outcome()], [more], "exact").differences) == ["event step: number"]
    assert judge([outcome()], [more], "repeated").is_same  # how many is left to timing

    renamed = outcome(events=[{**step, "type": "progress"}, outcome().events[1]])
    found = names_of(judge([outcome()], [renamed], "repeated").differences)
    assert set(found) == {f"event {kind}: {what}" for kind in ("step", "progress") for what in ("fields", "number")}
    assert judge([outcome()], [renamed], "exact", ignored=("event step", "event progress")).is_same

    wider = outcome(events=[{**step, "lr": 0.1}, outcome().events[1]])
    (difference,) = judge([outcome()], [wider], "exact").differences
    assert explain(difference) == "event step: fields: only before [], only after ['lr']"


def test_events_of_a_busy_machine_are_compared_only_where_both_have_them() -> None:
    straggler = {"type": "straggler", "time": 1.0, "worker": 1}
    slow = outcome(events=[*outcome().events, straggler])
    assert judge([outcome()], [slow], "exact").is_same
    other = outcome(events=[*outcome().events, {**straggler, "rank": 1}])
    assert names_of(judge([slow], [other], "exact").differences) == ["event straggler: fields"]


def test_what_varies_in_before_itself_is_no_difference() -> None:
    other = outcome(summary={**SUMMARY, "weights_sha256": "cd34"})
    verdict = judge([outcome(), other], [other, other], "exact")
    assert verdict.is_same
    assert verdict.varying == ["weights_sha256"]


def test_weights_may_not_vary_in_after_alone_but_events_may() -> None:
    other = outcome(summary={**SUMMARY, "weights_sha256": "cd34"}, events=outcome().events[1:])
    verdict = judge([outcome(), outcome()], [other, outcome()], "exact")
    assert names_of(verdict.differences) == ["weights_sha256"]
    assert verdict.varying == ["event step: fields", "event step: number"]


def test_events_are_described_by_their_fields() -> None:
    events = [{"type": "a", "time": 1.0, "y": 0, "x": 0}, {"type": "a", "time": 1.0, "x": 0}, {"type": "a", "x": 1}]
    assert describe_events(events) == {"a": {"x, y": 1, "x": 2}}


def test_a_script_is_compared_by_what_it_prints() -> None:
    found = facts(Outcome(exit_codes=[0], printed={"sha256": "ab"}), "exact")
    assert found["printed sha256"] == "ab"
    assert "status" not in found


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_ratio_is_the_median_over_rounds() -> None:
    assert Timed(before=[1.0, 2.0, 4.0], after=[2.0, 2.0, 2.0]).ratio == 1.0
    assert Timed(before=[1.0], after=[]).ratio is None


def test_a_recovery_ends_with_the_longest_pause_after_the_kill() -> None:
    steps_s = [1.0, 1.1, 1.2, 1.3, 2.5, 2.6, 2.7, 2.8]
    assert find_recovery(steps_s, killed_s=1.25) == pytest.approx(1.25)
    assert find_recovery(steps_s[:6], killed_s=1.25) is None


def test_an_unknown_revision_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match="'no-such-revision' is neither a revision"):
        check_out_both("HEAD", "no-such-revision", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_command_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also a grandchild in a session of its own, whose parent has ended, is found and killed."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    ended = run_command(
        [sys.executable, "-S", "-c", script], environment=os.environ, folder=tmp_path, timeout_s=30.0, grace_s=0.05
    )  # fmt: skip
    assert ended.exit_code == 0
    assert ended.left_behind == ["sleep 60"]
    with contextlib.suppress(psutil.NoSuchProcess):  # it may be there until init has buried it
        assert psutil.Process(int(ended.stdout)).status() == psutil.STATUS_ZOMBIE
    assert not list(tmp_path.iterdir())
