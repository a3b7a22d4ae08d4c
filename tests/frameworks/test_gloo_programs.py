"""Programs of other tools that ask for gloo, started by `cordee run` and torchrun: with and without our backend."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
CORDEE_RUN = ["-m", "cordee", "run", "-n", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(300)


def run(command: list[str], program: str, folder: Path, **variables: str) -> str:
    """Return the line that the program prints on its first worker."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    arguments = [sys.executable, *command, str(PROGRAMS / program), str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=250, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("group ")]
    return line


def split(line: str) -> tuple[str, str, float]:
    """Return the group's class, what is between, and the sum of the weights."""
    group, weights = line.removeprefix("group ").split(" weights ")
    kind, rest = group.split(" ", 1)
    return kind, rest, float(weights)


@pytest.mark.parametrize("program", ["accelerate_program.py", "lightning_program.py", "trainer_program.py"])
def test_a_program_that_asks_for_gloo_trains_the_same_on_our_backend(program: str, tmp_path: Path) -> None:
    kind, rest, weights = split(run(TORCHRUN, program, tmp_path))
    assert kind == "ProcessGroup" and rest.startswith("gloo")
    replaced = [
        run([*CORDEE_RUN, "--replace-gloo"], program, tmp_path),
        run(TORCHRUN, program, tmp_path, CORDEE_REPLACE_GLOO="1"),
    ]
    for line in replaced:
        own_kind, own_rest, own_weights = split(line)
        assert own_kind == "CordeeProcessGroup"
        assert own_rest == rest  # the name of the backend, what was gathered, the loss to 6 places
        assert math.isclose(own_weights, weights, rel_tol=1e-6)  # sums of two gradients in float32
