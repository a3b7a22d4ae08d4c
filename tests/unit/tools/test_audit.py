"""The checker finds what it says is not there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cordee.core.errors import RunDirectoryError
from cordee.tools.audit import audit, audit_run

STARTED = {"type": "run_started", "strategy": "data_parallel", "train_samples": 10, "batch_size": 4}


def commit(step: int, worker: int = 0, generation: int = 1, **changed: Any) -> dict[str, Any]:
    epoch, batch = divmod(step, 3)  # 10 samples are batches of 4, 4 and 2
    fields = {"step": step, "epoch": epoch, "batch": batch, "samples": epoch * 10 + min(batch * 4, 10)}
    digest = {part: f"{part} of {step}" for part in ("model", "optimizer", "progress")} | changed.pop("other", {})
    return {"type": "commit", "worker": worker, "generation": generation, "digest": digest, **fields, **changed}


def generation(number: int, step: int | None = None) -> dict[str, Any]:
    return {"type": "generation", "generation": number, "members": [0, 1], "step": step}


SOUND = [generation(1), STARTED, commit(0), commit(0, 1), commit(4), commit(4, 1), generation(2, 5), commit(5, 1, 2)]


def problems(events: list[dict[str, Any]]) -> dict[str, str]:
    return {finding.subject: finding.detail for finding in audit(events) if finding.state == "problem"}


def test_a_sound_run() -> None:
    assert problems(SOUND) == {}


@pytest.mark.parametrize(
    ("added", "subject", "message"),
    [
        ([commit(5, 0, 1)], "generations", "worker 0 committed step 5 in generation 1 while 2 was current"),
        ([generation(4, 5)], "generations", "generation 4 follows 2"),
        ([commit(3, 0, 2)], "steps", "step 3 was committed after step 5"),
        ([generation(3, 4)], "steps", "generation 3 continues from step 4 after step 5"),
        ([generation(3), commit(3, 0, 3)], "steps", "step 3 was committed after step 5"),
        ([commit(6, 0, 2, samples=24)], "samples", "24 samples were counted by step 6, there were 20"),
        ([{"type": "step", "step": 7, "samples": 20}], "samples", "20 samples were counted by step 7, there were 24"),
        (
            [{"type": "recovery", "generation": 2, "lost": [1], "steps_redone": 2, "seconds": 1.0}],
            "losses",
            "2 steps were redone after the loss of 1, though others were left",
        ),
        (
            [commit(6, 0, 2), commit(6, 1, 2, other={"model": "b", "progress": "c"})],
            "members",
            "at step 6 worker 1 differs in model, progress from worker 0",
        ),
        (
            [commit(6, 0, 2), generation(3, 6), commit(6, 0, 3, other={"optimizer": "empty", "progress": "evaluated"})],
            "members",
            "generation 3 continues from step 6 with another optimizer than generation 2 had",
        ),
    ],
)
def test_what_is_wrong_is_found(added: list[dict[str, Any]], subject: str, message: str) -> None:
    assert problems([*SOUND, *added]) == {subject: message}


def test_going_back_to_a_checkpoint_is_sound_where_nobody_is_left() -> None:
    saved = {"type": "checkpoint", "step": 4}
    back = {"type": "recovery", "generation": 3, "lost": [0, 1], "steps_redone": 2, "seconds": 1.0}
    assert problems([*SOUND, saved, generation(3), commit(4, 0, 3), commit(4, 1, 3), back]) == {}


def test_news_of_one_that_was_cut_off_may_come_late() -> None:
    assert problems([*SOUND, commit(7, 0, 2), commit(6, 1, 2), commit(7, 1, 2)]) == {}


def test_what_the_first_worker_says_may_come_after_what_others_say() -> None:
    """A coordinator that was killed hears the second worker's news before those of the first."""
    assert problems([generation(1), commit(0, 1), STARTED, commit(4, 1), commit(0), commit(4)]) == {}


