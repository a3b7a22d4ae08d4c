"""A plain script under torchrun needs nothing but the name of the backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("cordee")
data = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(data)
assert data.tolist() == [3.0] * 3
assert dist.get_backend() == "cordee"
print("reached the end")  # without destroying the group, as many scripts do
"""


@pytest.fixture(scope="module")
def warm_processes() -> None:
    """The processes of this file start from nothing: torch finds the backend when it is imported."""


@pytest.mark.timeout(90)
def test_a_script_without_a_word_about_cordee_but_the_backend(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("reached the end") == 2
