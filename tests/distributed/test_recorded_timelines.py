"""What real runs of two workers record of themselves: phases, states, a killed worker, a slow loader."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import warm_launch
from cordee.core import Job, fault_points
from cordee.monitoring.diagnosis import add_up, diagnose_phases
from cordee.monitoring.timeline import Line, Phase, follow_member, list_members
from cordee.monitoring.trace import write_trace

pytestmark = pytest.mark.timeout(240)

# Worker 1 reads slowly: both compute the same, and worker 0 has to wait.
SLOW = """
import time
import torch
from torch.utils.data import Dataset

class Slow(Dataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        from cordee.core import fault_points
        if fault_points._process == "worker-1":
            time.sleep(0.004)
        return torch.full((6,), float(index % 3)), index % 3

def data():
    return Slow(400), Slow(20)
"""
JOB: dict[str, Any] = {
    "model": {"use": "mlp", "hidden": [16]},
    "data": {"use": "synthetic", "shape": [6], "size": 90, "test_size": 16, "num_classes": 3},
    "optimizer": {"use": "sgd", "lr": 0.1},
    "training": {"batch_size": 12, "steps": 40, "threads": 1},
    "evaluation": {"every_steps": 20},
    "strategy": {"name": "data_parallel", "workers": 2},
}


def train(folder: Path, faults: Sequence[fault_points.Fault] = (), **changes: Any) -> dict[str, list[Line]]:
    table = {section: {**JOB.get(section, {}), **changes.get(section, {})} for section in {*JOB, *changes}}
    if "data" in changes:
        table["data"] = changes["data"]
    (folder / "job.toml").write_text(Job.from_dict({**table, "python_path": [str(folder)]}).to_toml())
    environment = dict(os.environ)
    if faults:
        (where := folder / "faults").mkdir()
        (where / fault_points.FAULTS_FILE).write_bytes(msgspec.json.encode(faults))
        environment["CORDEE_FAULTS"] = str(where)
    process = warm_launch.start("train", "job.toml", "--run-dir", "run", folder=folder, environment=environment)
    out = "".join(process.communicate(timeout=180))
    assert process.returncode == 0, out
    return {member: follow_member(folder / "run", member)[0] for member in list_members(folder / "run")}


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "single", "workers": 1},
        {"name": "data_parallel"},
        {"name": "sharded"},
        {"name": "parameter_server", "staleness": 0},
        {"name": "parameter_server", "staleness": "unbounded"},
        {"name": "local_sgd", "sync_every": 5},
        {"name": "pipeline"},
        {"name": "tensor"},
    ],
    ids=lambda strategy: "-".join(str(value) for value in strategy.values()),
)
def test_every_strategy_records_its_steps_and_phases(tmp_path: Path, strategy: dict[str, Any]) -> None:
    recorded = train(tmp_path, strategy=strategy)
    num_workers = strategy.get("workers", 2)
    timelines = {member: lines for member, lines in recorded.items() if member.startswith("worker")}
    assert list(timelines) == [f"worker-{index}" for index in range(num_workers)]
    servers = recorded.keys() - timelines.keys()  # they have no phases
    assert servers == ({"server-0"} if strategy["name"] == "parameter_server" else set())
    assert all(recorded[server][-1].cpu_us > 0 and recorded[server][-1].memory_bytes > 0 for server in servers)
    for member, lines in timelines.items():
        totals = add_up(lines)
        assert totals[Phase.COMPUTE] > 0, member
        if num_workers > 1:
            assert totals[Phase.EXCHANGE] + totals[Phase.WAIT] > 0, member
        states = [state for line in lines for _, state in line.states]
        assert states[-1] == "ended" and "training" in states, states
        assert states.index("loading") < states.index("training")
    taken = {member: sum(sum(line.steps) for line in lines) for member, lines in timelines.items()}
    if strategy["name"] != "parameter_server":
        assert set(taken.values()) == {40}
        assert all(add_up(lines)[Phase.EVALUATE] > 0 for lines in timelines.values())
    else:
        assert sum(taken.values()) >= 40


def test_a_killed_worker_has_a_gap_and_its_replacement_goes_on_in_the_same_track(tmp_path: Path) -> None:
    # Two workers at least: the survivor waits for the replacement, however short the rest of the run is.
    fault = fault_points.Fault("step.taken", "worker-1", "kill", 25)
    timelines = train(tmp_path, [fault], cluster={"min_workers": 2})
    lines = timelines["worker-1"]
    assert len({line.pid for line in lines}) == 2
    assert [state for line in lines for _, state in line.states].count("starting") == 2
    assert len({line.pid for line in timelines["worker-0"]}) == 1
    states = [state for line in timelines["worker-0"] for _, state in line.states]
    assert states.count("joining") == 2, "the survivor has joined the next generation"
    assert max(step for line in lines for step in line.step) == 40
    num_rows, num_members = write_trace(tmp_path / "run", tmp_path / "trace.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert num_members == 2 and num_rows == sum(event.get("cat") == "step" for event in trace)
    assert [event["name"] for event in trace if event["name"] == "lost"] == ["lost"]
    ends: dict[int, list[int]] = {}
    for event in trace:  # strictly nested: phases fill their step, and steps follow each other
        if event["ph"] != "X":
            continue
        stack = ends.setdefault(event["tid"], [])
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1], event
        stack.append(event["ts"] + event["dur"])


def test_a_slow_loader_is_named_and_its_peer_waits(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    timelines = train(
        tmp_path, data={"use": "slow:data"}, training={"batch_size": 16, "steps": 80}, evaluation={"every_steps": 0}
    )
    slow, fast = add_up(timelines["worker-1"]), add_up(timelines["worker-0"])
    assert slow[Phase.DATA] / sum(slow) > 0.5, slow
    assert fast[Phase.DATA] / sum(fast) < 0.2, fast
    assert fast[Phase.WAIT] / sum(fast) > 0.5, "the peer of a slow loader waits, and does not exchange"
    assert fast[Phase.EXCHANGE] / sum(fast) < 0.2, fast
    said = diagnose_phases({"worker-0": fast, "worker-1": slow})
    assert said.startswith("worker 1 waits for its data") and said.endswith("raise data.processes")
