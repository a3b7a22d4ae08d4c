"""Scripts that train without `if __name__ == "__main__"`: workers import them and never train by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from workspace import BIN, Workspace, summary

pytestmark = pytest.mark.timeout(300)

DEFINITIONS = """
import pathlib, os
import torch
import cordee

pathlib.Path(f"imported-{os.getpid()}").touch()

class Net(torch.nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], num_classes)

    def forward(self, x):
        return self.layer(x)

def points():
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()

job = cordee.Job(
    name="unguarded",
    model=Net,
    data=cordee.Data(points, test_fraction=0.25),
    optimizer=cordee.Use("sgd", lr=0.1),
    training={"epochs": 2, "batch_size": 8, "threads": 1, "reproducible": True},
    strategy={"name": "data_parallel", "workers": WORKERS},
)
"""
TRAIN = "run = cordee.train(job, quiet=True)\nprint(run.status, run.summary.weights_sha256)\n"


def execute(workspace: Workspace, workers: int, rest: str) -> list[str]:
    """Run a script in a folder of its own; return what it printed."""
    folder = workspace.path / f"with-{workers}"
    folder.mkdir()
    (folder / "script.py").write_text(f"WORKERS = {workers}\n{DEFINITIONS}{rest}")
    done = workspace.execute([BIN / "python", "script.py"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def runs(folder: Path) -> list[Path]:
    return [path for path in (folder / "runs").iterdir() if (path / "job.toml").exists()]


def test_one_run_and_the_same_weights_as_alone(workspace: Workspace) -> None:
    alone = execute(workspace, 1, TRAIN)
    together = execute(workspace, 2, TRAIN)
    assert together == alone and alone[0] == "completed"
    (run,) = runs(workspace.path / "with-2")
    assert summary(run)["workers"] == 2 and summary(run)["recoveries"] == 0
    assert len(list((workspace.path / "with-2").glob("imported-*"))) == 3, "the program and two workers"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("cordee.plan(job, workers=1, budget_s=0.05)\n", marks=pytest.mark.long),
        "with cordee.join() as team:\n    assert team.num_workers == 1\n",
        pytest.param("store = cordee.KVStore.local()\nstore.close()\n", marks=pytest.mark.long),
        "try:\n    cordee.train(job, quiet=True, run_dir='a')\nexcept Exception as e:\n    print('failed', e)\n",
    ],
)
def test_other_calls_before_do_not_happen_in_workers(workspace: Workspace, before: str) -> None:
    assert execute(workspace, 2, before + TRAIN)[0] == "completed"
    assert len(runs(workspace.path / "with-2")) == 1


def test_workers_find_the_arguments_of_the_script(workspace: Workspace) -> None:
    """A script that reads its options where it begins: workers that import it read the same ones."""
    options = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--workers', type=int)\n"
        "parser.add_argument('--scale', type=float, default=1.0)\noptions, _ = parser.parse_known_args()\n"
    )
    definitions = DEFINITIONS.replace("self.layer(x)", "self.layer(x) * options.scale")
    (workspace.path / "script.py").write_text(
        options + definitions.replace("WORKERS", "options.workers") + 'if __name__ == "__main__":\n    '
        "run = cordee.train(job, quiet=True)\n    print(run.summary.weights_sha256)\n"
    )
    alone, together = (
        workspace.execute([BIN / "python", "script.py", "--scale", "0.1", "--workers", workers]) for workers in "12"
    )
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone.stdout


def test_what_workers_would_not_see_is_refused(workspace: Workspace) -> None:
    """A variable that changes between two calls: the workers of the second would have the first value."""
    definitions = DEFINITIONS.replace("self.layer(x)", "self.layer(x) * SCALE")
    script = workspace.path / "script.py"
    script.write_text(f"WORKERS = 2\nSCALE = 1.0\n{definitions}{TRAIN}SCALE = 2.0\n{TRAIN}")
    done = workspace.execute([BIN / "python", script])
    assert done.returncode == 1
    assert "uses 'SCALE', which functions or classes above use as well" in done.stderr
    assert "give what changes between the calls as a setting, cordee.Use(Model, name=value)" in done.stderr
    assert len(runs(workspace.path)) == 1, "the first was right"


def test_what_a_function_changes_between_two_calls_is_refused(workspace: Workspace) -> None:
    definitions = DEFINITIONS.replace("self.layer(x)", "self.layer(x) * SCALE")
    setter = "def set_scale(value):\n    global SCALE\n    SCALE = value\n"
    script = workspace.path / "script.py"
    script.write_text(f"WORKERS = 2\nSCALE = 1.0\n{setter}{definitions}{TRAIN}set_scale(2.0)\n{TRAIN}")
    done = workspace.execute([BIN / "python", script])
    assert done.returncode == 1
    assert "'SCALE' was 1.0 at the first call of cordee and is 2.0 now" in done.stderr
    assert len(runs(workspace.path)) == 1, "the first was right"


def test_a_job_file_that_names_a_script_that_trains(workspace: Workspace) -> None:
    (workspace.path / "script.py").write_text(f"WORKERS = 2\n{DEFINITIONS}{TRAIN}class Late: pass\n")
    (workspace.path / "own.toml").write_text(
        'model.use = "script.py:Net"\ndata.use = "script:points"\ndata.test_fraction = 0.25\n'
        'training.epochs = 1\ntraining.batch_size = 8\nstrategy.name = "data_parallel"\nstrategy.workers = 2\n'
    )
    done = workspace.run("train", "own.toml", "--run-dir", "here")
    assert done.returncode == 0, done.stderr
    assert not (workspace.path / "runs").exists()
    done = workspace.run("train", "own.toml", "--run-dir", "there", "--set", "model.use=script.py:Late")
    assert done.returncode == 2
    assert "'Late' is not defined before cordee.train() (at " in done.stderr
    assert "put the call under if __name__ == '__main__':" in done.stderr
