"""The example of the key-value store, where JAX is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from workspace import EXAMPLES, Workspace, write_idx_set

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@pytest.mark.timeout(300)
def test_lenet_in_jax_learns_through_a_store(workspace: Workspace, tmp_path: Path) -> None:
    write_idx_set(tmp_path / "fashion-mnist")
    script = EXAMPLES / "store_jax.py"
    options = ["--local", "--epochs", "2", "--batch-size", "16"]
    done = workspace.execute([sys.executable, script, *options], CORDEE_DATA=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["epoch", "1"], ["epoch", "2"]]
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert losses[1] < losses[0]
