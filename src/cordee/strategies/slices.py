"""What a worker holds of a model that is split, as its optimizer sees it, and how the whole is made of it again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cordee.checkpoint import Slice, State
from cordee.communication.exchange import settle


class Place(NamedTuple):
    """Where a slice is in the whole, as `checkpoint.Slice` has it."""

    start: int
    num_runs: int = 1
    distance: int = 0


@dataclass(eq=False)
class Held:
    """A parameter that is here entirely; others hold a slice of one."""

    name: str
    local: nn.Parameter  # what is here; the optimizer changes it in place
    num_holders: int = 1  # workers that hold the same

    @property
    def shape(self) -> torch.Size:
        """That of the whole parameter."""
        return self.local.shape

    def take_gradient(self) -> None:
        """Let `local` have the gradient that the backward pass computed. Once it has, nothing happens."""

    def drop_gradient(self) -> None:
        self.local.grad = None

    @property
    def place(self) -> Place | None:
        """Where the numbers that are here are in the whole; None if they are no runs of one length and distance."""
        return Place(0)

    def here(self, local: Tensor) -> Tensor:
        """Return what of `local`, shaped like the slice, is in the whole."""
        return local

    def slice_of(self, local: Tensor) -> Slice:
        """Return what is saved of `local`, shaped like the slice. There is a place for it."""
        assert self.place is not None, self.name
        return Slice(self.place.start, self.here(local), self.place.num_runs, self.place.distance)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing here."""
        return True

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole of which `local`, shaped like the slice, is here. Collective over who has a slice."""
        return local

    def cut(self, whole: Tensor) -> Tensor:
        """Return what of `whole` belongs here."""
        return whole


class SlicedParameter(Held):
    """A parameter that torch holds as a DTensor. The optimizer gets the slice as a plain tensor.

    DTensors would do as well and cost an optimizer some 50 µs of dispatch per operation; where every element is
    updated by itself (`elementwise.py`) the result is the same.
    """

    def __init__(self, name: str, parameter: nn.Parameter, num_holders: int) -> None:
        assert isinstance(parameter, DTensor)
        local = nn.Parameter(_local(parameter).detach(), requires_grad=parameter.requires_grad)
        super().__init__(name, local, num_holders)
        self._parameter: Any = parameter

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self._parameter.shape
        return shape

    @property
    def is_whole(self) -> bool:
        return self._sides == set()

    @functools.cached_property
    def _sides(self) -> set[int] | None:
        """The dimensions that are cut, the same on every worker; None if they are cut in another way than below."""
        sides: set[int] = set()
        for axis, placement in reversed(list(enumerate(self._parameter.placements))):
            if placement.is_replicate() or self._parameter.device_mesh.size(axis) == 1:
                continue
            # What lies along a later axis of the mesh was cut first, as FSDP cuts slices of layers.
            is_next = isinstance(placement, _StridedShard)
            if not (isinstance(placement, Shard) or is_next) or (placement.dim in sides and not is_next):
                return None
            sides.add(placement.dim)
        return sides

    @functools.cached_property
    def _box(self) -> list[tuple[int, int]]:
        """The first index and how many are here, along each dimension of the whole. There are `_sides`."""
        of = self._parameter
        box = [(0, int(size)) for size in of.shape]
        for axis, placement in reversed(list(enumerate(of.placements))):
            if not placement.is_replicate():
                start, size = box[placement.dim]
                each = -(-size // int(of.device_mesh.size(axis)))  # as torch cuts: the last may have fewer, or none
                skipped = min(each * int(of.device_mesh.get_local_rank(axis)), size)
                box[placement.dim] = (start + skipped, min(each, size - skipped))
        assert [size for _, size in box] == list(self.local.shape), (box, self.local.shape, of.placements)
        return box

    @property
    def place(self) -> Place | None:
        if self._sides is None:
            return None
        shape = [int(size) for size in self.shape]
        side = max(self._sides, default=0)
        if self._sides - {0, side}:
            return None  # runs that are not all at one distance
        inner, distance = math.prod(shape[side + 1 :]), math.prod(shape[side:])
        (row, num_rows), (first, _) = self._box[0], self._box[side]
        if side == 0:
            return Place(row * inner)
        between = math.prod(shape[1:side])
        return Place(row * between * distance + first * inner, max(1, num_rows * between), distance)

    def take_gradient(self) -> None:
        gradient = self._parameter.grad
        if gradient is None:
            return
        if gradient.placements != self._parameter.placements:
            gradient = gradient.redistribute(placements=self._parameter.placements)  # partial sums
        self.local.grad, self._parameter.grad = _local(gradient), None

    def drop_gradient(self) -> None:
        self.local.grad = self._parameter.grad = None

    def gather(self, local: Tensor) -> Tensor:
        of = self._parameter
        spread = DTensor.from_local(
            local.contiguous(), of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
        )
        placements = list(of.placements)
        with torch.no_grad():
            for axis in range(len(placements)):  # one after the other: of several at once torch warns
                placements[axis] = Replicate()
                spread = spread.redistribute(placements=placements)
        return _local(spread)

    def cut(self, whole: Tensor) -> Tensor:
        of, cut = self._parameter, whole.detach()
        if self._sides is not None:
            for side, (start, size) in enumerate(self._box):
                cut = cut.narrow(side, start, size)  # a view, so that of a state in a file nothing else is read
            return cut
        # Without src_data_rank every worker would be sent what it has already.
        spread = distribute_tensor(whole.detach(), of.device_mesh, of.placements, src_data_rank=None)
        return _local(spread)


def hold(name: str, parameter: nn.Parameter, *, num_holders: int, num_slice_holders: int) -> Held:
    """Return a worker's hold on a parameter: `num_holders` if it is whole, `num_slice_holders` if a slice is here."""
    if isinstance(parameter, DTensor):
        is_whole = all(placement.is_replicate() for placement in parameter.placements)
        return SlicedParameter(name, parameter, num_holders if is_whole else num_slice_holders)
    return Held(name, parameter, num_holders)