def test_runs_with_parameter_servers_are_checked() -> None:
    started = {**STARTED, "strategy": "parameter_server", "servers": 1}
    steps = [{"type": "step", "step": n, "samples": commit(n)["samples"]} for n in (1, 2, 3)]
    served = {"worker": None, "generation": 0}
    assert problems([started, *steps, commit(3, **served)]) == {}
    assert problems([started, *steps, steps[-1]]) == {"work": "step 3 was reported after step 3"}
    assert problems([started, *steps, commit(3, **served), commit(2, **served)]) == {
        "steps": "step 2 was committed after step 3"
    }
    wrong = {"samples": "9 samples were counted by step 3, there were 10"}
    assert problems([started, *steps, commit(3, **{**served, "samples": 9})]) == wrong


def test_a_run_that_never_began() -> None:
    assert problems([]) == {"run": "it never began to train"}


def test_updates_that_a_server_took_with_it_are_told() -> None:
    started = {**STARTED, "strategy": "parameter_server", "servers": 1}
    lost = {"type": "updates_lost", "server": 1, "updates": 10, "step": 60, "from_step": 50}
    assert problems([started]) == {}
    assert problems([started, lost, lost]) == {
        "updates": "20 lost: the weights are not those of an undisturbed run. "
        "Server 1 continued from step 50 at step 60 (and 1 more)"
    }


def test_a_generation_may_commit_a_step_when_it_is_entered_and_when_it_is_saved() -> None:
    entered = [commit(6, 0, 2), commit(6, 1, 2)]
    saved = [commit(6, worker, 2, other={"progress": "evaluated"}) for worker in (1, 0)]
    assert problems([*SOUND, *entered, *saved]) == {}
    other = commit(6, 0, 2, other={"progress": "not evaluated"})
    assert problems([*SOUND, *entered, saved[0], other]) == {
        "members": "at step 6 worker 0 differs in progress from worker 1"
    }
    # A run that is resumed begins with generation 1 again.
    again = [generation(1), {**STARTED, "start_step": 4}, commit(4, 1, other={"progress": "closed"})]
    assert "members" not in problems([generation(1), STARTED, commit(4), {"type": "checkpoint", "step": 4}, *again])


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        {"type": "step", "x": "a"},
        {"type": "step", "step": 1, "samples": "4"},
        {"type": "commit", "step": -1, "worker": None},
        {**commit(5, 1, 2), "worker": [1]},
        {**commit(5, 1, 2), "digest": {"model": 3}},
        {**commit(5, 1, 2), "samples": 10**30},
        {name: value for name, value in commit(5, 1, 2).items() if name != "generation"},
        {"type": "generation", "generation": None},
        {"type": "run_started", "strategy": ["data_parallel"]},
        {"type": "checkpoint"},
        {"type": "recovery", "lost": [1]},
        {"type": "updates_lost", "server": 1},
        {"type": "run_ended", "steps": 3},
    ],
)
def test_events_that_are_damaged_are_told(damaged: dict[str, Any] | None) -> None:
    found = problems([*SOUND, damaged, damaged, commit(5, 1, 2)])  # type: ignore[list-item]
    assert list(found) == ["events"]
    assert found["events"].startswith("2 lines of events.jsonl cannot be read, the first is line 9 (")


