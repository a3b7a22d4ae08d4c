"""Which backend a group exchanges CUDA tensors with; and that it does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from cordee.communication.shared_memory import BackendSettings, backend, register
from cordee.communication.shared_memory.gpus import GpuOperations, PlainNccl, choose_backend, own_gpu, uses_nccl
from cordee.communication.shared_memory.liveness import abandon_groups
from cordee.core.errors import CommunicationError


def test_nccl_is_for_members_with_a_gpu_of_their_own() -> None:
    assert choose_backend([("a", "0"), ("a", "1"), ("b", "0")]) == "nccl"
    assert choose_backend([("a", "0"), ("a", "0")]) == "gloo"
    assert choose_backend([("a", "0"), ("a", "")]) == "gloo"


def test_what_a_program_asks_for_is_taken() -> None:
    assert choose_backend([("a", "0"), ("a", "0")], "nccl") == "nccl"
    assert choose_backend([("a", "0"), ("a", "1")], "gloo") == "gloo"
    with pytest.raises(CommunicationError, match="not by 'ucc'"):
        choose_backend([("a", "0")], "ucc")


def test_a_process_that_has_not_used_a_gpu_has_none() -> None:
    assert own_gpu() == ""


class Recorder:
    """In the place of NCCL. Notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return SimpleNamespace(wait=lambda: True)

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(backend, "form_nccl", lambda *args: found)
    return found


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    register()
    dist.init_process_group(
        request.param,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
        pg_options=BackendSettings(),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("world", ["cpu:cordee,cuda:nccl"], indirect=True)
def test_cuda_tensors_go_to_nccl_and_others_do_not(world: Any, recorder: Recorder) -> None:
    dist.all_reduce(torch.ones(2))
    assert recorder.calls == [] and uses_nccl(world)
    with FakeTensorMode():
        one, two = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:0")
        dist.all_reduce(one)
        dist.all_gather_single(one, two)
        dist.reduce_scatter_single(one, two)
        dist.all_gather([one], two)
        dist.all_to_all_single(one, two)
        world.send([one], 0, 0)
        world.recv([one], 0, 0)
    assert recorder.calls == [
        *("allreduce", "_allgather_base", "_reduce_scatter_base", "allgather", "alltoall_base", "send", "recv")
    ]


@pytest.mark.parametrize("world", ["cpu:cordee,cuda:nccl"], indirect=True)
def test_a_lost_member_ends_what_nccl_waits_for(world: Any, recorder: Recorder) -> None:
    assert uses_nccl(world)
    abandon_groups("worker 1 was lost")
    assert recorder.calls == ["abort"]
    with FakeTensorMode(), pytest.raises(CommunicationError, match="worker 1 was lost"):
        dist.all_reduce(torch.ones(2, device="cuda:0"))
    world.shutdown()
    assert "shutdown" not in recorder.calls  # it would wait for those who are lost


@pytest.mark.parametrize("world", ["cordee"], indirect=True)
def test_without_gpus_there_is_no_nccl(world: Any, recorder: Recorder) -> None:
    assert not uses_nccl(world)


@pytest.mark.parametrize("world", ["cordee"], indirect=True)
def test_operations_are_formed_once_and_end_with_their_group(world: Any) -> None:
    formed: list[Recorder] = []

    def form(asked: str) -> Recorder:
        assert asked == ""
        formed.append(Recorder())
        return formed[-1]

    operations = GpuOperations(form)
    assert not formed  # a group that has no CUDA tensors forms nothing
    assert operations.get(world) is operations.get(world) and len(formed) == 1
    operations.close()
    assert formed[0].calls == ["shutdown"]
    with pytest.raises(CommunicationError, match="destroyed"):
        operations.get(world)


def test_a_group_of_nccl_alone_is_aborted_too() -> None:
    group = Recorder()
    kept = PlainNccl(group)
    abandon_groups("it is over")
    assert kept.group.calls == ["abort"]
