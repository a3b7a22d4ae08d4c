"""`make quickstart`: what it promises, without the installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import EXAMPLES


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_strategies_a_killed_worker_and_a_report(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), str(tmp_path / "show")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("show/*/summary.json")}
    assert {summary["strategy"] for summary in summaries.values()} == {"data_parallel", "parameter_server", "local_sgd"}
    assert all(summary["status"] == "completed" and summary["workers"] == 2 for summary in summaries.values())
    assert all(summary["test_accuracy"] > 0.9 for summary in summaries.values())
    assert summaries["all-reduce"]["recoveries"] >= 1
    events = [json.loads(line) for line in (tmp_path / "show/all-reduce/events.jsonl").read_text().splitlines()]
    assert sum(event["type"] == "worker_started" and event["worker"] == 1 for event in events) >= 2  # it is back
    assert (tmp_path / "show" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "all-reduce" in (tmp_path / "show" / "report.html").read_text()
    assert "next" in done.stdout
