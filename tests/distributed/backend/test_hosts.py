"""Groups across hosts: shared memory inside each, gloo between one member of each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_pool import ProcessPool

from cordee.communication.shared_memory import BackendSettings

TWO_HOSTS = [BackendSettings(host_id=name, slot_bytes=8192) for name in ("left", "right", "left", "right", "right")]


def use_all(rank: int) -> None:
    size = dist.get_world_size()
    data = torch.full((30_001,), float(rank + 1))
    dist.all_reduce(data)
    assert data.eq(size * (size + 1) / 2).all()
    dist.all_reduce(data.fill_(rank), op=dist.ReduceOp.AVG)
    assert data.eq((size - 1) / 2).all()
    dist.all_reduce(data.fill_(rank), op=dist.ReduceOp.MAX)
    assert data.eq(size - 1).all()
    work = dist.all_reduce(data.fill_(rank), op=dist.ReduceOp.MIN, async_op=True)
    assert work is not None
    work.wait()
    assert data.eq(0).all()
    for root in range(size):
        dist.broadcast(data.fill_(rank), root)
        assert data.eq(root).all()
    dist.barrier()
    outputs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3,), float(rank)))
    assert [int(output[0]) for output in outputs] == list(range(size))
    if rank == 0:
        dist.send(torch.arange(4.0), size - 1)
    if rank == size - 1:
        received = torch.zeros(4)
        dist.recv(received, 0)
        assert received.tolist() == [0, 1, 2, 3]


def use_ddp(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))
    model(torch.randn(3, 5)).sum().backward()
    gradient = model.module.weight.grad.clone()
    dist.broadcast(gradient, 0)
    assert torch.equal(gradient, model.module.weight.grad)


def count_hosts(rank: int) -> tuple[int, int]:
    group = dist.group.WORLD
    two_level = getattr(group, "_two_level", None)
    return (0, 0) if two_level is None else (len(two_level.hosts), two_level.host.num_members)


def test_two_hosts_with_two_and_three_members() -> None:
    with ProcessPool(5, TWO_HOSTS) as pool:
        assert pool.run(count_hosts) == [(2, 2), (2, 3), (2, 2), (2, 3), (2, 3)]
        pool.run(use_all)
        pool.run(use_ddp)
        pool.leave()


def test_one_member_per_host_and_no_shared_memory_go_to_gloo() -> None:
    for settings in (
        [BackendSettings(host_id="left"), BackendSettings(host_id="right")],
        BackendSettings(shared_memory=False),
    ):
        with ProcessPool(2, settings) as pool:
            assert pool.run(count_hosts) == [(0, 0), (0, 0)]
            pool.run(use_all)
            pool.leave()


WORKER = """
import sys
sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist
from cordee.communication.shared_memory import register
from test_hosts import count_hosts, use_all
torch.set_num_threads(1)
register()
rank = int(sys.argv[1])
dist.init_process_group("cordee", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
assert count_hosts(rank) == (2, 2), count_hosts(rank)
use_all(rank)
dist.destroy_process_group()
print("done")
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    names = [f"cordee{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "rope0", "netns", names[0], "type", "veth", "peer", "name", "rope0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "rope0")
            ip("-n", name, "link", "set", "rope0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    try:
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@pytest.mark.timeout(100)
def test_two_network_namespaces_are_two_hosts(two_networks: list[str], tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(folder=str(Path(__file__).parent)))
    processes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                two_networks[rank % 2],
                sys.executable,
                str(script),
                str(rank),
                str(tmp_path / "meet"),
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "rope0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=80)
            assert output.strip().endswith("done"), output
    finally:
        for process in processes:
            process.kill()
            process.wait()
