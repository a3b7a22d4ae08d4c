"""What members exchange: gradients, sums in a fixed order, checksums of their copies; and the loss of a member.

There is one all-reduce per step: gradients, and the few numbers that all members must know, travel together. The
gradients of a member are sums over its own items divided by a nominal count that all members know. Their sum over the
members, scaled by nominal / actual count, is the gradient of the mean over all items, however unequal the members'
shares. A member without items, or without a gradient for some parameter, adds nothing.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.core.blocked_time import BLOCKED
from cordee.core.errors import CommunicationError, TrainingError
from cordee.core.shards import Block, add_up, share_shards, whole_blocks


class GradientRow(NamedTuple):
    """Gradients in memory that is exchanged as it is."""

    flats: list[Tensor]  # one per dtype
    views: list[Tensor]  # of each parameter's gradient
    tail: Tensor  # a few numbers


class GradientLayout:
    """Where each parameter's gradient lies in flat tensors, one per dtype. `num_tail` numbers follow the float32 ones.

    float32 so that they can ride with the gradients, which usually are; counts are exact to 16 million.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_tail: int) -> None:
        assert parameters, "there is nothing to train"
        self._parameters, self._num_tail = parameters, num_tail
        self.device = parameters[0].device
        self.sizes = dict.fromkeys([*(parameter.dtype for parameter in parameters), torch.float32], 0)
        self.sizes[torch.float32] = num_tail
        for parameter in parameters:
            self.sizes[parameter.dtype] += parameter.numel()

    def row(self) -> GradientRow:
        return self.over([torch.zeros(size, dtype=dtype, device=self.device) for dtype, size in self.sizes.items()])

    def over(self, flats: list[Tensor]) -> GradientRow:
        """Return a row that lies in the given memory."""
        by_dtype, offsets = dict(zip(self.sizes, flats, strict=True)), dict.fromkeys(self.sizes, 0)
        views = []
        for parameter in self._parameters:
            start = offsets[parameter.dtype]
            offsets[parameter.dtype] = start + parameter.numel()
            views.append(by_dtype[parameter.dtype][start : offsets[parameter.dtype]].view_as(parameter))
        return GradientRow(flats, views, by_dtype[torch.float32][-self._num_tail :])


