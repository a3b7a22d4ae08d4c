"""What the processes of every kind of run listen on: nothing beyond this host, unless it was asked for."""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path

import psutil
import pytest

import warm_launch

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "unhurried:Net"
[data]
use = "synthetic"
shape = [16]
num_classes = 4
size = 4096
test_size = 64
[training]
batch_size = 16
steps = 1000000
[strategy]
name = "{strategy}"
workers = {workers}
{settings}
[monitoring]
every_steps = 1
"""
NET = """
import time
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, inputs):
        time.sleep(0.005)
        return super().forward(inputs)
"""
LOOP = """
import pathlib, sys, time
import torch, torch.distributed as dist
import cordee

def main():
    with cordee.join() as team:
        while True:
            team.sum(1.0)
            pathlib.Path(sys.argv[1], f"begun-{team.worker_index}").touch()
            time.sleep(0.01)

if __name__ == "__main__":
    main()
"""


def listening(launcher: int) -> dict[int, list[str]]:
    """Return the addresses on which the processes of a run wait for connections, by process."""
    found: dict[int, list[str]] = {}
    root = psutil.Process(launcher)
    for process in [root, *root.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(process.pid, []).append(connection.laddr.ip)
    return found


def check_loopback(found: dict[int, list[str]]) -> None:
    assert all(ipaddress.ip_address(address).is_loopback for some in found.values() for address in some), found


def wait_for(path: Path, text: str, process: warm_launch.WarmProcess) -> None:
    deadline = time.monotonic() + 150
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {text} in {path}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("strategy", "workers", "settings"),
    [
        ("single", 1, ""),
        ("data_parallel", 2, ""),
        ("sharded", 2, ""),
        ("pipeline", 2, ""),
        ("tensor", 2, 'plan = {"0" = "column", "2" = "row"}'),
        ("hybrid", 2, "mesh = {data = 1, pipeline = 2}"),
        ("parameter_server", 2, "servers = 1"),
    ],
)
def test_a_run_listens_on_this_host_only(tmp_path: Path, strategy: str, workers: int, settings: str) -> None:
    (tmp_path / "unhurried.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB.format(strategy=strategy, workers=workers, settings=settings))
    process = warm_launch.start("train", tmp_path / "job.toml", "--run-dir", tmp_path / "run", folder=tmp_path)
    try:
        wait_for(tmp_path / "run" / "events.jsonl", '"type":"step"', process)
        found = listening(process.pid)
    finally:
        process.kill()
        process.communicate()
    check_loopback(found)
    if strategy == "data_parallel":
        assert len(found) == 1, "only the coordinator listens: gloo is not needed inside a host"


def test_a_script_listens_on_this_host_only(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    process = warm_launch.start("run", "-n", "2", tmp_path / "loop.py", tmp_path, folder=tmp_path)
    try:
        wait_for(tmp_path / "begun-1", "", process)
        found = listening(process.pid)
    finally:
        process.kill()
        process.communicate()
    check_loopback(found)
    assert list(found) == [process.pid], "the launcher has the store, and no worker listens"
