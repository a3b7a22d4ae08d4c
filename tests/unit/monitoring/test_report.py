"""The result of a run and the list of runs, as a person sees them."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cordee.monitoring import RunInfo, Summary, render_result, render_runs

DONE = Summary(
    status="completed",
    steps=2345,
    epochs=5,
    wall_seconds=42.0,
    samples_per_second=12_345.0,
    train_loss=0.3,
    test_loss=0.31,
    test_accuracy=0.8912,
    test_top5_accuracy=0.998,
    weights_sha256="0123456789abcdef" * 4,
)


def printed(renderable, width: int = 80, *, soft_wrap: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(renderable, soft_wrap=soft_wrap)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_result_of_a_run():
    assert printed(render_result(DONE, "runs/x", ["cordee export runs/x"])) == [
        "completed: 5 epochs, all 2,345 steps done",
        "  test accuracy  89.12 %, top-5 99.80 %",
        "  test loss      0.3100",
        "  train loss     0.3000",
        "  time           42 s for 2,345 steps, 12.3k samples/s",
        "  weights        sha256 0123456789ab",
        "  files          runs/x",
        "next",
        "  cordee export runs/x",
    ]


def test_a_prediction_from_a_busy_machine_is_told_as_such():
    predicted = msgspec.structs.replace(DONE, predicted_step_seconds=0.004, step_seconds=0.002)
    assert "  prediction     4 ms a step, measured 2 ms (+100%)" in printed(render_result(predicted, "runs/x"))
    unsure = msgspec.structs.replace(predicted, prediction_is_sure=False)
    told = " ".join(" ".join(printed(render_result(unsure, "runs/x"))).split())
    assert "not usable: the machine was busy when it was profiled" in told and "%" not in told.split("prediction")[1]
    far = msgspec.structs.replace(predicted, predicted_step_seconds=26.45 * 0.002)
    told = " ".join(" ".join(printed(render_result(far, "runs/x"))).split())
    assert "52.9 ms a step, measured 2 ms: too far apart to be compared" in told and "+2" not in told


def test_how_late_gradients_were():
    def told(ages: dict[str, int]) -> list[str]:
        lines = printed(render_result(msgspec.structs.replace(DONE, staleness=ages), "runs/x"))
        return [line for line in lines if "staleness" in line]

    assert told({"0": 2, "1": 1, "3": 1}) == ["  staleness      gradients came 1.0 updates late on average, at most 3"]
    assert told({"0": 4}) == []


@pytest.mark.parametrize(
    ("summary", "first"),
    [
        (Summary(status="stopped", stopped_by="accuracy"), "stopped: the test accuracy of stop.accuracy was reached"),
        (Summary(status="stopped", stopped_by="the moon"), "stopped: the moon"),
        (Summary(status="interrupted", steps=1), "interrupted after 1 step"),
        (Summary(status="failed", error="loss is nan at step 3"), "failed: loss is nan at step 3"),
        (Summary(status="completed", steps=10), "completed: all 10 steps done"),
    ],
)
def test_the_first_line_says_how_and_why_it_ended(summary, first):
    assert printed(render_result(summary, "runs/x"))[0] == first


def test_paths_are_whole_when_printed_with_soft_wrap_and_complete_without():
    path = "/a/very/long" + "/path" * 30
    assert f"  files          {path}" in printed(render_result(DONE, path), soft_wrap=True)
    assert path in "".join(line.strip() for line in printed(render_result(DONE, path), 40))


def test_brackets_in_names_are_text_and_not_markup():
    assert "  files          runs/[bold]x" in printed(render_result(DONE, "runs/[bold]x"))
    assert printed(render_runs([RunInfo(path=Path("[red]x"), state="died", name="x")]))[1].startswith("[red]x")


RUNS = [
    RunInfo(
        path=Path("runs/lenet-fashion-20260101-120000"),
        state="running",
        name="lenet-fashion",
        strategy="single",
        workers=1,
        started=1.8e9,
        wall_seconds=61.0,
        steps=1234,
        test_accuracy=0.8431,
    ),
    RunInfo(path=Path("runs/iris-2"), state="interrupted", name="iris", strategy="data_parallel", workers=4, steps=10),
    RunInfo(path=Path("runs/broken"), state="unreadable", name="broken", problem="job.toml: no such file"),
]


def test_the_table_of_runs_at_80_columns():
    lines = printed(render_runs(RUNS))
    assert lines[0].split() == ["run", "state", "strategy", "accuracy", "time"]
    assert lines[1].startswith("lenet-fashion-20260101-120000  running      single")
    assert lines[1].endswith("84.31 %  1 m 01 s")
    assert lines[2].split() == ["iris-2", "interrupted", "data_parallel", "x4"]
    assert lines[3].split() == ["broken", "unreadable"]
    assert "cordee resume RUN" in lines[4]
    assert lines[5] == "broken: job.toml: no such file"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_keeps_names_states_and_accuracies_at_any_width(width):
    lines = printed(render_runs(RUNS), width)
    assert all(len(line) <= width for line in lines)
    assert "84.31 %" in "".join(lines)
    assert "interrupted" in "".join(lines)
    assert ("started" in lines[0]) == (width == 120)


def test_no_runs_say_how_to_make_one():
    assert printed(render_runs([])) == ["no runs yet: cordee train JOB.toml makes one"]
