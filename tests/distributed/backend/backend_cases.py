"""One random operation, run on the cordee backend and on gloo, and compared. Runs inside the ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.communication.shared_memory.execution import CordeeWork

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
        torch.bool,
    )
}  # fmt: skip
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
OPERATIONS = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_single", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier", "objects",
    "exchange",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    operation: str
    dtype: str
    shape: tuple[int, ...]
    reduction: str
    root: int
    seed: int
    is_async: bool
    is_strided: bool


_groups: dict[str, Any] = {}


def reference_group() -> Any:
    """The gloo group beside the world; collective at its first call."""
    if "gloo" not in _groups:
        _groups["gloo"] = dist.new_group(backend="gloo")
    return _groups["gloo"]


def run_case(rank: int, case: Case) -> None:
    """Run a case on both backends; raises AssertionError where they differ."""
    warnings.simplefilter("ignore", FutureWarning)  # all_reduce_coalesced says that it will be deprecated
    gloo = reference_group()
    ours = _perform(case, rank, dist.group.WORLD)
    reduction = "SUM" if case.reduction == "AVG" else case.reduction
    # Gloo takes contiguous tensors only, and does not average.
    theirs = _perform(replace(case, reduction=reduction, is_strided=False), rank, gloo)
    size = dist.get_world_size()
    reduces = case.operation.startswith(("all_reduce", "reduce"))
    is_average = reduces and case.reduction == "AVG"
    for one, other in zip(ours, theirs, strict=True):
        expected = other
        if is_average and not (case.operation == "reduce" and rank != case.root % size):
            expected = (other.double() / size).to(other.dtype)
        if not one.dtype.is_floating_point or not reduces:
            assert torch.equal(one, expected), (case, one, expected)
        else:
            # Up to one rounding per addition, in another order than gloo's.
            loose = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[one.dtype]
            torch.testing.assert_close(one, expected, rtol=loose, atol=loose * size)
    if case.operation.startswith("all_reduce"):
        for one in ours:
            _assert_same_bits(one, gloo)


def _assert_same_bits(result: Tensor, gloo: Any) -> None:
    raw = result.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    reference = raw.clone()
    if raw.numel():
        dist.broadcast(reference, 0, group=gloo)
    assert torch.equal(raw, reference)


def _make(case: Case, rank: int, salt: int, shape: tuple[int, ...] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank * 31 + salt)
    dtype = DTYPES[case.dtype]
    shape = case.shape if shape is None else shape
    if dtype is torch.bool:
        tensor = torch.randint(0, 2, shape, generator=generator).bool()
    elif dtype.is_floating_point:
        tensor = (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    else:
        tensor = torch.randint(0, 7, shape, generator=generator).to(dtype)
    return _strided(tensor) if case.is_strided else tensor


def _strided(tensor: Tensor) -> Tensor:
    wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
    view = wide[..., 0]
    view.copy_(tensor)
    return view


def _finish(work: Any, case: Case) -> None:
    if case.is_async and work is not None:
        work.wait()
        assert not isinstance(work, CordeeWork) or work.is_completed()


def _perform(case: Case, rank: int, group: Any) -> list[Tensor]:
    size = dist.get_world_size()
    root = case.root % size
    operation = case.operation
    reduction = getattr(dist.ReduceOp, case.reduction)
    data = _make(case, rank, 0)
    common: dict[str, Any] = {"group": group, "async_op": case.is_async}
    if operation == "all_reduce":
        _finish(dist.all_reduce(data, op=reduction, **common), case)
        return [data]
    if operation == "all_reduce_coalesced":
        more = [data, _make(case, rank, 1)]
        _finish(dist.all_reduce_coalesced(more, op=reduction, **common), case)
        return more
    if operation == "broadcast":
        _finish(dist.broadcast(data, root, **common), case)
        return [data]
    if operation == "reduce":
        _finish(dist.reduce(data, root, op=reduction, **common), case)
        return [data] if rank == root else []  # elsewhere gloo leaves intermediate values
    if operation == "all_gather":
        outputs = [torch.zeros_like(data) for _ in range(size)]
        _finish(dist.all_gather(outputs, data, **common), case)
        return outputs
    if operation == "gather":
        outputs = [torch.zeros_like(data) for _ in range(size)] if rank == root else []
        _finish(dist.gather(data, outputs or None, dst=root, **common), case)
        return outputs
    if operation == "scatter":
        parts = [_make(case, rank, salt) for salt in range(size)] if rank == root else None
        output = torch.zeros_like(data)
        _finish(dist.scatter(output, parts, src=root, **common), case)
        return [output]
    if operation == "reduce_scatter":
        output = torch.zeros_like(data)
        parts = [_make(case, rank, salt) for salt in range(size)]
        _finish(dist.reduce_scatter(output, parts, op=reduction, **common), case)
        return [output]
    if operation == "all_to_all":
        parts = [_make(case, rank, other) for other in range(size)]
        outputs = [torch.zeros_like(data) for _ in range(size)]
        _finish(dist.all_to_all(outputs, parts, **common), case)
        return outputs
    return _perform_whole(case, rank, group, data)


def _perform_whole(case: Case, rank: int, group: Any, data: Tensor) -> list[Tensor]:
    size = dist.get_world_size()
    common: dict[str, Any] = {"group": group, "async_op": case.is_async}
    if case.operation == "all_gather_single":
        data = data.contiguous()
        output = torch.zeros((size * case.shape[0], *case.shape[1:]), dtype=data.dtype)
        _finish(dist.all_gather_single(output, data, **common), case)
        return [output]
    if case.operation == "reduce_scatter_single":
        output = torch.zeros(case.shape, dtype=data.dtype)
        whole = _make(case, rank, 0, (size * case.shape[0], *case.shape[1:])).contiguous()
        _finish(dist.reduce_scatter_single(output, whole, op=getattr(dist.ReduceOp, case.reduction), **common), case)
        return [output]
    if case.operation == "all_to_all_single":
        outgoing = [(rank + 2 * other) % 3 for other in range(size)]
        incoming = [(other + 2 * rank) % 3 for other in range(size)]
        whole = _make(case, rank, 0, (sum(outgoing), *case.shape)).contiguous()
        output = torch.zeros((sum(incoming), *case.shape), dtype=data.dtype)
        _finish(dist.all_to_all_single(output, whole, incoming, outgoing, **common), case)
        return [output]
    if case.operation == "barrier":
        _finish(dist.barrier(**common), case)
        return []
    if case.operation == "objects":
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "seed": case.seed}, group=group)
        assert objects == [{"rank": other, "seed": case.seed} for other in range(size)]
        return []
    assert case.operation == "exchange"
    right, left = (rank + 1) % size, (rank - 1) % size
    received = [torch.zeros_like(data), torch.zeros_like(data)]
    works = [
        dist.isend(data, right, group=group, tag=1),
        dist.isend(_make(case, rank, 1), right, group=group, tag=2),
        dist.irecv(received[1], left, group=group, tag=2),  # asked for in another order than sent
        dist.irecv(received[0], left, group=group, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return received
