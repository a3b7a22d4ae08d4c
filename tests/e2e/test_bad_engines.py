"""Engines that cannot be used, at the command: one message, exit code 2, nothing begun. No cluster is needed for it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from workspace import Workspace, assert_refused

pytestmark = pytest.mark.timeout(300)
# `make test-ray` and `make test-spark` have environments of their own: here the packages are not installed.
PACKAGES = {"ray": "ray", "spark": "pyspark"}
each_missing = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=pytest.mark.skipif(find_spec(package) is not None, reason=f"{package} is installed"))
        for engine, package in PACKAGES.items()
    ],
)


@each_missing
def test_a_missing_package_is_named_with_its_extra(engine: str, workspace: Workspace) -> None:
    done = workspace.train("--engine", engine)
    assert_refused(done, 2, f"engine '{engine}' needs optional packages: pip install 'cordee[{engine}]'")
    assert not (workspace.path / "run").exists()


@each_missing
def test_doctor_names_the_missing_package(engine: str, workspace: Workspace) -> None:
    done = workspace.run("doctor", "--engine", engine)
    assert done.returncode == 1 and f"cordee[{engine}]" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--engine", "ray", "--set", "cluster.connect=ray://h:10001"], ["is an address of Ray Client", "job submit"]),
        (["--engine", "spark", "--set", "cluster.connect=sc://h"], ["Spark Connect", "spark://HOST:7077"]),
        (["--engine", "env"], ["no launcher is recognised"]),
        (["--engine", "agents"], ["needs cluster.address"]),
        (["--engine", "slurm"], ["there is no engine 'slurm': use the engine 'env'"]),
        (["--set", "cluster.connect=head:6379"], ["cluster.connect = 'head:6379'", "'ray' or 'spark'"]),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(arguments: list[str], facts: list[str], workspace: Workspace) -> None:
    assert_refused(workspace.train(*arguments), 2, *facts)
    assert not (workspace.path / "run").exists()
