"""Asynchronous operations: real works, in order, and never a deadlock that gloo would not have."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend_pool import ProcessPool
from torch.distributed.distributed_c10d import AllreduceOptions

from cordee.core.errors import CommunicationError


def keep_order(rank: int, num_turns: int) -> None:
    size = dist.get_world_size()
    works, results = [], []
    for turn in range(num_turns):
        if turn % 7 == rank:
            time.sleep(0.005)  # past the patience of the others: their thread takes over
        data = torch.full((1000 + turn,), float(rank + turn))
        works.append(dist.all_reduce(data, async_op=True))
        results.append(data)
        if turn % 5 == 0:
            check = torch.tensor([turn])
            dist.all_reduce(check)  # a synchronous one behind the asynchronous ones
            assert check.item() == turn * size
    for turn, (work, data) in enumerate(zip(works, results, strict=True)):
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert data.eq(sum(range(size)) + turn * size).all()


def compute_between(rank: int) -> bool:
    data = torch.ones(10)
    if rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    was_done = work.is_completed()
    future = work.get_future().then(lambda done: done.value()[0].sum().item())
    assert future.wait() == 10 * dist.get_world_size()
    return was_done


def cross_over(rank: int) -> None:
    """Rank 0 starts a collective, then sends what rank 1 needs before it joins the collective."""
    data = torch.ones(5)
    note = torch.zeros(3)
    if rank == 0:
        work = dist.all_reduce(data, async_op=True)
        dist.send(torch.arange(3.0), 1)
        assert work is not None
        work.wait()
    else:
        dist.recv(note, 0)
        assert note.tolist() == [0, 1, 2]
        dist.all_reduce(data)
    assert data.eq(2).all()


def cross_groups(rank: int) -> None:
    """Two groups, used in opposite order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if rank == 0 else groups[::-1]
    tensors = {group: torch.ones(4) for group in order}
    works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
    for work in works:
        assert work is not None
        work.wait()
    assert all(tensor.eq(2).all() for tensor in tensors.values())


def exchange_large(rank: int) -> None:
    """Both send more than the channel holds before either receives."""
    outgoing = torch.full((3_000_000,), float(rank))
    incoming = torch.zeros(3_000_000)
    operations = [
        dist.P2POp(dist.isend, outgoing, 1 - rank),
        dist.P2POp(dist.irecv, incoming, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert incoming.eq(1 - rank).all()


def reduce_in_callbacks(rank: int, num_turns: int) -> None:
    """Callbacks that start collectives and wait for them, in each of the ways there are, among others of equal size."""
    size = dist.get_world_size()
    random_delay = random.Random(rank)

    def reduced(value: float) -> torch.Tensor:
        data = torch.full((8,), value)
        dist.all_reduce(data)
        return data

    def start(value: float) -> torch.futures.Future[list[torch.Tensor]]:
        work = dist.all_reduce(torch.full((8,), value), async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future

    chained: list[torch.futures.Future[torch.Tensor]] = []
    between: list[torch.futures.Future[list[torch.Tensor]]] = []
    for turn in range(num_turns):
        first = start(turn)
        if random_delay.random() < 0.4:
            time.sleep(0.006 * random_delay.random())  # often past the patience of the others

        def waiting(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            nested = start(2 * done.value()[0][0].item()).then(lambda other: other.value()[0] * 1.0)
            collected = torch.futures.collect_all([start(1000.0), start(2000.0)]).wait()
            assert [future.value()[0][0].item() for future in collected] == [1000 * size, 2000 * size]
            return reduced(nested.wait()[0].item())

        chained.append(first.then(waiting).then(lambda done: reduced(done.value()[0].item())))
        between.append(start(-turn))
    for turn in range(num_turns):
        assert chained[turn].wait().eq(2 * turn * size**4).all(), (turn, chained[turn].value())
        assert between[turn].wait()[0].eq(-turn * size).all()


def fail_in_a_callback(rank: int) -> None:
    if rank == 1:
        time.sleep(0.02)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    failed = work.get_future().then(lambda done: 1 / 0)
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data.eq(2).all()
    with pytest.raises(Exception, match="division by zero"):
        failed.wait()


def time_out(rank: int) -> None:
    """The time given with one asynchronous call holds for that call."""
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=0.6)
    options.asyncOp = True
    group = dist.new_group([0, 1], timeout=timedelta(seconds=300))
    if rank == 1:
        return
    started = time.monotonic()
    work = group.allreduce([torch.ones(3)], options)  # type: ignore[union-attr]
    with pytest.raises(CommunicationError, match=r"rank 1 did not come to all_reduce.* the timeout of 0.6 s"):
        work.wait()
    assert time.monotonic() - started >= 0.6


def use_history(rank: int) -> None:
    weight = torch.ones(4, requires_grad=True)
    dist.all_reduce(weight)
    dist.broadcast(weight, 0)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.tolist() == [2.0] * 4
    matrix = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(matrix)
    assert torch.equal(matrix, 2 * torch.arange(6.0).view(2, 3).t())
    with torch.inference_mode():
        frozen = torch.ones(3)
        dist.all_reduce(frozen)
        assert frozen.tolist() == [2.0] * 3
    dist.all_reduce(frozen)
    dist.broadcast(frozen, 1)
    assert frozen.tolist() == [4.0] * 3
    scalar = torch.tensor(3.0)
    dist.all_reduce(scalar, op=dist.ReduceOp.AVG)
    assert scalar.item() == 3.0
    number = torch.tensor([1 + 2j])
    dist.all_reduce(number)
    assert number.item() == 2 + 4j
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):  # from gloo, which has it neither
        dist.all_reduce(quantised)
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (2,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [2, 4])
def test_asynchronous_and_synchronous_operations_keep_their_order(size: int) -> None:
    with ProcessPool(size) as pool:
        pool.run(keep_order, 40)
        pool.leave()


def test_programs_that_gloo_can_run() -> None:
    with ProcessPool(2) as pool:
        assert pool.run(compute_between)[0] is False  # rank 0 was given a work that was not done yet
        for function in (cross_over, cross_groups, exchange_large, use_history):
            pool.run(function)
        pool.leave()


@pytest.mark.parametrize("size", [2, 3])
def test_callbacks_may_start_collectives_and_wait_for_them(size: int) -> None:
    with ProcessPool(size) as pool:
        pool.run(reduce_in_callbacks, 25)
        pool.leave()


def test_a_callback_that_fails_and_a_call_that_times_out() -> None:
    with ProcessPool(2) as pool:
        pool.run(fail_in_a_callback)
        pool.run(time_out)


def test_eight_processes_on_few_cores() -> None:
    with ProcessPool(8) as pool:
        pool.run(keep_order, 10)
        pool.leave()
