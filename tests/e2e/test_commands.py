"""The commands around training: listing, exporting, examining, measuring."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from workspace import REPOSITORY, Workspace, assert_ended_well, assert_refused, settings, summary

import cordee

pytestmark = pytest.mark.timeout(300)


def test_python_m_cordee_is_the_command(workspace: Workspace) -> None:
    done = workspace.execute([sys.executable, "-m", "cordee", "--version"])
    assert_ended_well(done)
    assert done.stdout == f"cordee {cordee.__version__}\n"


def test_help_names_every_command_and_does_not_import_torch(workspace: Workspace) -> None:
    done = workspace.execute([sys.executable, "-X", "importtime", "-m", "cordee", "--help"])
    assert done.returncode == 0
    for command in ("train", "export", "runs", "doctor", "bench"):
        assert f"  {command} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2], "a summary is cut"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "cordee.cli.app" in imported
    assert "torch" not in imported


def test_no_command_at_all_prints_help(workspace: Workspace) -> None:
    done = workspace.run()
    assert "Usage: cordee" in done.stdout + done.stderr


def test_runs_are_listed_with_their_state(reference: Path, half_done: Path, workspace: Workspace) -> None:
    folder = workspace.path / "runs"
    shutil.copytree(reference, folder / "whole")
    half_done.rename(folder / "half")
    shutil.copytree(folder / "half", folder / "dead")
    (folder / "dead" / "summary.json").unlink()
    lines = (folder / "dead" / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "dead" / "events.jsonl").write_text("".join(lines[:-1]))
    (folder / "not a run").mkdir()

    done = workspace.run("runs")
    assert_ended_well(done)
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert (rows["whole"][1], rows["half"][1], rows["dead"][1]) == ("completed", "stopped", "died")
    assert f"{100 * summary(folder / 'whole')['test_accuracy']:.2f}" in rows["whole"]
    assert "not" not in rows

    listed = json.loads(workspace.run("runs", folder, "--json", cwd=Path("/")).stdout)
    assert {Path(run["path"]).name: run["state"] for run in listed} == {
        "whole": "completed",
        "half": "stopped",
        "dead": "died",
    }
    assert {run["name"] for run in listed} == {"tiny"}


def test_no_runs_is_said(workspace: Workspace) -> None:
    done = workspace.run("runs")
    assert_ended_well(done)
    assert done.stdout.startswith("no runs in runs")
    assert json.loads(workspace.run("runs", "--json").stdout) == []


def test_runs_into_a_closed_pipe_is_no_error(reference: Path, workspace: Workspace) -> None:
    shutil.copytree(reference, workspace.path / "runs" / "a")
    done = workspace.execute(["bash", "-o", "pipefail", "-c", "cordee runs | true"])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finding_of_the_doctor_into_a_closed_pipe_is_no_error(workspace: Workspace) -> None:
    done = workspace.execute(["bash", "-o", "pipefail", "-c", "cordee doctor | head -1"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok    Python")


def test_new_runs_go_to_the_runs_folder(workspace: Workspace) -> None:
    done = workspace.run("train", workspace.job, *settings(stop__steps=1), CORDEE_RUNS=str(workspace.path / "mine"))
    assert_ended_well(done)
    (made,) = (workspace.path / "mine").iterdir()
    assert made.name.startswith(f"tiny-{time.strftime('%Y')}")
    assert str(made) in done.stdout


def test_the_doctor_examines_this_machine(workspace: Workspace) -> None:
    done = workspace.run("doctor")
    assert done.returncode == 0, done.stdout
    for subject in ("Python", "torch", "devices", "cores", "memory", "shared memory", "ports", "mnist", "cifar10"):
        assert any(line[6:].startswith(subject) for line in done.stdout.splitlines()), f"{subject}: {done.stdout}"
    findings = json.loads(workspace.run("doctor", "--json").stdout)
    assert all(finding.keys() >= {"subject", "state", "detail"} for finding in findings)
    assert {finding["state"] for finding in findings} <= {"ok", "note"}


def test_the_doctor_says_which_examples_can_run(workspace: Workspace) -> None:
    findings = json.loads(workspace.run("doctor", "--json").stdout)
    (runnable,) = [each["detail"] for each in findings if each["subject"] == "examples" and each["state"] == "ok"]
    assert "digits.toml" in runnable
    assert "parquet.toml" not in runnable  # its files are written by a script


def test_watching_needs_a_terminal_and_a_run(workspace: Workspace) -> None:
    done = workspace.run("watch", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr


def test_the_doctor_says_what_to_fix(workspace: Workspace) -> None:
    (workspace.path / "file").write_text("")
    done = workspace.run("doctor", CORDEE_RUNS=str(workspace.path / "file" / "runs"))
    assert done.returncode == 1
    assert "BAD   runs folder" in done.stdout
    assert "1 to fix" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_doctor_finds_that_workers_could_not_share_memory(workspace: Workspace) -> None:
    done = workspace.execute(["bash", "-c", "ulimit -f 1000; cordee doctor"])
    assert done.returncode == 1
    assert "BAD   shared memory" in done.stdout
    assert "needs 6.0 MiB (File too large)" in done.stdout
    assert done.stderr == ""


def test_weights_are_exported_in_three_formats(
    reference: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    run = Path(shutil.copytree(reference, workspace.path / "run"))
    done = workspace.run("export", run, "-o", "net.safetensors", "-o", "net.pt", "-o", "net.onnx")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["net.safetensors", "net.pt", "net.onnx"]

    saved = load_file(workspace.path / "net.safetensors")
    state = torch.load(workspace.path / "net.pt", weights_only=True)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in saved)

    monkeypatch.syspath_prepend(workspace.path)
    import parts

    model = parts.Net((1, 12, 12), 4)
    model.load_state_dict(state)
    model.eval()
    x = torch.randn(5, 1, 12, 12)
    session = onnxruntime.InferenceSession(workspace.path / "net.onnx")
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(outputs, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_export_without_a_file_name_writes_into_the_run(reference: Path, workspace: Workspace) -> None:
    run = Path(shutil.copytree(reference, workspace.path / "run"))
    done = workspace.run("export", run, "--step", "110")
    assert_ended_well(done)
    assert load_file(run / "model.safetensors").keys()
    assert_refused(workspace.run("export", run, "--step", "7"), 2, "no checkpoint of step 7", "step-110")
    (workspace.path / "empty").mkdir()
    assert_refused(workspace.run("export", "empty"), 2, "is not a run directory")
    assert_refused(workspace.run("export", run, "-o", "net.h5"), 2, "net.h5", ".safetensors", ".onnx")


def test_tensorboard_gets_the_curves(workspace: Workspace) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = workspace.train(*settings(monitoring__tensorboard="true", stop__steps=35))
    assert done.returncode == 0, done.stderr
    curves = EventAccumulator(str(workspace.path / "run" / "tensorboard"))
    curves.Reload()
    tags = curves.Tags()["scalars"]
    assert any("loss" in tag for tag in tags) and any("accuracy" in tag for tag in tags), tags
    assert all(len(curves.Scalars(tag)) >= 1 for tag in tags)


def test_an_unknown_benchmark_is_named(workspace: Workspace) -> None:
    assert_refused(workspace.run("bench", "overheat"), 2, "'overheat'", "did you mean 'overhead'?", "accuracy")


def test_the_accuracy_benchmark_needs_the_job_files(workspace: Workspace) -> None:
    script = """
import cordee.bench.accuracy as accuracy
print(accuracy.find_examples())
accuracy.__file__ = "/usr/lib/python3/site-packages/cordee/bench/accuracy.py"
accuracy.find_examples()
"""
    done = workspace.execute([sys.executable, "-c", script])
    assert done.stdout.strip() == str(REPOSITORY / "examples"), "not found from outside of the checkout"
    assert "run this benchmark in a checkout" in done.stderr


def test_quiet_prints_nothing(workspace: Workspace) -> None:
    done = workspace.train("--quiet", *settings(stop__steps=2))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_option_is_a_usage_error(workspace: Workspace) -> None:
    done = workspace.run("train", workspace.job, "--epochs", "3")
    assert done.returncode == 2
    assert "--epochs" in done.stderr and "Traceback" not in done.stderr


def test_output_to_a_pipe_that_closes_does_not_end_training(workspace: Workspace) -> None:
    command = f"cordee train {workspace.job} --run-dir run | head -1"
    done = workspace.execute(["bash", "-c", command])
    assert "Traceback" not in done.stderr
    assert summary(workspace.path / "run")["status"] == "completed"
    assert os.access(workspace.path / "run" / "checkpoints" / "step-120", os.R_OK)
