"""Every example, as a job file and as a script, shortened. The sets with files get small ones of the real format."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workspace import EXAMPLES, Workspace, assert_ended_well, events, summary, write_cifar_set, write_idx_set

from cordee.core import Job

pytestmark = pytest.mark.timeout(300)

NAMES = ("digits", "iris", "mnist", "fashion_mnist", "cifar10", "own")
JOB_FILES = (*NAMES, "two_inputs", "federated")  # what these name is in a file that trains nothing itself
OF_FRAMEWORKS = {"bert"}  # needs transformers: tests/frameworks
SHORTER = {
    "mnist": ["training.batch_size=16"],
    "fashion_mnist": ["training.batch_size=16"],
    "cifar10": ["training.batch_size=8", "data.train_limit=32", "data.test_limit=16", "training.threads=1"],
}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_idx_set(folder / "mnist")
    write_idx_set(folder / "fashion-mnist")
    write_cifar_set(folder / "cifar-10-batches-bin")
    return folder


def test_nothing_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {
        *JOB_FILES,
        *OF_FRAMEWORKS,
        "online",
        "parquet",
        "server",
        "text",
    }
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.*"):
        assert path.name in readme or path.name == "README.md", f"{path.name} is not in the README of the examples"


@pytest.mark.parametrize("name", JOB_FILES)
def test_the_job_file_trains(name: str, workspace: Workspace, data_folder: Path) -> None:
    options = [part for setting in ("stop.steps=3", *SHORTER.get(name, [])) for part in ("--set", setting)]
    done = workspace.run("train", EXAMPLES / f"{name}.toml", *options, CORDEE_DATA=str(data_folder))
    assert_ended_well(done)
    (run,) = (workspace.path / "runs").iterdir()
    found = summary(run)
    assert (found["status"], found["stopped_by"], found["steps"]) == ("stopped", "steps", 3)
    assert 0.0 <= found["test_accuracy"] <= 1.0
    assert f"{100 * found['test_accuracy']:.2f} %" in done.stdout
    assert "next\n  cordee export runs/" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_script_trains(name: str, workspace: Workspace, data_folder: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    settings = ["stop.steps=3", *SHORTER.get(name, [])]
    done = workspace.execute([sys.executable, script, *settings], CORDEE_DATA=str(data_folder))
    assert_ended_well(done)
    (run,) = (workspace.path / "runs").iterdir()
    assert summary(run)["steps"] == 3
    assert events(run)[-1]["type"] == "run_ended"


@pytest.mark.parametrize("name", NAMES)
def test_script_and_job_file_are_the_same_job(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, name, raising=False)
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)
    specification.loader.exec_module(module)
    from_script, from_file = module.job.to_dict(), Job.load(EXAMPLES / f"{name}.toml").to_dict()
    for table in (from_script, from_file):
        del table["python_path"]
        table["data"]["augment"] = list(table["data"]["augment"])
    assert from_script == from_file


def test_training_on_what_arrives(workspace: Workspace) -> None:
    feeding = subprocess.Popen(
        [sys.executable, EXAMPLES / "online_feed.py", "incoming", "--files", "12", "--every", "0.2"], cwd=workspace.path
    )
    try:
        while not list(workspace.path.glob("incoming/*.npz")):
            time.sleep(0.02)
        done = workspace.run("train", EXAMPLES / "online.toml")
    finally:
        feeding.kill()
        feeding.wait()
    assert_ended_well(done)
    (run,) = (workspace.path / "runs").iterdir()
    found = summary(run)
    assert (found["status"], found["samples"]) == ("completed", 12 * 90)
    assert found["test_accuracy"] > 0.8 and found["best_step"]


def test_what_a_script_ran_can_be_run_from_its_files(workspace: Workspace) -> None:
    """Classes of the script itself are written down by the path of the file."""
    assert_ended_well(workspace.execute([sys.executable, EXAMPLES / "own.py", "stop.steps=3"]))
    (first,) = (workspace.path / "runs").iterdir()
    elsewhere = workspace.path / "elsewhere"
    elsewhere.mkdir()
    assert_ended_well(workspace.run("train", first / "job.toml", "--run-dir", "again", cwd=elsewhere))
    assert summary(elsewhere / "again")["weights_sha256"] == summary(first)["weights_sha256"]


def test_the_text_example_writes_its_files_and_trains_on_them(workspace: Workspace) -> None:
    assert_ended_well(workspace.execute([sys.executable, EXAMPLES / "text_files.py"]))
    done = workspace.run("train", EXAMPLES / "text.toml", "--set", "stop.steps=3")
    assert_ended_well(done)
    (run,) = (workspace.path / "runs").iterdir()
    assert (summary(run)["steps"], summary(run)["status"]) == (3, "stopped")


def test_the_parquet_example_writes_its_files_and_trains_on_them(workspace: Workspace) -> None:
    assert_ended_well(workspace.execute([sys.executable, EXAMPLES / "parquet_files.py"]))
    done = workspace.run("train", EXAMPLES / "parquet.toml", "--set", "stop.steps=3")
    assert_ended_well(done)
    (run,) = (workspace.path / "runs").iterdir()
    assert (summary(run)["steps"], summary(run)["status"]) == (3, "stopped")
    assert "1,438 training and 359 test samples" in done.stdout