class GradientExchange:
    """Sums gradients over a group, the default one unless given, through one flat buffer per dtype. Collective."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], num_extras: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._row = GradientLayout(self._parameters, len(self._parameters) + num_extras).row()
        self._views = self._row.views
        self._summed = self._row.flats  # at the end of a step

    def reduce(
        self, extras: Sequence[float] = (), *, count_at: int | None = None, nominal_count: int = 1
    ) -> list[float]:
        """Replace each gradient by its sum over the members, scaled to the actual count; return the summed extras.

        `extras[count_at]` is this member's number of items; without it nothing is scaled. A parameter without a
        gradient on any member keeps none; one with a gradient on some members gets their sum.
        """
        users, totals = self._sum(self._copy_gradients(), extras)
        total_count = nominal_count if count_at is None else totals[count_at]
        if total_count and total_count != nominal_count:
            scale = nominal_count / total_count
            torch._foreach_mul_([view for view, num in zip(self._views, users, strict=True) if num], scale)
        self._give(users)
        return totals

    def _give(self, users: Sequence[float]) -> None:
        """Give parameters that some member has a gradient of what is in the buffers, and others none."""
        for parameter, view, num_users in zip(self._parameters, self._views, users, strict=True):
            parameter.grad = view if num_users else None

    def _copy_gradients(self) -> list[float]:
        """Fill the buffers; return which parameters have a gradient."""
        return copy_gradients(self._views, [parameter.grad for parameter in self._parameters])

    def _sum(self, flags: Sequence[float], extras: Sequence[float]) -> tuple[list[float], list[float]]:
        """Sum what is in the buffers over the members; return the sums of the flags and of the extras."""
        tail = self._row.tail
        tail.copy_(torch.tensor([*flags, *extras], device=tail.device))
        with BLOCKED:
            for flat in self._summed:
                dist.all_reduce(flat, group=self._group)
            settle(tail.device, self._group)
            summed = tail.tolist()
        return summed[: len(flags)], summed[len(flags) :]


def settle(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Make sure of what was exchanged on GPUs, before it is used. Collective there; nothing on CPUs, where calls wait.

    On a GPU an exchange with a member that is lost may end with anything in its tensors, and without an error. So it is
    waited for, and then the members meet on their CPUs, where a lost one is an error.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1), group=group)


_MAX_SEGMENTS = 8  # each costs a hand-over to a thread and a way through the network


class OverlappedExchange(GradientExchange):
    """Sums over the default group, most of it while the backward pass still computes the gradients of earlier layers.

    The gradients of the type that has most bytes are cut into segments, the last layers first. Each segment has an
    all-reduce of its own, in the same order on all members. The last segment is summed together with the extras. The
    sums have the same bits as those of `GradientExchange`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_extras: int, segment_bytes: int) -> None:
        super().__init__(list(reversed(parameters)), num_extras)
        place = max(range(len(self._row.flats)), key=lambda place: self._row.flats[place].nbytes)
        flat = self._row.flats[place]
        self._segments, stop = _cut(self._parameters, flat.dtype, max(segment_bytes, flat.nbytes // _MAX_SEGMENTS))
        self._early = [flat[segment.start : segment.stop] for segment in self._segments]
        self._summed = [flat[stop:] if index == place else other for index, other in enumerate(self._row.flats)]
        self._segment_of = {i: number for number, segment in enumerate(self._segments) for i in segment.members}
        self._index_of = {id(self._parameters[i]): i for i in self._segment_of}
        self._left: list[int] | None = None  # of each segment, how many parameters the backward pass still adds to
        self._works: list[Any] = []  # of the segments that are on their way
        self._flags: dict[int, float] = {}
        hook = partial(_note, weakref.ref(self))
        handles = [
            self._parameters[i].register_post_accumulate_grad_hook(partial(hook, i))  # type: ignore[no-untyped-call]
            for i in self._segment_of
        ]
        weakref.finalize(self, _remove, handles)

    def begin(self) -> None:
        """Begin a step. Waits for what one that failed has left on its way."""
        works, self._works, self._left, self._flags = self._works, [], None, {}
        for work in works:
            work.wait()

    def expect(self, reached: Iterable[Tensor]) -> None:
        """Exchange gradients during the next backward pass, the last of this step, which adds to those `reached`."""
        self._left = [0] * len(self._segments)
        for parameter in reached:
            if (i := self._index_of.get(id(parameter))) is not None:
                self._left[self._segment_of[i]] += 1
        self._start_complete()

    def note(self, i: int) -> None:
        """The backward pass has added to a gradient."""
        if self._left is None:
            return
        number = self._segment_of[i]
        if number < len(self._works):
            raise TrainingError(
                "a gradient changed after it was sent to the other workers: a hook of the model runs a backward pass "
                "of its own. Remove the hook, or set strategy.reducer = 'flat'"
            )
        self._left[number] -= 1
        self._start_complete()

    def _start_complete(self) -> None:
        assert self._left is not None
        while len(self._works) < len(self._segments) and self._left[len(self._works)] <= 0:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._works)
        members = self._segments[number].members
        self._flags |= self._copy(members)
        self._works.append(dist.all_reduce(self._early[number], async_op=True))

    def _copy(self, members: Sequence[int]) -> dict[int, float]:
        flags = copy_gradients([self._views[i] for i in members], [self._parameters[i].grad for i in members])
        return dict(zip(members, flags, strict=True))

    def _copy_gradients(self) -> list[float]:
        """Start what was not started yet, wait until it is done, and leave the rest in the buffers."""
        while len(self._works) < len(self._segments):
            self._start_next()
        self._flags |= self._copy([i for i in range(len(self._parameters)) if i not in self._segment_of])
        flags = [self._flags[i] for i in range(len(self._parameters))]
        self.begin()
        return flags


class _Segment(NamedTuple):
    members: list[int]  # which parameters
    start: int
    stop: int  # in the flat tensor


def _cut(parameters: Sequence[nn.Parameter], dtype: torch.dtype, segment_bytes: int) -> tuple[list[_Segment], int]:
    """Return segments of the parameters of a type, all but the last one, and where the last one starts."""
    segments, members, start, stop = [], [], 0, 0
    for i, parameter in enumerate(parameters):
        if parameter.dtype is dtype:
            members.append(i)
            stop += parameter.numel()
            if (stop - start) * parameter.itemsize >= segment_bytes:
                segments.append(_Segment(members, start, stop))
                members, start = [], stop
    if not members and segments:
        start = segments.pop().start
    return segments, start


def _note(exchange: weakref.ref[OverlappedExchange], i: int, _: Tensor) -> None:
    if (found := exchange()) is not None:
        found.note(i)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def spans_hosts() -> bool:
    """Whether members of the default group are connected by a network."""
    return bool(getattr(dist.group.WORLD, "spans_hosts", False))


class AccumulatingExchange(GradientExchange):
    """An exchange for gradients that add up over several backward passes, of which some are not exchanged.

    A gradient is either *common*, the same on all members, or *local*: it has parts that have not been exchanged.
    In a local gradient the first member also holds what was common before, and the others do not, so that the sum
    over the members is right whichever passes touched the parameter on whichever member.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_extras: int, *, is_first: bool) -> None:
        super().__init__(parameters, num_extras)
        self.parameters = tuple(self._parameters)
        self._is_first = is_first
        self._local: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor] = {}

    @property
    def has_local(self) -> bool:
        return any(parameter.grad is self._local.get(i, ...) for i, parameter in enumerate(self._parameters))

    def local_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient would change in an exchange."""
        return [self._parameters[i] for i, gradient in self._local.items() if self._parameters[i].grad is gradient]

    def begin_pass(self, *, is_kept: bool = True) -> float:
        """Take the common gradients out of the way of a backward pass; return a number that identifies them.

        Without `is_kept` the pass counts for nothing, and `end_pass` drops what it computes.
        """
        for i, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or gradient is not self._local.get(i):
                self._local.pop(i, None)  # was set to None, or to something that is the same everywhere
            if gradient is not None and (not is_kept or i not in self._local):
                is_buffer = not gradient.is_sparse and gradient.data_ptr() == self._views[i].data_ptr()
                self._aside[i] = gradient.clone() if is_buffer and i not in self._local else gradient
                parameter.grad = None
        common = [gradient for i, gradient in self._aside.items() if i not in self._local and not gradient.is_sparse]
        return float(sum(torch._foreach_norm(common, 1.0))) if common else 0.0

    def end_pass(self, *, is_kept: bool = True) -> None:
        """Put what was taken away back, and remember which gradients the pass has changed."""
        for i, parameter in enumerate(self._parameters):
            aside = self._aside.get(i)
            if not is_kept or parameter.grad is None:
                parameter.grad = aside
            else:
                if aside is not None and self._is_first:
                    parameter.grad = parameter.grad + aside
                self._local[i] = parameter.grad
        self._aside.clear()

    def reduce_local(self, extras: Sequence[float]) -> list[float]:
        """Replace the gradients that are local on any member by their sums; return the summed extras. Collective."""
        held = [
            parameter.grad if i in self._local or self._is_first else None
            for i, parameter in enumerate(self._parameters)
        ]
        copy_gradients(self._views, held)
        flags = [float(i in self._local) for i in range(len(self._parameters))]
        num_locals, totals = self._sum(flags, extras)
        for parameter, view, num_local in zip(self._parameters, self._views, num_locals, strict=True):
            if num_local:
                parameter.grad = view
        self._local.clear()
        return totals


def copy_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[float]:
    """Fill the views with the gradients; one that is missing counts as zero, and its flag is 0 instead of 1."""
    dense = [gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient for gradient in gradients]
    flags = [0.0 if gradient is None else 1.0 for gradient in dense]
    if all(flags):
        torch._foreach_copy_(views, dense)  # type: ignore[arg-type]
    else:
        for view, gradient in zip(views, dense, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
    return flags


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every member of the group the first member's values, in place. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=0)


# Sums over the logical shards of all members, added in one order whoever holds which (core/shards.py).


class TreeSum:
    """Adds the blocks of all members of the default group. The result has the same bits on any number of members."""

    def __init__(self, num_shards: int, member: int, num_members: int) -> None:
        held = [whole_blocks(share_shards(num_shards, other, num_members)) for other in range(num_members)]
        self.own: Sequence[Block] = held[member]  # what `reduce` takes, in this order
        self._root = Block(0, num_shards)
        self._num_members = num_members
        self._num_rows = max(len(blocks) for blocks in held)
        # Where each block is found once the rows of all members are gathered.
        self._rows = {block: i * self._num_rows + k for i, blocks in enumerate(held) for k, block in enumerate(blocks)}
        # Two numbers have one sum in either order, so that a plain all-reduce is the tree.
        self._is_pair = num_members == 2 and self._num_rows == 1
        self._gathered: dict[tuple[torch.dtype, int], Tensor] = {}

    def rows(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for the own blocks, one in each row; members with fewer blocks than others have rows to spare."""
        return torch.zeros(self._num_rows, size, dtype=dtype, device=device)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the sum over all shards, given the own blocks' sums in `rows`.

        Collective. The result lies in memory that the next call with as many numbers overwrites, as may `rows`.
        """
        if self._num_members == 1:
            return rows[0]
        if self._is_pair:
            dist.all_reduce(rows[0])
            return rows[0]
        gathered = self._room(rows)
        dist.all_gather_single(gathered, rows)

        def find(block: Block) -> Tensor | None:
            return gathered[self._rows[block]] if block in self._rows else None

        return add_up(self._root, find, add_in_place)

    def _room(self, rows: Tensor) -> Tensor:
        """Return where to gather; kept, since fresh memory costs more than the sum."""
        key = (rows.dtype, rows.shape[1])
        if key not in self._gathered:
            self._gathered[key] = rows.new_empty(self._num_members * self._num_rows, rows.shape[1])
        return self._gathered[key]


def add_in_place(one: Tensor, other: Tensor) -> Tensor:
    return one.add_(other)


# Whether the members' copies of the same tensors are the same, bit for bit.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_differences(values: Mapping[str, Tensor | float]) -> dict[str, list[int]]:
    """Return the names whose values differ, each with the members that differ from the first. Collective.

    A tensor's digest is the sum of its bits, taken as whole numbers: one pass through memory. While all is the
    same, members exchange one number.
    """
    digests = torch.tensor([_digest(value) for value in values.values()], dtype=torch.int64)
    names = ",".join(values).encode()
    whole = hashlib.blake2b(names + digests.numpy().tobytes(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(whole), len(digests)])
    size = dist.get_world_size()
    everybody = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everybody, own)
    if all(torch.equal(other, everybody[0]) for other in everybody):
        return {}
    if any(int(other[1]) != len(digests) for other in everybody):
        odd = [index for index, other in enumerate(everybody) if int(other[1]) != int(everybody[0][1])]
        return {"the number of tensors": odd}
    tables = [torch.empty_like(digests) for _ in range(size)]
    dist.all_gather(tables, digests)
    found = {
        name: [index for index in range(size) if tables[index][place] != tables[0][place]]
        for place, name in enumerate(values)
    }
    return {name: members for name, members in found.items() if members} or {"the names": list(range(1, size))}


def _digest(value: Tensor | float) -> int:
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float64)
    flat = value.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().reshape(-1)
    total = int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
    return (total * 1_000_003 + hash(tuple(value.shape))) % 2**62


# Distinguishing the loss of a peer from an error of this process.

_MARK = f"{CommunicationError.__name__}: "
_GLOO = "/gloo/"


def find_lost_peer(error: BaseException | None) -> CommunicationError | None:
    """Return the communication error that `error` is or comes from; None if it has another reason."""
    while error is not None:
        if isinstance(error, CommunicationError):
            return error
        if isinstance(error, dist.DistBackendError):
            return CommunicationError(str(error))
        # torch passes an error of a future's callback on as text, with the traceback in it.
        if isinstance(error, RuntimeError) and _MARK in str(error):
            return CommunicationError(str(error).split(_MARK, 1)[1].partition("\n")[0])
        # Between hosts gloo speaks for itself, with the place in its source: "[…/gloo/transport/tcp/pair.cc:553] …".
        if isinstance(error, RuntimeError) and _GLOO in str(error):
            said = str(error).partition("] ")[2] or str(error)
            return CommunicationError(f"the exchange with the other hosts failed: {said.partition('. ')[0]}")
        error = error.__cause__ or error.__context__
    return None
