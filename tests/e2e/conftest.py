"""Runs to start from. Starting the command takes two seconds, so what several tests need is made once and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from workspace import Workspace, assert_ended_well, summary


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the job, never disturbed."""
    workspace = Workspace(tmp_path_factory.mktemp("reference"))
    assert_ended_well(workspace.train())
    return workspace.path / "run"


@pytest.fixture(scope="session")
def reference_sha256(reference: Path) -> str:
    return str(summary(reference)["weights_sha256"])


@pytest.fixture(scope="session")
def _half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = Workspace(tmp_path_factory.mktemp("half-done"))
    assert_ended_well(workspace.train("--set", "stop.steps=45"))
    return workspace.path / "run"


@pytest.fixture
def half_done(_half_done: Path, workspace: Workspace) -> Path:
    """A copy of a run of the job that stopped at step 45, with checkpoints of steps 30, 40 and 45."""
    return Path(shutil.copytree(_half_done, workspace.path / "run"))
