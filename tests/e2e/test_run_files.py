"""What a run leaves behind: everything the design promises, and enough to run it again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file
from workspace import STEPS, Workspace, assert_ended_well, events, settings, summary

pytestmark = pytest.mark.timeout(300)

SUMMARY_KEYS = {
    "status",
    "strategy",
    "workers",
    "steps",
    "epochs",
    "samples",
    "wall_seconds",
    "samples_per_second",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "weights_sha256",
    "recoveries",
    "steps_redone",
    "stopped_by",
}


def test_the_run_directory_has_all_files(reference: Path) -> None:
    names = {path.name for path in reference.iterdir() if not path.name.startswith(".")}
    assert names == {"job.toml", "events.jsonl", "checkpoints", "logs", "summary.json", "timeline"}
    assert (reference / "timeline" / "worker-0.jsonl").is_file()
    assert (reference / "logs" / "worker-0.log").is_file()
    assert not list(reference.rglob("*.tmp"))


def test_the_summary_has_all_keys(reference: Path) -> None:
    found = summary(reference)
    assert found.keys() >= SUMMARY_KEYS
    assert found["status"] == "completed"
    assert (found["strategy"], found["workers"]) == ("single", 1)
    assert (found["steps"], found["epochs"], found["samples"]) == (STEPS, 4, STEPS * 16)
    assert 0 < found["test_accuracy"] < 1
    assert found["wall_seconds"] > 0 and found["samples_per_second"] > 0
    assert found["train_loss"] > 0 and found["test_loss"] > 0
    assert (found["recoveries"], found["steps_redone"], found["stopped_by"]) == (0, 0, None)
    assert len(bytes.fromhex(found["weights_sha256"])) == 32


def test_every_event_is_known_and_in_order(reference: Path) -> None:
    found = events(reference)
    assert {event["type"] for event in found} == {
        "run_started",
        "worker_started",
        "step",
        "evaluation",
        "checkpoint",
        "commit",
        "run_ended",
    }
    times = [event["time"] for event in found]
    assert times == sorted(times)
    worker = next(event for event in found if event["type"] == "worker_started")
    assert worker.keys() >= {"worker", "pid", "host", "role"}
    assert found[-1]["type"] == "run_ended"
    assert found[-1]["weights_sha256"] == summary(reference)["weights_sha256"]
    steps = [event["step"] for event in found if event["type"] == "step"]
    assert steps == list(range(1, STEPS, 5))
    assert [event["step"] for event in found if event["type"] == "evaluation"] == [30, 60, 90, 120]


def test_checkpoints_are_kept_and_hold_the_weights(reference: Path) -> None:
    kept = sorted(path.name for path in (reference / "checkpoints").iterdir())
    assert kept == ["step-100", "step-110", "step-120"]
    weights = load_file(reference / "checkpoints" / "step-120" / "model.safetensors")
    assert any(name.endswith("running_mean") for name in weights), "buffers are part of it"


def test_the_resolved_job_runs_again_from_another_folder(
    reference: Path, reference_sha256: str, workspace: Workspace
) -> None:
    resolved = tomllib.loads((reference / "job.toml").read_text())
    assert (resolved["seed"], resolved["strategy"]["name"]) == (0, "single")
    (workspace.path / "parts.py").unlink()  # so that only the path in the job can find it
    elsewhere = workspace.path / "else" / "where"
    elsewhere.mkdir(parents=True)
    done = workspace.run("train", reference / "job.toml", "--run-dir", "again", cwd=elsewhere)
    assert_ended_well(done)
    assert summary(elsewhere / "again")["weights_sha256"] == reference_sha256
    assert (elsewhere / "again" / "job.toml").read_text().count("parts:Net") == 1


def test_another_seed_gives_other_weights(reference_sha256: str, workspace: Workspace) -> None:
    assert_ended_well(workspace.train("-q", *settings(seed=1)))
    assert summary(workspace.path / "run")["weights_sha256"] != reference_sha256


def test_a_stopped_run_goes_on_to_the_same_end(half_done: Path, reference_sha256: str, workspace: Workspace) -> None:
    assert (summary(half_done)["status"], summary(half_done)["stopped_by"]) == ("stopped", "steps")
    done = workspace.train("--resume")
    assert_ended_well(done)
    assert "continues after step 45" in done.stdout
    found = summary(half_done)
    assert (found["status"], found["weights_sha256"]) == ("completed", reference_sha256)
    assert found["samples"] == STEPS * 16
    # And once more: a run that is over stays as it was.
    done = workspace.train("--resume")
    assert_ended_well(done)
    assert "samples/s" not in done.stdout, "it took no step"
    again = summary(half_done)
    assert again["samples_per_second"] is None
    for key in ("status", "steps", "samples", "test_accuracy", "test_loss", "train_loss", "weights_sha256"):
        assert again[key] == found[key], key
