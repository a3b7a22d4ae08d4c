"""Training on data that keeps arriving, in one process: it waits, evaluates the newest, stops, and continues."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_jobs
import torch
from small_jobs import events_of, run, small_job

from cordee import checkpoint
from cordee.core import Job
from cordee.core.errors import JobError


def deliver(folder: Path, first: int, last: int, size: int = 30) -> None:
    """Write the files with these numbers: the class is in the first inputs."""
    folder.mkdir(exist_ok=True)
    for index in range(first, last):
        dice = np.random.default_rng(index)
        targets = dice.integers(0, 3, size)
        inputs = dice.normal(size=(size, 6)).astype(np.float32)
        inputs[np.arange(size), targets] += 3
        with (folder / "part").open("wb") as file:
            np.savez(file, x=inputs, y=targets)
        (folder / "part").rename(folder / f"{index:04}.npz")


def online_job(folder: Path, **sections: Any) -> Job:
    table: dict[str, Any] = {
        "model": {"use": "mlp", "hidden": [8], "dropout": 0.2},
        "data": {"use": "folder", "root": str(folder), "num_classes": 3, "holdout": 0.1, "holdout_size": 12},
        "evaluation": {"every_steps": 5},
        "checkpoint": {"every_steps": 4},
    }
    merged = {key: {**table.get(key, {}), **sections.pop(key, {})} for key in [*table, *sections]}
    job = small_job(**merged).to_dict()
    del job["training"]["epochs"]
    return Job.from_dict(job)


def test_it_trains_on_everything_once_and_ends_with_the_data(tmp_path: Path) -> None:
    deliver(tmp_path / "in", 0, 5)
    (tmp_path / "in" / "END").touch()
    result = run(online_job(tmp_path / "in"), tmp_path / "run")
    summary = result.summary
    assert (summary.status, summary.stopped_by) == ("completed", None)
    assert summary.samples == 135 and summary.steps == 17  # 15 of 150 are set aside
    evaluations = events_of(result, "evaluation")
    assert [event["step"] for event in evaluations] == [5, 10, 15, 17]
    assert [event["samples"] for event in evaluations] == [4, 8, 12, 12], "the newest of those set aside"
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-17")
    assert state.values["progress"]["place"] == {"samples": 150, "file": "0004.npz", "offset": 30, "digest": 0}


def test_it_waits_for_data_and_stops_when_nothing_comes(tmp_path: Path) -> None:
    deliver(tmp_path / "in", 0, 1)
    later = threading.Timer(0.5, deliver, args=(tmp_path / "in", 1, 3))
    later.start()
    result = run(online_job(tmp_path / "in", stop={"idle": 1.5}), tmp_path / "run")
    later.join()
    assert (result.status, result.summary.stopped_by) == ("stopped", "idle")
    assert result.summary.samples == 80, "ten batches; the one sample left makes none"


@pytest.mark.parametrize(
    ("stop", "reason"), [({"time": "0.4s"}, "time"), ({"accuracy": 0.01}, "accuracy"), ({"patience": 1}, "patience")]
)
def test_other_reasons_to_stop(tmp_path: Path, stop: dict[str, Any], reason: str) -> None:
    deliver(tmp_path / "in", 0, 12)
    job = online_job(tmp_path / "in", stop={**stop, "idle": "20s"}, optimizer={"use": "sgd", "lr": 1e-9})
    assert run(job, tmp_path / "run").summary.stopped_by == reason


def test_an_interrupt_while_it_waits_saves_and_resume_goes_on_behind(tmp_path: Path) -> None:
    deliver(tmp_path / "all", 0, 4)
    (tmp_path / "all" / "END").touch()
    whole = run(online_job(tmp_path / "all"), tmp_path / "whole").summary
    folder = tmp_path / "in"
    deliver(folder, 0, 2)
    # 54 samples to train on: six batches, then it waits.
    job = online_job(folder)
    stopping = threading.Thread(target=interrupt_while_waiting, args=(tmp_path / "run",))
    stopping.start()
    first = run(job, tmp_path / "run").summary
    stopping.join()
    assert (first.status, first.steps) == ("interrupted", 6)
    (folder / "0000.npz").unlink()  # what was trained on is not needed any more
    deliver(folder, 2, 4)
    (folder / "END").touch()
    second = run(job, tmp_path / "run", resume=True).summary
    assert (second.status, second.samples) == ("completed", whole.samples)
    assert second.weights_sha256 == whole.weights_sha256
    assert second.test_loss == whole.test_loss, "also what was set aside is as if nothing had happened"


def interrupt_while_waiting(run_dir: Path) -> None:
    deadline = time.monotonic() + 30
    while not (run_dir / "checkpoints" / "step-4").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)  # for the last two batches
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"epochs": 2}}, r"training\.epochs = 2, but data that grows is gone through once"),
        ({"stop": {"accuracy": 0.9}, "data": {"holdout": 0.0}}, r"stop\.accuracy is measured on a test set: set data"),
        ({"stop": {"patience": 3}, "evaluation": {"every_steps": 0}}, r"stop\.patience is never measured"),
        ({"checkpoint": {"keep_best": True}, "data": {"holdout": 0.0}}, r"checkpoint\.keep_best is measured on a test"),
        ({"strategy": {"name": "parameter_server"}}, "hands out samples by their number, and a stream has none"),
    ],
)
def test_settings_that_have_no_meaning(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    deliver(tmp_path / "in", 0, 1)
    table = online_job(tmp_path / "in").to_dict()
    for key, section in sections.items():
        table[key] = {**table.get(key, {}), **section}
    with pytest.raises(JobError, match=message):
        run(Job.from_dict(table), tmp_path / "run")


def test_idling_is_for_data_that_grows(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"stop\.idle = '1m' is for data that grows, and 'synthetic' does not"):
        run(small_job(stop={"idle": "1m"}), tmp_path / "run")


def test_an_iterable_that_keeps_delivering(tmp_path: Path) -> None:
    job = small_job(data={"use": small_jobs.StreamData(), "online": True, "holdout": 0.25})
    table = {**job.to_dict(), "data": {"use": small_jobs.StreamData(), "online": True, "holdout": 0.25}}
    del table["training"]["epochs"]
    summary = run(Job.from_dict(table), tmp_path / "run").summary
    assert (summary.status, summary.samples) == ("completed", 29)  # 9 of 38 are set aside
    assert summary.test_accuracy is not None
    assert torch.is_tensor(checkpoint.load(tmp_path / "run" / "checkpoints" / "step-4").tensors["stream.inputs"])
