"""Groups across hosts: shared memory inside each, connections of the group's own between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from backend_pool import ProcessPool

from cordee.communication.shared_memory import BackendSettings
from cordee.communication.shared_memory.two_level import TwoLevel

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
    operations = getattr(dist.group.WORLD, "_operations", None)
    return (len(operations.hosts), operations.host.num_members) if isinstance(operations, TwoLevel) else (0, 0)


def listening_ports(rank: int) -> list[int]:
    """Return the TCP ports at which this process listens."""
    own = psutil.Process().net_connections("tcp")
    return [connection.laddr.port for connection in own if connection.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("encrypt", [False, True])
def test_two_hosts_with_two_and_three_members(encrypt: bool) -> None:
    with ProcessPool(5, [replace(settings, encrypt=encrypt) for settings in TWO_HOSTS]) as pool:
        assert pool.run(count_hosts) == [(2, 2), (2, 3), (2, 2), (2, 3), (2, 3)]
        assert pool.run(listening_ports) == [[]] * 5
        pool.run(use_all)
        pool.run(use_ddp)
        assert pool.run(listening_ports) == [[]] * 5
        pool.leave()


def test_without_shared_memory_everything_goes_to_gloo() -> None:
    with ProcessPool(2, BackendSettings(shared_memory=False)) as pool:
        assert pool.run(count_hosts) == [(0, 0), (0, 0)]
        pool.run(use_all)
        pool.leave()


def use_sub_groups(rank: int) -> None:
    """Rows and columns of a mesh: groups inside a host, and across."""
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 0, 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            data = torch.full((1000,), float(rank))
            dist.all_reduce(data, group=group)
            assert data.eq(sum(ranks)).all()
            told: list[Any] = [None] * len(ranks)
            dist.all_gather_object(told, {"rank": rank}, group=group)
            assert told == [{"rank": dist.get_global_rank(group, place)} for place in range(len(ranks))]


def pass_around(rank: int) -> None:
    """Messages between all, of all sizes, with tags out of order, and from whoever is first."""
    size = dist.get_world_size()
    for length in (0, 1, 1000, 700_001):
        others = [other for other in range(size) if other != rank]
        received = {(other, tag): torch.zeros(length) for other in others for tag in (2, 1)}
        works = [
            dist.isend(torch.full((length,), 100.0 * rank + tag), other, tag=tag) for other in others for tag in (1, 2)
        ]
        works += [dist.irecv(data, other, tag=tag) for (other, tag), data in received.items()]
        for work in works:
            assert work is not None
            work.wait()
        for (other, tag), data in received.items():
            assert data.eq(100 * other + tag).all()
    if rank == 0:
        data = torch.zeros(10)
        sources = sorted(dist.recv(data) for _ in range(size - 1))
        assert sources == list(range(1, size))
    else:
        dist.send(torch.full((10,), float(rank)), 0)


@pytest.mark.parametrize("encrypt", [False, True])
def test_sub_groups_and_messages(encrypt: bool) -> None:
    places = [BackendSettings(host_id=name, encrypt=encrypt) for name in ("left", "right", "left", "right")]
    with ProcessPool(4, places) as pool:
        pool.run(use_sub_groups)
        pool.run(pass_around)
        pool.leave()


def send_sparse(rank: int) -> None:
    dist.all_reduce(torch.eye(3).to_sparse())


def test_what_only_gloo_does_is_refused_where_gloo_would_not_encrypt() -> None:
    with ProcessPool(2, [BackendSettings(host_id=name, encrypt=True) for name in ("left", "right")]) as pool:
        pool.post(send_sparse)
        for rank in range(2):
            answer = pool.answer(rank)
            assert answer[0] == "error"
            assert "left to gloo, which does not encrypt" in answer[1]


def form_unlike(rank: int) -> None:
    dist.new_group(pg_options=BackendSettings(host_id=str(rank), encrypt=rank == 0))


def test_members_that_differ_in_what_must_be_the_same_are_refused() -> None:
    with ProcessPool(2, [BackendSettings(host_id=str(rank)) for rank in range(2)]) as pool:
        pool.post(form_unlike)
        said = [pool.answer(rank)[1] for rank in range(2)]
        assert all("encrypt of BackendSettings is True on rank 0" in text for text in said), said


def disagree(rank: int) -> None:
    dist.all_reduce(torch.zeros(4 + rank))


def test_a_peer_on_another_host_that_calls_something_else_is_named() -> None:
    with ProcessPool(2, [BackendSettings(host_id=name) for name in ("left", "right")]) as pool:
        pool.post(disagree)
        said = [pool.answer(rank)[1] for rank in range(2)]
        assert any("is in all_reduce(" in text and "while this rank is in all_reduce(" in text for text in said), said


def wait_long(rank: int) -> None:
    dist.all_reduce(torch.zeros(10))


LOST = [BackendSettings(host_id=name, failure_timeout_s=2.0) for name in ("left", "right", "left", "right")]


@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize(("signal_number", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 6.0)])
def test_a_member_of_another_host_that_dies_or_freezes_ends_the_wait(
    lost: int, signal_number: signal.Signals, within_s: float
) -> None:
    with ProcessPool(4, LOST) as pool:
        waiting = [rank for rank in range(4) if rank != lost]
        pool.post(wait_long, ranks=waiting)
        time.sleep(0.3)
        began_s = time.monotonic()
        os.kill(pool.pids[lost], signal_number)
        said = [pool.answer(rank, 15)[1] for rank in waiting]
        assert time.monotonic() - began_s < within_s, said
        assert all("CommunicationError" in text for text in said), said
        assert any(f"rank {lost} " in text for text in said), said


def receive_from(rank: int, source: int) -> None:
    dist.recv(torch.zeros(10), source)


def test_a_message_of_a_peer_that_dies_on_another_host_never_comes() -> None:
    with ProcessPool(2, [BackendSettings(host_id=name) for name in ("left", "right")]) as pool:
        pool.post(receive_from, 1, ranks=[0])
        time.sleep(0.2)
        os.kill(pool.pids[1], signal.SIGKILL)
        assert "died or was cut off" in pool.answer(0, 5)[1]


WORKER = """
import sys
sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist
from cordee.communication.shared_memory import BackendSettings, register
from test_frameworks import run_pipeline, run_tensor_parallel, train_fsdp
from test_hosts import count_hosts, pass_around, use_all, use_ddp, use_sub_groups
torch.set_num_threads(1)
register()
rank = int(sys.argv[1])
settings = BackendSettings(encrypt=sys.argv[3] == "encrypt")
dist.init_process_group("cordee", init_method="file://" + sys.argv[2], rank=rank, world_size=4, pg_options=settings)
assert count_hosts(rank) == (2, 2), count_hosts(rank)
for use in (use_all, use_ddp, use_sub_groups, pass_around, train_fsdp, run_tensor_parallel, run_pipeline):
    use(rank)
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


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["plain", "encrypt"])
def test_two_network_namespaces_are_two_hosts(two_networks: list[str], tmp_path: Path, how: str) -> None:
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
                how,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=130)
            assert output.strip().endswith("done"), output
    finally:
        for process in processes:
            process.kill()
            process.wait()
