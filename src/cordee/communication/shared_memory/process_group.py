"""The `torch.distributed` process group of the `cordee` backend.

Operations of members that share a host go through shared memory, between hosts over connections of the group's own.
What is not done here — sparse tensors, element types without a meaning for the operation — goes to a gloo group of the
same members, which is formed when it is first needed. CUDA tensors go to NCCL or gloo (gpus.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed import distributed_c10d as torch_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from cordee.communication.shared_memory import collectives
from cordee.communication.shared_memory.collectives import (
    AllReducePlan,
    Reduction,
    as_bytes,
    flatten,
    is_plain,
    is_supported,
    write_back,
)
from cordee.communication.shared_memory.execution import CollectiveExecutor, CordeeWork
from cordee.communication.shared_memory.gpus import GpuOperations
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.communication.shared_memory.rounds import Steps
from cordee.communication.shared_memory.two_level import OneHost, TwoLevel

if TYPE_CHECKING:
    from cordee.communication.shared_memory.backend import HostTeam

_REDUCTIONS: dict[int, Reduction] = {int(getattr(ReduceOp, reduction.name).value): reduction for reduction in Reduction}
_MAX_PLANS = 1024

AfterWork = Callable[[], None] | None


c10d: Any = torch_c10d  # the options classes are not in its stubs

# Torch's stubs give every operation two overloads, of which only one is ever called on a group.
_Base: Any = ProcessGroup


@dataclass(frozen=True)
class Membership:
    """What a member does its part with, where it does not leave everything to gloo."""

    team: HostTeam
    executor: CollectiveExecutor
    mailbox: Mailbox
    operations: OneHost | TwoLevel
    links: Links | None = None  # to the members on other hosts


class CordeeProcessGroup(_Base):  # type: ignore[misc]
    """A process group whose members on one host talk through shared memory. Made by `backend.create_group`.

    Every method but `shutdown` is collective over the group, or over the pair for send and recv. A member that dies,
    freezes or calls something else gives CommunicationError on the others, and the group is of no use after that.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        form_gloo: Callable[[], ProcessGroupGloo],
        membership: Membership | None = None,
        form_for_gpus: Callable[[str], Any] | None = None,
    ) -> None:
        """Without a membership everything is left to gloo.

        `form_for_gpus` is given what the program named for CUDA tensors, or "", and returns the backend for them, or
        None where gloo is to do them.
        """
        super().__init__(rank, size)
        self._form_gloo = form_gloo
        self._forming_gloo = threading.RLock()
        self._formed_gloo: ProcessGroupGloo | None = None
        self.gpu_operations = GpuOperations(form_for_gpus)
        self._name = self._description = ""
        self._num_ranks = size
        self._own_rank = rank
        self._membership = membership
        self._operations = membership.operations if membership else None
        self._executor = membership.executor if membership else None
        self._mailbox = membership.mailbox if membership else None
        # The host, if all members are on it: member numbers are group ranks then.
        self._host = self._operations.host if isinstance(self._operations, OneHost) else None
        self.spans_hosts = isinstance(self._operations, TwoLevel)
        self._plans: dict[tuple[int, torch.dtype, int], AllReducePlan | None] = {}
        self._done = CordeeWork([], done=True)
        if membership is None:
            self._gloo  # noqa: B018 - needed, and better formed where a failure is expected

    @property
    def _gloo(self) -> ProcessGroup:
        """The gloo group of the same members, which has the same operations.

        Formed by the first call, since it listens on a port, open to every user. Collective then, like the operation
        that needs it: each member calls the same.
        """
        with self._forming_gloo:
            if self._formed_gloo is None:
                self._formed_gloo = self._form_gloo()
                self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._formed_gloo)
                self._set_default_backend(ProcessGroup.BackendType.GLOO)
                super()._set_group_name(self._name)
                super()._set_group_desc(self._description)
            return cast(ProcessGroup, self._formed_gloo)

    def _other(self, *groups: Sequence[Tensor]) -> ProcessGroup:
        """What does an operation on these tensors that is not done here. Collective, as the operation is."""
        is_on_gpu = any(tensor.is_cuda for group in groups for tensor in group)
        backend: ProcessGroup | None = self.gpu_operations.get(self) if is_on_gpu else None  # has the same operations
        return self._gloo if backend is None else backend

    # Torch keeps these in the backend of a device, which there may be none of.
    def _set_group_name(self, name: str) -> None:
        self._name = name
        if self._formed_gloo is not None:
            super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        if self._formed_gloo is not None:
            super()._set_group_desc(description)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda" and (backend := self.gpu_operations.get(self)) is not None:
            return backend
        self._gloo  # noqa: B018 - collective, as what torch does with the backend
        return super()._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda" and (backend := self.gpu_operations.get(self)) is not None:
            backend._start_coalescing()
            return
        self._gloo  # noqa: B018
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        backend = self.gpu_operations.get(self) if device.type == "cuda" else None
        return super()._end_coalescing(device) if backend is None else backend._end_coalescing()

    @property
    def is_in_shared_memory(self) -> bool:
        """Whether all members are on one host and reduce in its shared memory, so that a mean costs what a sum does."""
        return self._host is not None

    def getGroupName(self) -> str:  # noqa: N802 - torch calls it so
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch calls it so
        return self._description

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        return "cordee"

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        host = self._host
        if host is None or opts is None or type(tensors) is not list or len(tensors) != 1:
            return self._allreduce_other(tensors, opts, timeout)
        tensor = tensors[0]
        if not (tensor.layout is torch.strided and tensor.is_cpu):
            return self._other(tensors).allreduce(tensors, opts)
        key = (opts.reduceOp.op.value, tensor.dtype, tensor.numel())
        plan = self._plans[key] if key in self._plans else self._plan(key)
        if plan is None:
            return self._other(tensors).allreduce(tensors, opts)
        after = None
        flat = tensor
        # Most calls are with a flat bucket, and each attribute of a tensor costs 0.1 µs.
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.requires_grad or tensor.is_inference():
            flat = flatten(tensor)
            after = write_back(tensors, (flat,))
        steps = collectives.all_reduce(host, flat, plan)
        executor = self._executor
        assert executor is not None
        if opts.asyncOp:
            return executor.start(steps, tensors, after, _limit_s(opts))
        executor.run(steps, _limit_s(opts))
        if after is not None:
            after()
        return self._done

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        reduction = self._reduction(opts, tensors)
        operations = self._operations
        if operations is None or reduction is None:
            return self._other(tensors).allreduce_coalesced(tensors, opts)
        flats = [flatten(tensor) for tensor in tensors]

        def steps() -> Steps:
            for flat in flats:
                yield from operations.all_reduce(flat, reduction)

        return self._submit(steps(), tensors, opts, write_back(tensors, flats))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, Tensor):  # the form broadcast(tensor, root, timeout)
            tensors, opts = [tensors], _options(c10d.BroadcastOptions, timeout, rootRank=opts or 0)
        opts = c10d.BroadcastOptions() if opts is None else opts
        if self._operations is None or len(tensors) != 1 or not is_plain(tensors[0]):
            return self._other(tensors).broadcast(tensors, opts)
        data = as_bytes(tensors[0])
        steps = self._operations.broadcast(data, opts.rootRank)
        return self._submit(steps, tensors, opts, write_back(tensors, (data,)))

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        reduction = self._reduction(opts, tensors)
        if self._operations is None or reduction is None or len(tensors) != 1:
            return self._other(tensors).reduce(tensors, opts)
        flat = flatten(tensors[0])
        after = write_back(tensors, (flat,)) if opts.rootRank == self._own_rank else None
        return self._submit(self._operations.reduce(flat, reduction, opts.rootRank), tensors, opts, after)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = c10d.AllgatherOptions() if opts is None else opts
        if self._operations is None or len(inputs) != 1 or not _all_plain(outputs[0], inputs):
            return self._other(inputs).allgather(outputs, inputs, opts)
        flats = [as_bytes(output) for output in outputs[0]]
        _check_sizes("all_gather", [inputs[0].nbytes], [flats[self._own_rank]])
        steps = self._operations.all_gather(flats, as_bytes(inputs[0]))
        return self._submit(steps, outputs, opts, write_back(outputs[0], flats))

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [data], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = c10d.AllgatherOptions() if opts is None else opts
        operations, num_ranks = self._operations, self._num_ranks
        if operations is None or not _all_plain(outputs, inputs):
            other = self._other(inputs)
            return _combine([other._allgather_base(out, data, opts) for out, data in zip(outputs, inputs, strict=True)])
        flats = [flatten(output) for output in outputs]
        _check_sizes("all_gather", [data.numel() * num_ranks for data in inputs], flats)
        pairs = [(flat.view(torch.uint8), as_bytes(data)) for flat, data in zip(flats, inputs, strict=True)]

        def steps() -> Steps:
            for flat, data in pairs:
                if data.numel():
                    yield from operations.all_gather(flat.chunk(num_ranks), data)

        return self._submit(steps(), outputs, opts, write_back(outputs, flats))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        # Torch gives the outputs by rank or by tensor, with the latter documented: left to gloo.
        return self._other(inputs).allgather_coalesced(outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        is_root = opts.rootRank == self._own_rank
        if self._operations is None or len(inputs) != 1 or not _all_plain(inputs, outputs[0] if is_root else ()):
            return self._other(inputs).gather(outputs, inputs, opts)
        targets = outputs[0] if is_root else []
        flats = [as_bytes(target) for target in targets]
        _check_sizes("gather", [inputs[0].nbytes] * len(flats), flats)
        steps = self._operations.gather(flats, as_bytes(inputs[0]), opts.rootRank)
        return self._submit(steps, outputs, opts, write_back(targets, flats))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        is_root = opts.rootRank == self._own_rank
        if self._operations is None or len(outputs) != 1 or not _all_plain(outputs, inputs[0] if is_root else ()):
            return self._other(outputs).scatter(outputs, inputs, opts)
        parts = [as_bytes(part) for part in inputs[0]] if is_root else []
        output = as_bytes(outputs[0])
        _check_sizes("scatter", [output.numel()] * len(parts), parts)
        steps = self._operations.scatter(output, parts, opts.rootRank)
        return self._submit(steps, outputs, opts, write_back(outputs, (output,)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        reduction = self._reduction(opts, outputs)
        if self._operations is None or reduction is None or len(outputs) != 1 or not _all_plain(inputs[0]):
            return self._other(outputs).reduce_scatter(outputs, inputs, opts)
        output = flatten(outputs[0])
        parts = [flatten(part) for part in inputs[0]]
        _check_sizes("reduce_scatter", [output.numel()], [parts[self._own_rank]])
        steps = self._operations.reduce_scatter(output, parts, reduction)
        return self._submit(steps, outputs, opts, write_back(outputs, (output,)))

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        reduction = self._reduction(opts, outputs)
        operations = self._operations
        if operations is None or reduction is None or not _all_plain(inputs):
            other = self._other(inputs)
            return _combine(
                [other._reduce_scatter_base(out, data, opts) for out, data in zip(outputs, inputs, strict=True)]
            )
        flats = [flatten(output) for output in outputs]
        split = [flatten(data).chunk(self._num_ranks) for data in inputs]
        _check_sizes(
            "reduce_scatter", [flat.numel() * self._num_ranks for flat in flats], [flatten(data) for data in inputs]
        )

        def steps() -> Steps:
            for flat, parts in zip(flats, split, strict=True):
                if flat.numel():
                    yield from operations.reduce_scatter(flat, parts, reduction)

        return self._submit(steps(), outputs, opts, write_back(outputs, flats))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = c10d.AllToAllOptions() if opts is None else opts
        if self._operations is None or not _all_plain(outputs, inputs):
            return self._other(outputs).alltoall(outputs, inputs, opts)
        flats = [as_bytes(output) for output in outputs]
        steps = self._operations.all_to_all(flats, [as_bytes(data) for data in inputs])
        return self._submit(steps, outputs, opts, write_back(outputs, flats))

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        opts = c10d.AllToAllOptions() if opts is None else opts
        if self._operations is None or not _all_plain((output, data)):
            return self._other([output]).alltoall_base(output, data, output_splits, input_splits, opts)
        flat = flatten(output)
        parts = [as_bytes(part) for part in _split_rows(flatten(data), data, input_splits, self._num_ranks)]
        targets = [as_bytes(part) for part in _split_rows(flat, output, output_splits, self._num_ranks)]
        steps = self._operations.all_to_all(targets, parts)
        return self._submit(steps, [output], opts, write_back((output,), (flat,)))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts = _options(c10d.BarrierOptions, timeout) if opts is None else opts
        if self._operations is None:
            return self._gloo.barrier(opts)
        return self._submit(self._operations.barrier(), [], opts, None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        gloo: Any = self._gloo
        gloo.monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Work:
        if self._mailbox is None or tensors[0].is_cuda:
            return self._other(tensors).send(tensors, target, tag)
        _refuse_to_send(tensors[0])
        return self._mailbox.send(as_bytes(tensors[0]), target, tag, tensors)

    def recv(self, tensors: list[Tensor], source: int | None, tag: int = 0) -> Work:
        if self._mailbox is None or tensors[0].is_cuda:
            other = self._other(tensors)
            return other.recv_anysource(tensors, tag) if source is None else other.recv(tensors, source, tag)
        _refuse_to_send(tensors[0])
        data = as_bytes(tensors[0])
        return self._mailbox.receive(data, source, tag, tensors, write_back(tensors, (data,)))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # Earlier names of the same operations, which torch 2.13 still accepts.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """Leave the group: local; peers that still wait for this rank get an error that names it."""
        self.gpu_operations.close()
        if (own := self._membership) is not None:
            if own.links is not None:
                own.links.abandon("the process group was destroyed before the operation was done")
            own.executor.close()
            own.mailbox.close()
            if own.links is not None:
                own.links.close()
            own.team.close()
        if self._formed_gloo is not None:
            self._formed_gloo.shutdown()

    abort = shutdown

    def _allreduce_other(self, tensors: Any, opts: Any, timeout: timedelta | None) -> Work:
        """The forms allreduce(tensor, op, timeout) and allreduce(tensors, op, timeout), and groups across hosts."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if opts is None or not hasattr(opts, "reduceOp"):
            opts = _options(c10d.AllreduceOptions, timeout, reduceOp=opts or ReduceOp.SUM)
        if self._host is not None and len(tensors) == 1:
            return self.allreduce(tensors, opts)
        reduction = self._reduction(opts, tensors)
        if self._operations is None or reduction is None or len(tensors) != 1:
            return self._other(tensors).allreduce(tensors, opts)
        flat = flatten(tensors[0])
        return self._submit(self._operations.all_reduce(flat, reduction), tensors, opts, write_back(tensors, (flat,)))

    def _plan(self, key: tuple[int, torch.dtype, int]) -> AllReducePlan | None:
        value, dtype, count = key
        reduction = _REDUCTIONS.get(value)
        plan = None
        if reduction is not None and is_supported(reduction, dtype):
            assert self._host is not None
            plan = collectives.plan_all_reduce(self._host, dtype, count, reduction)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _reduction(self, opts: Any, tensors: Sequence[Tensor]) -> Reduction | None:
        """Return the reduction asked for, or None if it can not be done in shared memory."""
        reduction = _REDUCTIONS.get(opts.reduceOp.op.value)
        if reduction is None or not all(is_plain(t) and is_supported(reduction, t.dtype) for t in tensors):
            return None
        return reduction

    def _submit(self, steps: Steps, result: Any, opts: Any, after: AfterWork) -> Work:
        executor = self._executor
        assert executor is not None
        if opts.asyncOp:
            return executor.start(steps, result, after, _limit_s(opts), inline=self._host is not None)
        executor.run(steps, _limit_s(opts))
        if after is not None:
            after()
        return self._done


def _limit_s(opts: Any) -> float | None:
    """Return the time that the caller set for this one call, if any."""
    seconds = float(opts.timeout.total_seconds())
    return seconds if seconds > 0 else None


def _options(kind: Any, timeout: timedelta | None, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _all_plain(*groups: Sequence[Tensor]) -> bool:
    return all(is_plain(tensor) for group in groups for tensor in group)


def _refuse_to_send(tensor: Tensor) -> None:
    if not is_plain(tensor):  # gloo cannot either, and forming it here would need those who have no part in this
        raise ValueError(f"only dense tensors are sent and received, not {tensor.layout} on {tensor.device}")


def _check_sizes(name: str, expected: Sequence[int], tensors: Sequence[Tensor]) -> None:
    for count, tensor in zip(expected, tensors, strict=True):
        if tensor.numel() != count:
            raise ValueError(f"{name}: a tensor has {tensor.numel()} elements where {count} are needed")


def _split_rows(flat: Tensor, shaped: Tensor, splits: Sequence[int], num_ranks: int) -> Sequence[Tensor]:
    """Cut a flat tensor at rows of its first dimension: evenly, or at the given numbers of rows."""
    rows = shaped.size(0) if shaped.dim() else 1
    if not splits:
        if rows % num_ranks:
            raise ValueError(f"all_to_all: {rows} rows do not divide evenly among {num_ranks} ranks: give split sizes")
        splits = [rows // num_ranks] * num_ranks
    if sum(splits) != rows:
        raise ValueError(f"all_to_all: split sizes {list(splits)} do not add up to {rows} rows")
    per_row = flat.numel() // rows if rows else 0
    return torch.split(flat, [split * per_row for split in splits])


def _combine(works: Sequence[Work]) -> Work:
    """Wait for all but the last of several operations, which run in order, and return the last."""
    for work in works[:-1]:
        work.wait()
    return works[-1]
