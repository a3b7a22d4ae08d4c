"""The list of runs: every state, and folders in any condition."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import JsonlSink, Monitor, RunDirectory, Summary, events, find_run, list_runs
from cordee.monitoring.run_list import Trace, resolve_state

JOB = 'name = "iris"\n[strategy]\nname = "auto"\nworkers = 2\n'


def make_run(folder: Path, name: str, summary: Summary | None = None, *, is_started: bool = True) -> RunDirectory:
    run = RunDirectory.create(folder / name, JOB)
    with Monitor([JsonlSink(run.events_file)]) as monitor:
        if is_started:
            monitor.emit(events.RunStarted(strategy="single", workers=1, start_step=0))
            monitor.emit(events.Evaluation(step=10, test_accuracy=0.75))
            monitor.emit(events.Step(step=20))
    if summary is not None:
        run.write_summary(summary)
    return run


@pytest.mark.parametrize("status", ["completed", "stopped", "interrupted", "failed"])
def test_a_run_that_ended_is_listed_as_its_summary_says(tmp_path, status):
    summary = Summary(
        status=status,
        name="iris",
        strategy="data_parallel",
        workers=4,
        steps=120,
        wall_seconds=3.5,
        test_accuracy=0.97,
        started=1000.0,
        ended=9e9,
    )
    make_run(tmp_path, "a", summary).release()
    (run,) = list_runs(tmp_path)
    assert (run.state, run.strategy, run.workers, run.steps) == (status, "data_parallel", 4, 120)
    assert (run.name, run.started, run.wall_seconds, run.test_accuracy) == ("iris", 1000.0, 3.5, 0.97)
    assert run.path == tmp_path / "a"


def test_a_run_going_on_is_described_by_its_events(tmp_path):
    with make_run(tmp_path, "a", Summary(status="completed", ended=1.0)):
        (run,) = list_runs(tmp_path)
    assert (run.state, run.strategy, run.workers, run.steps, run.test_accuracy) == ("running", "single", 1, 20, 0.75)
    assert run.started is not None
    assert run.wall_seconds is not None
    assert run.wall_seconds >= 0


def test_a_killed_run_is_listed_as_died(tmp_path):
    make_run(tmp_path, "a").release()
    make_run(tmp_path, "b", is_started=False).release()
    assert {run.path.name: (run.state, run.steps) for run in list_runs(tmp_path)} == {
        "a": ("died", 20),
        "b": ("died", None),
    }


def test_a_run_that_ended_was_resumed_and_killed_has_died(tmp_path):
    make_run(tmp_path, "a", Summary(status="completed", steps=5, ended=1.0)).release()
    (run,) = list_runs(tmp_path)
    assert (run.state, run.steps) == ("died", 20)


def test_states_follow_from_lock_summary_and_last_event():
    done = Summary(status="completed", ended=100.0)
    assert resolve_state(True, done, Trace()) == "running"
    assert resolve_state(False, done, Trace(type="run_ended", time=101.0)) == "completed"
    assert resolve_state(False, done, Trace(type="checkpoint", time=99.0)) == "completed"
    assert resolve_state(False, done, Trace(type="step", time=101.0)) == "died"
    assert resolve_state(False, done, Trace()) == "completed"
    assert resolve_state(False, None, Trace(type="run_ended", status="failed")) == "failed"
    assert resolve_state(False, None, Trace(type="step")) == "died"
    assert resolve_state(False, Summary(status="stopped"), Trace(type="step", time=5.0)) == "stopped"


def test_damaged_folders_are_listed_and_never_a_crash(tmp_path):
    make_run(tmp_path, "whole", Summary(status="completed", started=9e9, ended=9e9)).release()
    damages = {
        "no-job": ("job.toml", None),
        "bad-job": ("job.toml", b"name = [[["),
        "odd-job": ("job.toml", b'strategy = "single"'),
        "bad-bytes": ("job.toml", b"\xff\xfe"),
        "bad-summary": ("summary.json", b'{"status": "compl'),
        "odd-summary": ("summary.json", b'{"status": "sleeping"}'),
        "list-summary": ("summary.json", b"[]"),
        "odd-events": ("events.jsonl", b'{"type":"run_started","time":"noon"}\n{"type":"step","time":3}\n'),
        "odd-end": ("events.jsonl", b'{"type":"run_ended","status":17}\n'),
        "folder-events": ("events.jsonl", None),
    }
    for name, (file, content) in damages.items():
        make_run(tmp_path, name).release()
        (tmp_path / name / file).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name / file).write_bytes(content)
    (tmp_path / "folder-events" / "events.jsonl").mkdir()
    runs = {run.path.name: run for run in list_runs(tmp_path)}
    assert runs.pop("whole").state == "completed"
    assert set(runs) == set(damages)
    assert {run.state for run in runs.values()} == {"unreadable"}
    assert all(run.problem for run in runs.values())


@pytest.mark.parametrize("content", [b"", b"\0\0\0\n\0", b'"text"\n', b"{}\n", b"not json\n" * 5])
def test_events_without_sense_leave_a_run_that_died(tmp_path, content):
    make_run(tmp_path, "a", is_started=False).release()
    (tmp_path / "a" / "events.jsonl").write_bytes(content)
    (run,) = list_runs(tmp_path)
    assert run.state == "died"
    assert (run.strategy, run.workers) == ("auto", 2)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["job.toml", "summary.json", "events.jsonl"])
def test_pipes_and_devices_are_not_read_for_ever(tmp_path, name):
    for run, replace in (("pipe", os.mkfifo), ("device", lambda path: path.symlink_to("/dev/zero"))):
        make_run(tmp_path, run, Summary(status="completed", ended=1.0)).release()
        (tmp_path / run / name).unlink()
        replace(tmp_path / run / name)
    assert {info.state for info in list_runs(tmp_path)} == {"unreadable"}
    problems = {info.path.name: info.problem or "" for info in list_runs(tmp_path)}
    assert f"{name} is not a regular file" in problems["pipe"]
    assert f"{name} is a link, which is not followed" in problems["device"]


def test_other_files_and_folders_are_no_runs(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "nowhere") == []
    with pytest.raises(RunDirectoryError, match="cannot list the runs"):
        list_runs(tmp_path / "notes.txt")


def test_the_newest_run_comes_first(tmp_path):
    for name, started in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        make_run(tmp_path, name, Summary(status="completed", started=started, ended=9e9)).release()
    assert [run.path.name for run in list_runs(tmp_path)] == ["c", "b", "a"]


def test_the_start_is_found_in_a_long_file_of_events(tmp_path):
    make_run(tmp_path, "a").release()
    events = tmp_path / "a" / "events.jsonl"
    before = [{"time": 1.0, "type": kind} for kind in ("warning", "coordinator_started", "worker_started")]
    events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in before) + events.read_bytes())
    line = msgspec.json.encode({"time": 9e9, "type": "step", "step": 7, "text": "x" * 1000}) + b"\n"
    with events.open("ab") as file:
        file.write(line * 2000)
    (run,) = list_runs(tmp_path)
    assert (run.strategy, run.steps) == ("single", 7)


def test_listing_does_not_disturb_a_run_that_starts(tmp_path):
    make_run(tmp_path, "a").release()
    is_done = threading.Event()

    def list_all_the_time() -> None:
        while not is_done.is_set():
            list_runs(tmp_path)

    lister = threading.Thread(target=list_all_the_time)
    lister.start()
    try:
        for _ in range(20):
            RunDirectory.open_existing(tmp_path / "a").release()
    finally:
        is_done.set()
        lister.join()


# Which run is meant -----------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_path_its_name_the_beginning_of_it_and_as_the_latest(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    for name in ("lenet-1", "lenet-10", "mlp-3"):
        make_run(runs, name).release()
    monkeypatch.chdir(tmp_path)
    assert find_run("runs/lenet-1", runs) == Path("runs/lenet-1")
    assert find_run("lenet-1", runs) == runs / "lenet-1"  # a whole name is not the beginning of another
    assert find_run("mlp", runs) == runs / "mlp-3"
    assert find_run("latest", runs) == runs / "mlp-3"
    with pytest.raises(RunDirectoryError, match="'len' is the beginning of lenet-10, lenet-1: write more"):
        find_run("len", runs)
    with pytest.raises(RunDirectoryError, match=r"no run of this name in .*; did you mean 'mlp-3'"):
        find_run("mlp-4", runs)
    with pytest.raises(RunDirectoryError, match="there are no runs in "):
        find_run("latest", tmp_path / "none")


def test_a_path_that_exists_is_taken_before_a_name(tmp_path, monkeypatch):
    make_run(tmp_path / "runs", "here").release()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_run("here", tmp_path / "runs") == Path("here")