@pytest.mark.parametrize(
    ("line", "state", "message"),
    [
        (b"\0" * 5000 + b"\n", "problem", "1 line of events.jsonl cannot be read, the first is line 9"),
        (b'{"type":"st\n', "problem", "1 line of events.jsonl cannot be read, the first is line 9"),
        (b"[" * 200_000 + b"]" * 200_000 + b"\n", "problem", "1 line of events.jsonl cannot be read"),
        (b'{"step":1}\n', "problem", "1 line of events.jsonl cannot be read"),
        (b'{"type":"st', "note", "the last line of events.jsonl is not finished"),
        (b'{"type":"warning"}', "ok", "all 9 can be read"),
    ],
)
def test_lines_that_cannot_be_read_are_told(tmp_path: Path, line: bytes, state: str, message: str) -> None:
    sound = b"".join(json.dumps(event).encode() + b"\n" for event in SOUND)
    (tmp_path / "events.jsonl").write_bytes(sound + line)
    first, *others = audit_run(tmp_path)
    assert (first.subject, first.state) == ("events", state)
    assert first.detail.startswith(message)
    assert {finding.state for finding in others} == {"ok"}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.mkdir()
    with pytest.raises(RunDirectoryError, match="not a regular file"):
        audit_run(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(RunDirectoryError, match="not a regular file"):
        audit_run(tmp_path)


@pytest.mark.parametrize("strategy", ["single", "data_parallel", "parameter_server"])
def test_a_run_that_ended_without_commits_is_not_sound(strategy: str) -> None:
    events = [{**STARTED, "strategy": strategy}, {"type": "step", "step": 1, "samples": 4}]
    assert {finding.state for finding in audit(events) if finding.subject == "commits"} == {"note"}
    found = problems([*events, {"type": "run_ended", "status": "completed", "steps": 3}])
    assert found == {"commits": "none is recorded, though the run ended after 3 steps: nothing is known of what it had"}


def test_commits_without_what_others_have_are_found() -> None:
    without = commit(6, 1, 2)
    del without["digest"]
    assert problems([*SOUND, without]) == {"members": "worker 1 committed step 6 without a digest"}
    partly = commit(6, 1, 2)
    del partly["digest"]["model"]
    message = "worker 1 committed step 6 without a digest of model, which others have"
    assert problems([*SOUND, partly]) == {"members": message}
    # Where workers have parts of the model it is compared only where it is saved.
    entered, saved = {"progress": "a"}, {"model": "b", "progress": "a"}
    sharded = [generation(1), {**STARTED, "strategy": "sharded"}]
    sharded += [commit(step, worker, digest=digest) for step, digest in ((0, entered), (4, saved)) for worker in (0, 1)]
    assert problems(sharded) == {}
    sharded[-1] = commit(4, 1, digest=entered)
    assert problems(sharded) == {"members": "at step 4 worker 1 differs in model from worker 0"}
    # A run may be resumed with another strategy.
    assert problems([*sharded[:-2], generation(1), STARTED, commit(0), commit(0, 1)]) == {}


def test_a_deeply_nested_line_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in SOUND]
    lines.insert(3, '{"type": "step", "step": ' + "[" * 200_000 + "]" * 200_000 + "}")
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    (problem,) = [finding for finding in audit_run(tmp_path) if finding.state == "problem"]
    assert problem.subject == "events" and "line 4" in problem.detail


# Work -------------------------------------------------------------------------------------------------------


def eventful(num_rounds: int) -> list[dict[str, Any]]:
    """Return the events of a run in which every other step loses a worker and its samples."""
    events: list[dict[str, Any]] = [{**STARTED, "strategy": "local_sgd"}]
    for step in range(1, num_rounds + 1):
        epoch, batch = divmod(step, 3)
        samples = epoch * 10 + min(batch * 4, 10)
        counted = {"samples": samples - step, "samples_lost": step}
        events += [
            generation(step, step - 1),
            {"type": "samples_lost", "step": step, "samples": 1, "worker": 1},
            *(commit(step, worker, step, **counted) for worker in (0, 1)),
            {"type": "step", "step": step, **counted},
            {"type": "checkpoint", "step": step},
            {"type": "worker_lost", "worker": 1},
            {"type": "recovery", "generation": step, "lost": [1], "steps_redone": 0, "seconds": 0.1},
        ]
    return events


def work_of_auditing(num_rounds: int, folder: Path) -> float:
    """Return how many lines of Python are executed for each line of the events."""
    events = eventful(num_rounds)
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        findings = audit_run(folder)
    finally:
        sys.settrace(before)
    assert [finding.detail for finding in findings if finding.state == "problem"] == []
    return executed / len(events)


def test_each_line_takes_as_much_work_in_a_long_file_as_in_a_short_one(tmp_path: Path) -> None:
    """Up to a logarithm: 16 times the lines would take 16 times the work for each if all were compared with all."""
    short, long = (work_of_auditing(size, tmp_path / f"{size}") for size in (40, 640))
    assert long < 1.5 * short
    assert long < 400, "200,000 lines are 80 million lines of Python at most"
