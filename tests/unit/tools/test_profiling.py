"""Where the time of a step goes, in words, and a real profile of a small job."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.core.errors import JobError
from cordee.launch import train
from cordee.monitoring.timeline import Phase
from cordee.tools.profiling import (
    TRACE_FILE,
    Operation,
    Profile,
    describe_profile,
    group_operations,
    phases_of,
    profile_overrides,
    read_profile,
)

FOUND = Profile(
    worker=1,
    steps=10,
    seconds=1.0,
    operations=[
        Operation("aten::addmm", 30, 0.5),
        Operation("Optimizer.step#Adam.step", 10, 0.2),
        Operation("aten::relu", 20, 0.1),
    ],
)


def test_operations_are_grouped() -> None:
    groups = group_operations(FOUND)
    assert groups["matrix products"] == pytest.approx(0.5)
    assert sum(groups.values()) == pytest.approx(FOUND.seconds)
    assert groups["outside of torch's operations"] == pytest.approx(0.2)


def test_it_says_where_the_time_goes() -> None:
    phases = [0] * len(Phase)
    phases[Phase.COMPUTE], phases[Phase.WAIT] = 750, 250
    text = "\n".join(describe_profile(FOUND, phases))
    assert "worker 1, 10 steps: 100 ms a step" in text
    assert "compute 75.0 %, wait 25.0 %" in text
    assert "The largest part of a step, 50 %, is matrix products." in text


def test_a_real_job_is_profiled(tmp_path: Path) -> None:
    job = {"model": {"use": "mlp", "hidden": [8]}, "data": "iris", "training": {"batch_size": 8, "epochs": 5}}
    folder = tmp_path / "run"
    train(job, overrides=profile_overrides(folder, 0, 2, 5), run_dir=folder, quiet=True)
    found = read_profile(folder)
    assert (found.worker, found.steps) == (0, 5)
    calls = {each.name: each.calls for each in found.operations}
    assert calls["aten::addmm"] == 2 * 5  # two layers in five steps
    assert 0 < sum(each.seconds for each in found.operations) <= found.seconds
    assert sum(phases_of(folder, 0)) > 0
    assert (folder / TRACE_FILE).read_bytes().startswith(b"\x1f\x8b")


def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no step was profiled"):
        read_profile(tmp_path)
    with pytest.raises(JobError, match="must be at least 1"):
        profile_overrides(tmp_path, 0, 1, 0)
