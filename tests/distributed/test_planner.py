"""The planner's measurements with real processes, and its predictions beside real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cordee
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


@pytest.mark.timeout(240)
def test_a_run_flows_back_into_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cordee.planner.planning.is_busy", lambda: False)
    monkeypatch.setattr("cordee.planner.kernels.is_busy", lambda: False)
    monkeypatch.setattr("cordee.planner.recording.is_calm", lambda *_: True)  # whatever else this machine does
    job: dict[str, Any] = {
        "model": {"use": "mlp", "hidden": [64]},
        "data": "digits",
        "training": {"batch_size": 32, "threads": 1, "steps": 3000, "memory_format": "contiguous"},
        "strategy": {"name": "single"},
        "monitoring": {"every_steps": 20},
        "evaluation": {"every_epochs": 0},
        "checkpoint": {"every_steps": 0},
        "stop": {"time": 4},
    }
    before = plan(job, workers=1, budget_s=0.2).choice
    assert before.num_runs == 0 and before.interval is not None
    run = cordee.train(job, run_dir=tmp_path / "run", quiet=True)
    assert run.summary.predicted_step_interval == pytest.approx(before.interval)
    after = plan(job, workers=1).choice
    measured_s = run.summary.step_seconds
    assert after.num_runs == 1 and measured_s is not None
    assert abs(after.step_s - measured_s) <= abs(before.step_s - measured_s) + 0.2 * measured_s
    assert after.memory_bytes == run.summary.peak_memory_bytes
    cordee.train({**job, "strategy": {"name": "data_parallel", "workers": 2}}, run_dir=tmp_path / "two", quiet=True)
    (file,) = (tmp_path / "cache" / "runs").iterdir()
    alone, two = json.loads(file.read_bytes())["ways"]
    assert (alone["strategy"], two["strategy"], two["workers"]) == ("single", "data_parallel", 2)
    assert two["runs"][0]["step_s"] > 0 and two["runs"][0]["peak_bytes"] > 0 and two["runs"][0]["exchange"] > 0
    job["training"]["batch_size"] = 16  # another job
    assert plan(job, workers=1, budget_s=0.2).choice.num_runs == 0
    job["training"]["batch_size"] = 32
    assert plan(job, workers=1, fresh_profile=True, budget_s=0.2).choice.num_runs == 0
