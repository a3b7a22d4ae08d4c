"""TensorFlow, Keras and JAX on our collectives: programs that compare what they compute, on two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(300)


def run(*command: str, folder: Path, workers: int = 2, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    arguments = [sys.executable, "-m", "cordee", "run", "-n", str(workers), *command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=250, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("program", ["tensorflow_operations.py", "jax_operations.py"])
def test_operations(program: str, tmp_path: Path) -> None:
    assert run(str(PROGRAMS / program), folder=tmp_path).splitlines()[-1] == "ok 0"


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_fit_of_keras(backend: str, tmp_path: Path) -> None:
    output = run(str(PROGRAMS / "keras_fit.py"), str(tmp_path), folder=tmp_path, KERAS_BACKEND=backend)
    assert output.splitlines()[-1] == f"ok {backend}"


@pytest.mark.parametrize("example", ["tensorflow_towers.py", "jax_loop.py"])
def test_the_examples_print_the_same_on_one_worker_and_on_two(example: str, tmp_path: Path) -> None:
    alone = run(str(EXAMPLES / example), folder=tmp_path, workers=1)
    together = run(str(EXAMPLES / example), folder=tmp_path, workers=2)
    assert "loss" in alone and together == alone


def test_a_script_of_horovod_for_tensorflow_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (EXAMPLES / "tensorflow_towers.py").read_text()
    script.write_text(text.replace("import cordee.horovod.tensorflow as hvd", "import horovod.tensorflow as hvd"))
    output = run("--as-horovod", str(script), folder=tmp_path)
    assert "loss" in output


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_commits_in_the_middle_of_an_epoch_of_fit(backend: str, tmp_path: Path) -> None:
    output = run(str(PROGRAMS / "keras_commits.py"), folder=tmp_path, workers=1, KERAS_BACKEND=backend)
    assert output.splitlines()[-1] == f"ok {backend}"


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_killed_rank_leaves_a_keras_model_as_it_is(backend: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / "keras_elastic.py")
    alone = run(program, folder=tmp_path, workers=1, KERAS_BACKEND=backend).splitlines()[-1]
    together = run("--elastic", program, "kill", folder=tmp_path, workers=2, KERAS_BACKEND=backend)
    assert (tmp_path / "died").exists()
    assert alone.startswith("weights") and together.splitlines()[-1] == alone