class Holdings:
    """All that a worker holds, by name. Stands in for a model where optimizer state is saved and loaded."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = {one.name: one for one in held}

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter([(name, one.local) for name, one in self._held.items()])

    def gathered(self, state: State, *, keep: bool) -> State:
        """Return optimizer state with whole tensors in place of slices. Collective.

        Those who do not `keep` it take part and get nothing, so that they need no memory for it.
        """
        own = {one.name: one.local.shape for one in self}
        whole = {one.name: one.shape for one in self}

        def gather(one: Held, tensor: Tensor) -> Tensor:
            gathered = one.gather(tensor)
            return gathered if keep else tensor

        return self._changed(state, own, whole, gather)

    def sliced(self, state: State) -> tuple[State, dict[str, Held]]:
        """Return this optimizer state with the values of the whole, and of what each tensor is a slice. Local."""
        own = {one.name: one.local.shape for one in self}
        whole = {one.name: one.shape for one in self}
        slices: dict[int, Held] = {}

        def note(one: Held, tensor: Tensor) -> Tensor:
            slices[id(tensor)] = one
            return tensor

        described = self._changed(state, own, whole, note)
        return described, {name: slices[id(value)] for name, value in state.tensors.items() if id(value) in slices}

    def cut(self, state: State) -> State:
        """Return what of the whole optimizer state belongs to this worker."""
        groups = [
            {**group, "parameters": {name: shape for name, shape in group["parameters"].items() if name in self._held}}
            for group in state.values["groups"]
        ]
        kept = {name: inner for name, inner in state.values["state"].items() if name in self._held}
        own = State(state.tensors, {**state.values, "groups": groups, "state": kept})
        whole = {one.name: one.shape for one in self}
        return self._changed(own, whole, {one.name: one.local.shape for one in self}, lambda one, t: one.cut(t))

    def _changed(
        self,
        state: State,
        before: Mapping[str, torch.Size],
        after: Mapping[str, torch.Size],
        change: Callable[[Held, Tensor], Tensor],
    ) -> State:
        tensors = dict(state.tensors)
        for name, inner in state.values["state"].items():
            for key in _tensor_names(inner):
                # What has the parameter's shape is per element; the rest (a step count, say) is the same everywhere.
                if tensors[key].shape == before[name] and tensors[key].ndim:
                    tensors[key] = change(self._held[name], tensors[key])
        groups = [
            {**group, "parameters": {name: list(after[name]) for name in group["parameters"]}}
            for group in state.values["groups"]
        ]
        return State(tensors, {**state.values, "groups": groups})


def square_norm(held: Holdings) -> float:
    """Return this worker's part of the squared norm of the whole gradient: the parts of all workers add up to it."""
    total = 0.0
    by_holders: dict[int, list[Tensor]] = {}
    for one in held:
        if one.local.grad is not None:
            by_holders.setdefault(one.num_holders, []).append(one.local.grad)
    for num_holders, gradients in by_holders.items():
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
        total += float((norms * norms).sum()) / num_holders
    return total


