"""What PyTorch builds on process groups runs on the cordee backend and gives what it gives on gloo."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_pool import ProcessPool
from torch import nn


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def take_steps(model: nn.Module, rank: int, num_steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(num_steps):
        inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()


def train_ddp(rank: int, hook: str = "") -> list[torch.Tensor]:
    model = make_model()
    # Buckets of 1 KB: several all-reduces per step, started from inside backward.
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        parallel.register_comm_hook(dist.group.WORLD, getattr(default_hooks, hook))
    take_steps(parallel, rank)
    return [parameter.detach() for parameter in model.parameters()]


def train_power_sgd(rank: int, has_delays: bool) -> list[torch.Tensor]:
    """A hook that starts collectives in callbacks of others, on buckets of which several are on their way."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = make_model()
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    delays = random.Random(rank)

    def be_late() -> None:
        if has_delays:
            time.sleep(0.006 * delays.random())  # often past the patience of the others

    parallel.register_comm_hook(state, lambda state, bucket: be_late() or powerSGD_hook(state, bucket))
    take_steps(parallel, rank, num_steps=8)
    return [parameter.detach() for parameter in model.parameters()]


def train_fsdp(rank: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    take_steps(model, rank)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def run_tensor_parallel(rank: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    alone = copy.deepcopy(model)
    parallel = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    together, expected = parallel(inputs), alone(inputs)
    torch.testing.assert_close(together, expected)
    together.sum().backward()
    expected.sum().backward()
    gradient: Any = model[0].weight.grad
    torch.testing.assert_close(gradient.full_tensor(), alone[0].weight.grad)
    return []


def run_pipeline(rank: int) -> list[torch.Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    num_stages = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(num_stages)]
    inputs, target = torch.randn(16, 8), torch.randn(16, 8)
    found: list[torch.Tensor] = []
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(copy.deepcopy(layers[rank]), rank, num_stages, torch.device("cpu"))
        schedule = schedule_type(stage, 4, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == num_stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        found += [loss.detach() for loss in losses]
        found += [parameter.grad for parameter in stage.submod.parameters() if parameter.grad is not None]
    return found


def use_functional_collectives(rank: int) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    size = dist.get_world_size()
    base = torch.arange(4.0 * size) + rank
    results = [
        functional.all_reduce(base, "sum", group),
        functional.all_gather_tensor(base, 0, group),
        functional.reduce_scatter_tensor(base, "avg" if dist.get_backend() != "gloo" else "sum", 0, group),
        functional.all_to_all_single(base, None, None, group),
        *functional.all_reduce_coalesced([base, base * 2], "sum", group),
        *functional.all_gather_into_tensor_coalesced([base, base * 2], group),
        *functional.reduce_scatter_tensor_coalesced([base, base * 2], "sum", [0, 0], group),
    ]
    results = [functional.wait_tensor(result) for result in results]
    if dist.get_backend() == "gloo":
        results[2] = results[2] / size
    return results


def use_sub_groups(rank: int) -> list[torch.Tensor]:
    groups = [dist.new_group([0, 1]), dist.new_group([1]), dist.new_group([0, dist.get_world_size() - 1])]
    data = torch.full((3,), float(rank))
    for index, group in enumerate(groups):
        if dist.get_rank(group) >= 0:
            dist.all_reduce(data, group=group)
            dist.broadcast(data, group=group, group_src=dist.get_world_size(group) - 1)
            data += index
    objects = [{"rank": rank}]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{"rank": 1}]
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return [data]


@pytest.fixture(scope="module", params=[2, 3])
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[ProcessPool, ProcessPool]]:
    with ProcessPool(request.param) as ours, ProcessPool(request.param, backend="gloo") as reference:
        yield ours, reference
        ours.leave()
        reference.leave()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (train_ddp, ()),
        (train_ddp, ("fp16_compress_hook",)),
        (train_fsdp, ()),
        (run_tensor_parallel, ()),
        (run_pipeline, ()),
        (use_functional_collectives, ()),
        (use_sub_groups, ()),
    ],
)
def test_equals_gloo(
    pools: tuple[ProcessPool, ProcessPool], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    ours, reference = pools
    found, expected = ours.run(function, *arguments), reference.run(function, *arguments)
    loose = 2e-3 if arguments else 1e-5  # gradients of 11 bits; otherwise only the order of additions differs
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=loose, atol=loose)


def test_power_sgd_does_not_depend_on_who_is_late(pools: tuple[ProcessPool, ProcessPool]) -> None:
    expected = pools[0].run(train_power_sgd, False)[0]
    for found in pools[0].run(train_power_sgd, True):
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_ddp_leaves_the_same_bits_on_all_ranks(pools: tuple[ProcessPool, ProcessPool]) -> None:
    first, *others = pools[0].run(train_ddp)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
