"""`cordee train --workers N` as a whole: the launcher, the workers, the files, and what cannot be started."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import job, train_alone
from launching import run, started, wait_until

import cordee
from cordee import checkpoint
from cordee.core import Job
from cordee.core.errors import JobError

pytestmark = pytest.mark.timeout(200)
HERE = str(Path(__file__).parent)


def write_job(folder: Path, **sections: Any) -> Path:
    path = folder / "job.toml"
    path.write_text(Job.from_dict(job(**sections)).to_toml())
    return path


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.long
def test_two_runs_of_two_workers_side_by_side(tmp_path: Path) -> None:
    """They do not collide, equal one worker in every step, and leave a whole run directory each."""
    path = write_job(tmp_path, training={"steps": 30}, checkpoint={"every_steps": 10}, evaluation={"every_steps": 10})
    alone = train_alone(job(training={"steps": 30}, evaluation={"every_steps": 10}), tmp_path / "alone")
    args = ("train", str(path), "--workers", "2", "--run-dir")
    with started(*args, str(tmp_path / "a")) as one, started(*args, str(tmp_path / "b")) as other:
        for command in (one, other):
            ended = command.finish()
            assert ended.code == 0, ended.stderr
            assert ended.stderr == ""
    for name in ("a", "b"):
        run_dir = tmp_path / name
        summary, events = summary_of(run_dir), events_of(run_dir)
        assert (summary["status"], summary["strategy"], summary["workers"]) == ("completed", "data_parallel", 2)
        assert (summary["steps"], summary["samples"]) == (30, alone.summary.samples)
        losses = [event["loss"] for event in events if event["type"] == "step"]
        assert losses == pytest.approx(alone.losses().tolist(), rel=1e-6)
        assert [event["samples"] for event in events if event["type"] == "evaluation"] == [47, 47, 47]
        assert sorted(event["worker"] for event in events if event["type"] == "worker_started") == [0, 1]
        assert sum(event["type"] == "run_started" for event in events) == 1
        assert {path.name for path in (run_dir / "logs").iterdir()} >= {"worker-0.log", "worker-1.log"}
        loaded = checkpoint.load_newest(run_dir / "checkpoints")
        assert loaded is not None and loaded.path.name == "step-30"
    assert summary_of(tmp_path / "a")["weights_sha256"] == summary_of(tmp_path / "b")["weights_sha256"]


@pytest.mark.long
def test_a_run_goes_on_with_other_numbers_of_workers(tmp_path: Path) -> None:
    """2 workers, interrupted by Ctrl-C, then 3, then 1; against one straight run of one worker."""
    path = write_job(tmp_path, training={"steps": 3000})
    run_dir = str(tmp_path / "run")
    with started("train", str(path), "--workers", "2", "--run-dir", run_dir, "-q") as command:
        wait_until(lambda: (tmp_path / "run" / "events.jsonl").exists() and '"step"' in _text(tmp_path))
        command.note_family()
        command.process.send_signal(signal.SIGINT)
        ended = command.finish(timeout_s=20)
        assert ended.code == 130, ended.stderr
        assert not command.survivors()
    step = summary_of(tmp_path / "run")["steps"]
    assert 0 < step < 3000
    resume = ("train", str(path), "--run-dir", run_dir, "--resume", "-q", "--set")
    assert run(*resume, f"stop.steps={step + 7}", "--workers", "3").code == 0
    ended = run(*resume, f"training.steps={step + 15}", "--workers", "1")
    assert ended.code == 0, ended.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["strategy"], summary["steps"]) == ("single", step + 15)
    straight = train_alone(job(training={"steps": step + 15}), tmp_path / "straight")
    loaded = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert loaded is not None
    for name, value in loaded.state.part("model").tensors.items():
        torch.testing.assert_close(value.double(), torch.from_numpy(straight.weights[name]), rtol=0, atol=1e-4)
    assert summary["samples"] == straight.summary.samples


def _text(folder: Path) -> str:
    return (folder / "run" / "events.jsonl").read_text()


def test_more_workers_than_samples_in_a_batch(tmp_path: Path) -> None:
    ended = run("train", str(write_job(tmp_path)), "--workers", "40", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 2
    assert "training.batch_size = 32 has no sample for each of 40 workers" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_parts_that_live_in_this_process_need_one_worker(tmp_path: Path) -> None:
    table = {**job(), "model": torch.nn.Linear(20, 5), "strategy": {"workers": 2}}
    with pytest.raises(JobError, match=r"model: Linear.* exists only in this process, and the job has 2 workers"):
        cordee.train(table, run_dir=tmp_path / "run", quiet=True)
    table = {**job(), "model": lambda input_shape, num_classes: torch.nn.Linear(20, 5), "strategy": {"workers": 2}}
    with pytest.raises(JobError, match="define it in a module"):
        cordee.train(table, run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_what_every_worker_says_is_the_reason(tmp_path: Path) -> None:
    """No worker is the cause where none can form the group: here no segment of shared memory can be made."""
    path = write_job(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}/without_shared_memory{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        ended = run("train", str(path), "--workers", "2", "--run-dir", str(tmp_path / "run"), "-q")
    assert ended.code == 1
    assert "no shared memory today" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("\n") <= 2
    assert summary_of(tmp_path / "run")["status"] == "failed"


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"reducer": "ddp"}, {"compression": "powersgd"}], ids=str)
def test_a_worker_killed_within_ddp_or_a_compressed_exchange_is_trained_around(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """torch hands the loss of a peer on as a text in DDP."""
    compressed = {**settings, "name": "data_parallel", "workers": 2}
    path = write_job(tmp_path, training={"steps": 400}, strategy=compressed)
    with started("train", str(path), "--run-dir", str(tmp_path / "run"), "-q") as command:
        wait_until(lambda: (tmp_path / "run" / "events.jsonl").exists() and '"step":30' in _text(tmp_path))
        command.note_family()
        pids = {
            event["worker"]: event["pid"] for event in events_of(tmp_path / "run") if event["type"] == "worker_started"
        }
        os.kill(pids[1], signal.SIGKILL)
        ended = command.finish(timeout_s=60)
        assert ended.code == 0, ended.stderr
        assert not command.survivors()
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 400 and summary["recoveries"] == 1 and summary["steps_redone"] <= 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("context.team.sum([1.0])", r"the workers have made different calls at step \d+: rank [01] is in all_"),
        (
            "raise ValueError('boom')",
            r"worker 0 raised TrainingError: callback 'own' raised ValueError in on_step at step 2: boom\. Step 2 is "
            r"saved.*worker-0\.log",
        ),
    ],
)
def test_what_a_callback_does_on_the_first_worker_only(act: str, message: str, tmp_path: Path) -> None:
    """A call that others do not make was taken for their loss, and an error was reported by the others."""
    condition = "if context.team.is_first and event.step == 2"
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def on_step(self, event, context):\n        {condition}: {act}\n"
    )
    path = write_job(tmp_path, training={"steps": 6}, callbacks={"own": "own:Own"})
    ended = run("train", str(path), "--workers", "2", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 1 and re.search(message, ended.stderr, re.DOTALL), ended.stderr
