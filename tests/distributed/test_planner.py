"""The planner's measurements with real processes, and its predictions beside real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cordee.bench.planner import CASES, job_of, measure
from cordee.planner.planning import kept_machine, plan
from cordee.strategies.table import STRATEGIES


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_planner_benchmark_at_its_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))
    monkeypatch.setattr("cordee.planner.planning.is_busy", lambda: False)
    monkeypatch.setattr("cordee.planner.kernels.is_busy", lambda: False)  # else they are measured and chosen again
    lenet = [case for case in CASES if case.name == "lenet"]
    journal = tmp_path / "report.json.part"
    lines: list[str] = []
    options: dict[str, Any] = {"workers": (1, 2), "run_s": 0.3, "budget_s": 0.3, "say": lines.append}
    report = measure(rounds=1, cases=["lenet/single", "lenet/data_parallel/2"], journal=journal, **options)
    rows = {(row["strategy"], row["workers"]): row for row in report.rows}
    for way in (("single", 1), ("data_parallel", 2)):
        assert rows[way]["predicted_ms"] > 0 and rows[way]["measured_ms"] > 0
        assert rows[way]["error"] == pytest.approx(rows[way]["predicted_ms"] / rows[way]["measured_ms"] - 1)
        assert rows[way]["predicted_mb"] > 0 and rows[way]["measured_mb"] > 0
    assert ("median error", None) in rows
    measure(rounds=1, cases=["lenet/single"], journal=journal, **options)  # is there already
    assert f"2 cases are in {journal} already" in lines and len([line for line in lines if "single" in line]) == 1
    again = plan(job_of(lenet[0]), workers=2)
    assert again.is_cached and not again.was_busy
    monkeypatch.setattr("cordee.planner.planning.is_busy", lambda: True)
    assert plan(job_of(lenet[0]), workers=2).is_cached  # nothing is measured, so it does not matter
    assert plan(job_of(lenet[0]), workers=1, fresh=True, budget_s=0.1).was_busy
    assert plan(job_of(lenet[0]), workers=1).was_busy  # and stays so until the machine is quiet
    monkeypatch.setattr("cordee.planner.planning.is_busy", lambda: False)
    assert not plan(job_of(lenet[0]), workers=1, budget_s=0.1).was_busy

    machine = kept_machine()
    kinds = {exchange.kind for exchange in machine.exchanges if exchange.num_processes == 2}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "send", "copy"}
    for exchange in machine.exchanges:
        assert min(exchange.seconds) > 0
        if exchange.kind != "copy":
            assert exchange.at(1 << 25) > exchange.at(1 << 10)
    measured = {overhead.strategy for overhead in machine.overheads}
    assert (
        measured == {"single", "data_parallel", "sharded", "pipeline", "tensor", "parameter_server"} & STRATEGIES.keys()
    )
    assert all(overhead.worker_bytes > machine.process_bytes for overhead in machine.overheads)
    assert machine.slowdowns[2] >= 1.0 and machine.process_bytes > 1 << 20
