"""Horovod's operations in real processes, compared with the same computed from all ranks' tensors in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_pool import ProcessPool
from torch import Tensor

import cordee.horovod.torch as hvd
from cordee.core.errors import JobError

pytestmark = pytest.mark.timeout(120)

REDUCTIONS = {
    hvd.Average: lambda stack: stack.mean(0),
    hvd.Sum: lambda stack: stack.sum(0),
    hvd.Min: lambda stack: stack.amin(0),
    hvd.Max: lambda stack: stack.amax(0),
    hvd.Product: lambda stack: stack.prod(0),
}


def data_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank))
    return drawn.to(dtype) if dtype.is_floating_point else (drawn * 10).to(dtype)


def everybody(size: int, *shape: int, **options: Any) -> Tensor:
    return torch.stack([data_of(rank, *shape, **options) for rank in range(size)])


def reduce_in_every_way(rank: int, size: int) -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        mine, all_ = data_of(rank, 3, 5, dtype=dtype), everybody(size, 3, 5, dtype=dtype)
        tolerance = 2e-2 if dtype.itemsize == 2 else 1e-6
        for op, expected in REDUCTIONS.items():
            if not dtype.is_floating_point and op == hvd.Average:
                wanted = torch.div(all_.sum(0), size, rounding_mode="trunc").to(dtype)
            else:
                wanted = expected(all_.double()).to(dtype)
            kept = mine.clone()
            result = hvd.allreduce(mine, op=op)
            torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(mine, kept)
            in_place = mine.T.clone().T  # of other strides
            assert hvd.allreduce_(in_place, op=op, name=f"x{op.name}") is in_place
            assert torch.equal(in_place, result)
    mine, all_ = data_of(rank, 4), everybody(size, 4)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, all_.sum(0) * 1.5)
    torch.testing.assert_close(hvd.allreduce(mine, average=False), all_.sum(0))
    torch.testing.assert_close(hvd.allreduce(mine), all_.mean(0))
    halves = hvd.allreduce(mine, compression=hvd.Compression.fp16)
    torch.testing.assert_close(halves, all_.mean(0), rtol=2e-3, atol=2e-3)
    assert halves.dtype is torch.float32
    assert hvd.allreduce(torch.tensor(float(rank))).item() == (size - 1) / 2
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    small = torch.tensor([200, 7 + rank, 0], dtype=torch.uint8)  # whose sum does not fit into its type
    averages = [hvd.allreduce(small), hvd.allreduce_(small.clone()), hvd.reducescatter(small.repeat_interleave(size))]
    assert all(each.dtype is torch.uint8 for each in averages)
    assert averages[0].tolist() == averages[1].tolist() == [200, 7 + (size - 1) // 2, 0]
    assert averages[2].tolist() == [averages[0][rank].item()] * size
    sums, both = hvd.grouped_allreduce([small, small.int()], op=hvd.Sum)
    assert sums.tolist() == [200 * size % 256, sum(7 + other for other in range(size)), 0] and both[0] == 200 * size


def test_all_reduce(three: ProcessPool) -> None:
    three.run(reduce_in_every_way)


def queue_in_any_order(rank: int, size: int) -> None:
    hvd.init()
    names = ["a", "b", "c", "d"]
    mine = {name: torch.full((3,), float(10 * index + rank)) for index, name in enumerate(names)}
    order = names if rank == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(mine[name], name=name, op=hvd.Sum) for name in order}
    for name in names if rank else names[::-1]:
        assert hvd.poll(handles[name])
        result = hvd.synchronize(handles[name])
        assert result.tolist() == [10.0 * names.index(name) * size + sum(range(size))] * 3
    # A rank that waits for one may go on while others have more of them queued.
    first = hvd.allreduce_async(torch.ones(2), name="first")
    if rank == 0:
        hvd.synchronize(first)
    second = hvd.allreduce_async(torch.ones(2), name="second")
    hvd.synchronize(second)
    hvd.synchronize(first)
    tensors = [torch.full((2,), float(rank)), torch.full((3,), rank, dtype=torch.int64), torch.full((1,), 1.0 + rank)]
    reduced = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [one.tolist() for one in reduced] == [[3.0] * 2, [3] * 3, [6.0]]
    assert hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="group")[0] is tensors[0]
    assert tensors[1].tolist() == [3] * 3
    handle = hvd.grouped_allreduce_async_([tensors[0]], op=hvd.Average)
    assert hvd.synchronize(handle)[0].tolist() == [3.0] * 2
    with pytest.raises(ValueError, match="was called again before its result"):
        again = hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(again)


def test_operations_are_matched_by_name(three: ProcessPool) -> None:
    three.run(queue_in_any_order)


def move_data(rank: int, size: int) -> None:
    hvd.init()
    rows = hvd.allgather(torch.full((rank + 1, 2), rank))
    assert rows.tolist() == [[other] * 2 for other in range(size) for _ in range(other + 1)]
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == [float(other) for other in range(size)]
    assert hvd.allgather(torch.empty(0 if rank else 2, 3)).shape == (2, 3)
    joined = hvd.grouped_allgather([torch.full((rank,), rank), torch.tensor([[rank]])])
    assert joined[0].tolist() == [1, 2, 2] and joined[1].tolist() == [[0], [1], [2]]
    for root in range(size):
        for dtype in (torch.float32, torch.bool, torch.int8, torch.complex64):
            mine = torch.full((2, 3), rank).to(dtype)
            assert torch.equal(hvd.broadcast(mine, root), torch.full((2, 3), root).to(dtype))
        mine = torch.tensor(rank)
        assert hvd.broadcast_(mine, root) is mine and mine.item() == root
    sent = torch.arange(size * 2).view(size, 2) + 100 * rank
    assert torch.equal(hvd.alltoall(sent), torch.stack([torch.arange(2) + 2 * rank + 100 * o for o in range(size)]))
    splits = torch.tensor([0, 1, 2], dtype=torch.int32)
    output, received = hvd.alltoall(torch.arange(3) + 10 * rank, splits=splits)
    assert received.tolist() == [rank] * size and received.dtype is torch.int32
    assert output.tolist() == [10 * o + {1: [0], 2: [1, 2]}.get(rank, [])[i] for o in range(size) for i in range(rank)]
    for bad in (torch.tensor([1, 1]), torch.tensor([1, 1, 2]), torch.tensor([-1, 2, 2])):
        with pytest.raises(ValueError, match="alltoall: splits"):
            hvd.alltoall(torch.arange(3), splits=bad)
    for num_rows in (6, 7, 2):
        data, all_ = data_of(rank, num_rows, 2), everybody(size, num_rows, 2)
        share, rest = divmod(num_rows, size)
        counts = [share + (other < rest) for other in range(size)]
        expected = all_.mean(0).split(counts)[rank]
        torch.testing.assert_close(hvd.reducescatter(data), expected)
        (summed,) = hvd.grouped_reducescatter([data], op=hvd.Sum, prescale_factor=2.0)
        torch.testing.assert_close(summed, expected * size * 2)
    hvd.barrier()


def test_moving_rows(three: ProcessPool) -> None:
    three.run(move_data)


def reduce_sparse(rank: int, size: int) -> None:
    hvd.init()
    mine = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (5,))
    total = sum(torch.sparse_coo_tensor([[0, other + 1]], [1.0, 2.0], (5,)).to_dense() for other in range(size))
    for op, wanted in ((hvd.Sum, total), (hvd.Average, total / size)):
        result = hvd.synchronize(hvd.sparse_allreduce_async(mine, f"s{op.name}", op))
        assert result.is_sparse
        torch.testing.assert_close(result.to_dense(), wanted)


def test_sparse_tensors(three: ProcessPool) -> None:
    three.run(reduce_sparse)


def take_gradients(rank: int, size: int) -> None:
    """Those of Horovod: of the mean over ranks, but for allreduce, whose gradient is reduced as its values were."""
    hvd.init()
    for op, factor in ((hvd.Sum, 3.0), (hvd.Average, 1.0)):
        data = torch.ones(4, requires_grad=True)
        hvd.allreduce(data, op=op).sum().backward()
        assert data.grad is not None and data.grad.tolist() == [factor] * 4
        data = torch.ones(size, requires_grad=True)
        (hvd.reducescatter(data, op=op) * (rank + 1)).sum().backward()
        assert data.grad is not None
        assert data.grad.tolist() == [(other + 1) * factor for other in range(size)]
    data = torch.ones(rank + 1, requires_grad=True)
    weights = torch.arange(6.0)
    (hvd.allgather(data) * weights * (rank + 1)).sum().backward()
    assert data.grad is not None
    torch.testing.assert_close(data.grad, weights.split([1, 2, 3])[rank] * 2)
    data = torch.ones(2, requires_grad=True)
    (hvd.broadcast(data, 1) * (rank + 1)).sum().backward()
    assert data.grad is not None and data.grad.tolist() == ([2.0] * 2 if rank == 1 else [0.0] * 2)
    data = torch.ones(size, requires_grad=True)
    (hvd.alltoall(data) * (rank + 1)).sum().backward()
    assert data.grad is not None and data.grad.tolist() == [1.0, 2.0, 3.0]
    one, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = hvd.grouped_allreduce([one, other], op=hvd.Sum)
    (first.sum() + 2 * second.sum()).backward()
    assert one.grad is not None and one.grad.tolist() == [3.0] * 2
    assert other.grad is not None and other.grad.tolist() == [6.0] * 3


def test_gradients(three: ProcessPool) -> None:
    three.run(take_gradients)


def combine_with_adasum(rank: int, size: int) -> None:
    hvd.init()

    def pair(a: Tensor, b: Tensor) -> Tensor:
        dot = a @ b
        return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b

    rows = everybody(size, 6).double()
    expected = pair(pair(rows[0], rows[1]), pair(rows[2], rows[3]))
    result = hvd.allreduce(data_of(rank, 6), op=hvd.Adasum)
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-6)
    same = hvd.allreduce(torch.ones(3), op=hvd.Adasum)
    torch.testing.assert_close(same, torch.ones(3))  # of equal gradients one is left
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3


def test_adasum(four: ProcessPool) -> None:
    four.run(combine_with_adasum)


def refuse_adasum(rank: int, size: int) -> None:
    hvd.init()
    with pytest.raises(NotImplementedError, match="a power of 2, and there are 3"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)


def test_adasum_needs_a_power_of_two(three: ProcessPool) -> None:
    three.run(refuse_adasum)


def use_process_sets(rank: int, size: int) -> None:
    hvd.init()
    even, last = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([2]))
    assert even.included() == (rank != 1) and even.size() == 2 and even.rank() == {0: 0, 1: None, 2: 1}[rank]
    if even.included():
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=even).item() == 2
        assert hvd.allgather(torch.tensor([rank]), process_set=even).tolist() == [0, 2]
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=even).item() == 2
        assert hvd.alltoall(torch.tensor([rank, rank + 1]), process_set=even).tolist() == [
            even.rank(),  # type: ignore[operator]
            2 + even.rank(),  # type: ignore[operator]
        ]
    else:
        with pytest.raises(ValueError, match="rank 1 does not belong to this process set"):
            hvd.allreduce(torch.ones(1), process_set=even)
    if rank == 2:
        assert hvd.allreduce(torch.tensor([5.0]), process_set=last).item() == 5
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([2, 0])
    assert hvd.remove_process_set(even) and not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.allreduce(torch.ones(1), process_set=even)
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == 3
    hvd.remove_process_set(last)


def test_process_sets(three: ProcessPool) -> None:
    three.run(use_process_sets)


def end_early(rank: int, size: int) -> list[Any]:
    hvd.init()
    sums = []
    for step in range(rank + 1):
        handles = [hvd.allreduce_async(torch.full((4,), 1.0 + step), name=f"{i}", op=hvd.Sum) for i in range(2)]
        sums.append([hvd.synchronize(handle)[0].item() for handle in handles])
    average = hvd.allreduce(torch.tensor([3.0])).item() if rank == size - 1 else None
    return [hvd.join(), sums, average, hvd.allgather_object(rank)]


def test_ranks_with_less_data_join(three: ProcessPool) -> None:
    answers = three.run(end_early)
    assert [last for last, *_ in answers] == [2, 2, 2]
    assert answers[2][1] == [[3.0, 3.0], [4.0, 4.0], [3.0, 3.0]]  # those who have joined add zeros
    assert answers[2][2] == 1.0  # and still count in an average, as in Horovod
    assert all(answer[3] == [0, 1, 2] for answer in answers)


def refuse_after_join(rank: int, size: int) -> str:
    hvd.init()
    message = ""
    if rank:
        try:
            hvd.allreduce(torch.ones(2), op=hvd.Max, name="largest")
        except hvd.HorovodInternalError as error:
            message = str(error)
    hvd.join()
    return message


def test_a_joined_rank_has_no_largest_value(three: ProcessPool) -> None:
    _, *messages = three.run(refuse_after_join)
    assert all("allreduce 'allreduce.largest'" in text and "rank 0 called join()" in text for text in messages)


# Mistakes -----------------------------------------------------------------------------------------------------------


def differ(rank: int, size: int, how: str) -> str:
    hvd.init()
    try:
        if how == "shape":
            hvd.allreduce(torch.ones(3 if rank == 1 else 2), name="loss")
        elif how == "dtype":
            hvd.allreduce(torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32), name="loss")
        elif how == "root":
            hvd.broadcast(torch.ones(2), rank % 2, name="weights")
        elif how == "columns":
            hvd.allgather(torch.ones(rank + 1, 2 if rank == 1 else 3), name="rows")
        elif rank == 1:  # only some ranks make the call
            hvd.barrier()
        else:
            hvd.allreduce(torch.ones(2), name="loss")
    except hvd.HorovodInternalError as error:
        message = str(error)
    # The ranks are still together.
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == size
    return message


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("shape", ["ranks call 'allreduce.loss' differently", "rank 0 ", "float32 [2])", "rank 1 ", "float32 [3])"]),
        ("dtype", ["rank 0 ", "float32 [2])", "rank 1 ", "float64 [2])"]),
        ("root", ["broadcast 'broadcast.weights'", "root rank 0)", "rank 1 ", "root rank 1)"]),
        ("columns", ["allgather 'allgather.rows' (float32 [3])", "rank 1 ", "(float32 [2])"]),
        ("call", ["rank 0 is in allreduce 'allreduce.loss'", "rank 1 is in barrier", "must make the same calls"]),
    ],
)
def test_calls_that_differ_are_named_on_every_rank(three: ProcessPool, how: str, parts: list[str]) -> None:
    messages = three.run(differ, how)
    assert len(set(messages)) == 1
    for part in parts:
        assert part in messages[0]


# Objects, timeline, alone -------------------------------------------------------------------------------------------


def send_objects(rank: int, size: int, folder: str) -> None:
    hvd.init()
    value = {"epoch": 3 + rank, "lr": [0.1, None], "best": (rank, "x"), "noise": torch.full((2,), float(rank))}
    got = hvd.broadcast_object(value, root_rank=1)
    assert got["epoch"] == 4 and got["best"] == (1, "x") and got["noise"].tolist() == [1.0, 1.0]
    many = hvd.allgather_object({"rank": rank, "long": "y" * rank, "array": np.arange(rank)})
    assert [one["rank"] for one in many] == list(range(size)) and many[2]["array"].tolist() == [0, 1]
    try:
        hvd.broadcast_object(object() if rank == 0 else None, root_rank=0)
    except (JobError, ValueError) as error:
        assert ("is a builtins.object" if rank == 0 else "rank 0 could not send its object") in str(error)
    else:
        raise AssertionError("an object of any class was sent")
    path = Path(folder) / f"trace-{rank}.json"
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(2), name="traced")
    hvd.stop_timeline()
    events = json.loads(path.read_text())
    names = [event.get("name") for event in events]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "CYCLE_START"} <= set(names)
    (reduce,) = [event for event in events if event.get("name") == "ALLREDUCE"]
    assert reduce["ph"] == "X" and reduce["dur"] > 0 and reduce["pid"] == rank and reduce["args"]["shapes"] == [[2]]


def test_objects_and_the_timeline(three: ProcessPool, tmp_path: Path) -> None:
    three.run(send_objects, str(tmp_path))


def test_alone_everything_works() -> None:
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        hvd.rank()
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
        assert hvd.allreduce(torch.tensor([2.0]), postscale_factor=2.0).tolist() == [4.0]
        assert hvd.allgather(torch.ones(2, 1)).shape == (2, 1)
        assert hvd.broadcast(torch.ones(2), 0).tolist() == [1, 1]
        assert hvd.alltoall(torch.arange(2)).tolist() == [0, 1]
        assert hvd.reducescatter(torch.ones(3)).tolist() == [1] * 3
        assert hvd.broadcast_object({"a": 1}) == {"a": 1} and hvd.allgather_object(1) == [1]
        assert hvd.join() == 0
        hvd.barrier()
        with pytest.raises(ValueError, match="root_rank=1 is not among the ranks"):
            hvd.broadcast(torch.ones(1), 1)
        with pytest.raises(ValueError, match="either op or average"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] must be from 0 to 0"):
            hvd.add_process_set([0, 1])
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()
