"""Run directories: made once, held by one process, given back by the kernel."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from cordee.core.errors import RunDirectoryError, StorageError
from cordee.monitoring import RunDirectory, Summary, list_runs, new_run_path

JOB = 'name = "iris"\n'


def test_a_new_directory_has_the_job_and_its_folders(tmp_path):
    with RunDirectory.create(tmp_path / "a" / "b", JOB) as run:
        assert run.job_file.read_text() == JOB
        assert run.checkpoints.is_dir()
        assert run.logs.is_dir()
        assert run.worker_log(3).name == "worker-3.log"
        assert run.read_summary() is None
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "checkpoints", "job.toml", "logs"]


def test_an_empty_directory_may_be_used(tmp_path):
    RunDirectory.create(tmp_path, JOB).release()


@pytest.mark.parametrize("sign", ["job.toml", "events.jsonl", "summary.json", "checkpoints"])
def test_a_directory_with_a_run_is_refused_and_left_alone(tmp_path, sign):
    (tmp_path / sign).write_text("mine")
    with pytest.raises(RunDirectoryError, match=f"{sign}.*--resume.*--run-dir") as raised:
        RunDirectory.create(tmp_path, JOB)
    assert raised.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [sign]
    assert (tmp_path / sign).read_text() == "mine"


def test_a_path_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"cannot make .*file/run: not a directory; choose another --run-dir"):
        RunDirectory.create(tmp_path / "file" / "run", JOB)
    with pytest.raises(RunDirectoryError, match="file"):
        RunDirectory.create(tmp_path / "file", JOB)
    with pytest.raises(RunDirectoryError, match="name too long"):
        RunDirectory.create(tmp_path / ("x" * 300), JOB)
    with pytest.raises(RunDirectoryError):
        RunDirectory.open_existing(tmp_path / ("x" * 300))


def test_a_file_system_that_takes_no_files_is_refused():
    with pytest.raises(RunDirectoryError, match="cannot make the run directory /proc/1/cordee"):
        RunDirectory.create("/proc/1/cordee", JOB)


def test_a_full_disk_is_refused_at_the_start_and_nothing_is_left(small_disk, fill):
    fill(small_disk)
    with pytest.raises(RunDirectoryError, match="no space left on device") as raised:
        RunDirectory.create(small_disk / "run", JOB)
    assert "--run-dir" in str(raised.value)
    assert not (small_disk / "run").exists()


def test_a_disk_that_fills_later_is_a_storage_error_and_keeps_the_old_summary(small_disk, fill):
    with RunDirectory.create(small_disk / "run", JOB) as run:
        run.write_summary(Summary(status="interrupted"))
        fill(small_disk)
        with pytest.raises(StorageError, match=r"summary\.json: no space left on device") as raised:
            run.write_summary(Summary(status="completed", error="x" * 10_000))
        assert raised.value.exit_code == 1
        kept = run.read_summary()
        assert kept is not None
        assert kept.status == "interrupted"
        assert not list(run.path.glob(".*.tmp"))


def test_a_run_held_by_another_process_is_refused_with_its_pid(tmp_path, hold_run):
    holder = hold_run(f"create({str(tmp_path / 'run')!r}, {JOB!r})")
    with pytest.raises(RunDirectoryError, match=f"in use by process {holder.pid}"):
        RunDirectory.open_existing(tmp_path / "run")
    assert [run.state for run in list_runs(tmp_path)] == ["running"]


def test_a_killed_process_gives_its_run_back(tmp_path, hold_run):
    holder = hold_run(f"create({str(tmp_path / 'run')!r}, {JOB!r})")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert [run.state for run in list_runs(tmp_path)] == ["died"]
    with RunDirectory.open_existing(tmp_path / "run") as run:
        assert (run.path / ".lock").read_text() == f"{os.getpid()}\n{socket.gethostname()}\n"


def test_children_forked_by_a_killed_process_do_not_keep_its_run(tmp_path, hold_run):
    pid_file = tmp_path / "child"
    fork = (
        "import os, time, pathlib\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child))\n"
    )
    holder = hold_run(f"create({str(tmp_path / 'run')!r}, {JOB!r})", fork)
    child = int(pid_file.read_text())
    try:
        holder.kill()
        holder.wait()
        RunDirectory.open_existing(tmp_path / "run").release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_same_process_cannot_hold_a_run_twice(tmp_path):
    with (
        RunDirectory.create(tmp_path / "run", JOB),
        pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"),
    ):
        RunDirectory.open_existing(tmp_path / "run")


def test_only_one_of_two_processes_makes_a_run(tmp_path, hold_run):
    hold_run(f"create({str(tmp_path / 'run')!r}, {JOB!r})")
    with pytest.raises(RunDirectoryError):
        RunDirectory.create(tmp_path / "run", JOB)


def test_releasing_twice_is_harmless_and_the_run_can_be_taken_up_again(tmp_path):
    run = RunDirectory.create(tmp_path / "run", JOB)
    run.release()
    run.release()
    with RunDirectory.open_existing(tmp_path / "run") as again:
        again.write_job('name = "longer"\n')
    assert (tmp_path / "run" / "job.toml").read_text() == 'name = "longer"\n'


def test_resuming_what_is_no_run_says_so(tmp_path):
    (tmp_path / "iris-20260101-120000").mkdir()
    with pytest.raises(RunDirectoryError, match=r"not a run directory: it has no job\.toml"):
        RunDirectory.open_existing(tmp_path / "iris-20260101-120000")
    with pytest.raises(RunDirectoryError, match="did you mean 'iris-20260101-120000'"):
        RunDirectory.open_existing(tmp_path / "iris-20260101-12000")
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        RunDirectory.open_existing(tmp_path / "no" / "where")


def test_new_paths_carry_name_and_time_and_are_never_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    paths = []
    for _ in range(3):
        paths.append(new_run_path(tmp_path, "iris"))
        paths[-1].mkdir()
    assert [path.name for path in paths] == [
        "iris-20260102-030405",
        "iris-20260102-030405-2",
        "iris-20260102-030405-3",
    ]


def test_a_very_long_name_still_makes_a_path(tmp_path):
    RunDirectory.create(new_run_path(tmp_path, "é" * 300), JOB).release()


def test_two_runs_of_one_second_get_directories_of_their_own(tmp_path, monkeypatch):
    """Also where both have looked before either has made its directory."""
    paths = [tmp_path / "runs" / name for name in ("job-1", "job-1", "job-1-2")]
    monkeypatch.setattr("cordee.monitoring.run_directory.new_run_path", lambda folder, name: paths.pop(0))
    folder = tmp_path / "runs"
    with RunDirectory.create_in(folder, "job", "") as first, RunDirectory.create_in(folder, "job", "") as second:
        assert (first.path.name, second.path.name) == ("job-1", "job-1-2")
