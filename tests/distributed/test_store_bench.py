"""`cordee bench server` at its smallest: that it measures, not what."""

from __future__ import annotations

import pytest

from cordee.bench import server

pytestmark = pytest.mark.long


def test_every_part_measures() -> None:
    said: list[str] = []
    report = server.measure(rounds=2, sizes=(256, 1 << 19), far_sizes=(256,), num_pushes=50, say=said.append)
    near = [row for row in report.rows if row["where"] == "one host"]
    assert [row["floats"] for row in near] == [256, 1 << 19] and all(row["times_peer"] > 0 for row in near)
    far = [row["peer"] for row in report.rows if row["where"] == "two networks"]
    assert far == ["echo with CURVE", "echo"] or "left out" in report.settings["two_networks"]
    assert len(report.raw["cordee, one host, 256 floats"]) == 2
    assert report.settings["server_bytes"]["after all"] > 0 and any("memory" in line for line in said)
