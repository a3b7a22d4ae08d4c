"""The engine `ray` where no Ray runs. Run by `make test-ray`, before the tests that start one."""

from __future__ import annotations

from pathlib import Path

import engine_runs as runs
import psutil
import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(1200)


def test_without_an_address_a_ray_is_started_and_ended(tmp_path: Path) -> None:
    if raylets():
        pytest.skip("another Ray runs on this machine, and would be used")
    settings = (*runs.settings_of("data_parallel"), "cluster.engine=ray")
    # At home Ray writes a token for its own Rays.
    with runs.training(tmp_path, *settings, "training.epochs=100", HOME=str(tmp_path)) as (process, run):
        runs.wait_until(lambda: runs.read_events(run, "worker_started") or process.poll() is not None)
        (worker, *_) = runs.read_events(run, "worker_started")
        assert psutil.Process(worker["pid"]).nice() == psutil.Process().nice(), "Ray would give it 15 more"
        output, _ = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 0, output
    assert "started on this host for this run" in output
    runs.wait_until(lambda: not raylets(), 10.0)


def raylets() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == "raylet":
                found.append(process)
        except psutil.Error:
            continue
    return found