def _tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of all tensors that a packed value refers to."""
    if isinstance(value, Mapping):
        if value.keys() == {"$tensor"}:
            yield value["$tensor"]
        else:
            for inner in value.values():
                yield from _tensor_names(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensor_names(inner)


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


# Gradients and optimizer state shared out among workers that hold the same weights and compute other samples.
#
# This is ZeRO's second stage, for stages of a pipeline: weights stay whole while the micro-batches pass, gradients are
# summed once per step, each worker steps its share of every parameter, and the new weights are put together.


class ShareOfParameter(Held):
    """An even share of what is held of a parameter, as one row of numbers; the last may be filled up with zeros.

    `reduce` gives it its gradient.
    """

    def __init__(self, base: Held, group: dist.ProcessGroup) -> None:
        self._base, self._group = base, group
        self._num_shares, self._index = dist.get_world_size(group), dist.get_rank(group)
        local = nn.Parameter(self._share(base.local.detach()).clone(), requires_grad=base.local.requires_grad)
        super().__init__(base.name, local, base.num_holders)

    @property
    def shape(self) -> torch.Size:
        return self._base.shape

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def place(self) -> Place | None:
        base = self._base.place
        if base is None or base.num_runs > 1:
            return None
        return Place(base.start + min(self._index * len(self.local), self._base.local.numel()))

    def here(self, local: Tensor) -> Tensor:
        return local[: max(0, self._base.local.numel() - self._index * len(self.local))]

    def drop_gradient(self) -> None:
        self.local.grad = None
        self._base.drop_gradient()

    def gather(self, local: Tensor) -> Tensor:
        return self._base.gather(self._put_together(local))

    def cut(self, whole: Tensor) -> Tensor:
        return self._share(self._base.cut(whole))

    def has_gradient(self) -> bool:
        """Take the gradient of what is held over; whether there is one."""
        self._base.take_gradient()
        return self._base.local.grad is not None

    def reduce(self) -> None:
        """Let `local` have its share of the sum of all workers' gradients. Collective."""
        gradient = self._base.local.grad
        flat = self._filled(torch.zeros_like(self._base.local) if gradient is None else gradient)
        self.local.grad = torch.empty_like(self.local)
        dist.reduce_scatter_single(self.local.grad, flat, group=self._group)
        self._base.drop_gradient()

    @torch.no_grad()
    def publish(self) -> None:
        """Put all workers' shares together where the weights are computed with. Collective."""
        self._base.local.copy_(self._put_together(self.local.detach()))

    def _share(self, held: Tensor) -> Tensor:
        return self._filled(held).chunk(self._num_shares)[self._index]

    def _filled(self, held: Tensor) -> Tensor:
        flat = held.reshape(-1)
        missing = -len(flat) % self._num_shares
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def _put_together(self, local: Tensor) -> Tensor:
        held = self._base.local
        flat = local.new_empty(len(local) * self._num_shares)
        dist.all_gather_single(flat, local.contiguous(), group=self._group)
        return flat[: held.numel()].view(held.shape)


class Shares:
    """All of a worker's shares."""

    def __init__(self, held: Sequence[Held], group: dist.ProcessGroup) -> None:
        self.held = [ShareOfParameter(one, group) for one in held]
        self._group = group

    def reduce(self) -> None:
        """Sum gradients over the group and keep the own share of each. Collective.

        What has no gradient on any worker gets none, so that optimizers leave it alone.
        """
        trained = [one for one in self.held if one.local.requires_grad]
        has_gradient = torch.tensor([float(one.has_gradient()) for one in trained])
        dist.all_reduce(has_gradient, group=self._group)
        for one, num_users in zip(trained, has_gradient.tolist(), strict=True):
            if num_users:
                one.reduce()

    def publish(self) -> None:
        """Let the weights be what the optimizers made of their shares. Collective."""
        for one in self.held:
            if one.local.requires_grad:
                one.publish()
        if self.held:
            settle(self.held[0].local.device, self._group)
