"""One run in a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import JsonlSink, Monitor, RunDirectory, Summary, events
from cordee.monitoring.overview import describe_overview, next_commands, read_overview


def test_what_events_say_of_a_run_under_way(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", 'name = "iris"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(
                events.RunStarted(strategy="x", workers=2, start_step=0, total_steps=200, epochs=4, model="mlp")
            )
            monitor.emit(events.WorkerLost(worker=1, step=40, reason="was killed by SIGKILL"))
            monitor.emit(events.Checkpoint(step=41, path="p", seconds=0.1, stall_s=0.0))
            monitor.emit(events.Evaluation(step=50, test_loss=0.5, test_accuracy=0.75))
            monitor.emit(events.Warned(message="slow"))
            monitor.emit(events.Step(step=50, epoch=1, loss=0.25, samples_per_second=1234.0))
        with run.events_file.open("a") as file:
            file.write("{damaged\n")
        overview = read_overview(run.path)
        rows = dict(describe_overview(overview))
    assert rows == {
        "run": "run",
        "state": "running",
        "job": "iris, mlp",
        "strategy": "x, 2 workers",
        "steps": "50 of 200 (25 %), epoch 1 of 4",
        "loss": "0.2500",
        "test": "75.00 %, loss 0.5000",
        "speed": "1.23k samples/s",
        "time": "0:00",
        "checkpoints": "1, the last after step 41",
        "lost": "1 killed by SIGKILL",
        "warnings": "1, the last: slow",
        "unreadable": "1 line",
        "files": str(run.path),
    }
    assert next_commands(overview.run) == ["cordee logs run -f", "cordee stop run"]
    assert next_commands(read_overview(run.path).run) == ["cordee resume run", "cordee logs run"]  # it died


def test_the_speed_of_an_ended_run_is_that_of_its_summary(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", 'name = "iris"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(events.RunStarted(strategy="x", workers=1, start_step=0))
            monitor.emit(events.Step(step=9, epoch=1, loss=0.25, samples_per_second=10.0))
        run.write_summary(Summary(status="completed", samples_per_second=4000.0))
    assert dict(describe_overview(read_overview(run.path)))["speed"] == "4.00k samples/s"


def test_rounds_of_clients_are_the_steps_of_a_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", 'name = "iris"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(events.RunStarted(strategy="federated", workers=2, start_step=0, total_steps=20))
            monitor.emit(events.Round(round=3, num_asked=5, num_took_part=5, loss=0.5))
        rows = dict(describe_overview(read_overview(run.path)))
    assert rows["steps"] == "3 of 20 (15 %)"
    assert rows["loss"] == "0.5000"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"it has no job\.toml"):
        read_overview(tmp_path)
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        read_overview(tmp_path / "nothing")


def test_a_run_of_a_newer_version_says_so(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", 'name = "iris"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(events.RunStarted(strategy="x", workers=1, start_step=0, schema_version=99))
        rows = dict(describe_overview(read_overview(run.path)))
    assert rows["newer"].startswith("made by a newer version of Cordée (events of version 99, this one knows")


def test_a_damaged_job_file_is_named(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "name = = 1\n") as run:
        assert dict(describe_overview(read_overview(run.path)))["state"].startswith("unreadable: job.toml: ")
