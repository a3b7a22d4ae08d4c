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
    outcome = runs.train(tmp_path, *settings, HOME=str(tmp_path))  # where Ray writes a token for its own Rays
    assert outcome.code == 0, outcome.output
    assert "started on this host for this run" in outcome.output
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
