"""Reproducible steps: each logical shard is computed alone, and all are added in one order.

What a shard computes depends on its samples, its own random numbers and the weights, and on nothing that the
number of workers changes. Batch norms see the statistics of their shard; what they keep is the mean over the
shards of what each would have kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.communication.exchange import GradientLayout, GradientRow, TreeSum, add_in_place, copy_gradients
from cordee.compute import Computation, Loss, Votes
from cordee.core import Batch
from cordee.core.seeds import derive_seed
from cordee.core.shards import Block, Shards, add_up

NUM_FIXED = 5  # loss sum, count, correct, items, samples; the votes follow
COUNT_AT = 1
ALIGNMENT_BYTES = 64  # of what torch allocates: kernels may treat the ends of other memory differently


class ShardReducer:
    """Computes a step shard by shard. Collective in a team; alone it does the same with all shards."""

    def __init__(
        self, model: nn.Module, computation: Computation, team: Team, shards: Shards, nominal_count: int
    ) -> None:
        self._model, self._computation, self._nominal_count = model, computation, nominal_count
        self._shards = shards
        self._tree = TreeSum(shards.total, team.worker_index, team.num_workers)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = _BufferKeeper(model, self._tree)
        self._layout = GradientLayout(self._parameters, len(self._parameters) + NUM_FIXED + len(Votes._fields))
        self._rows = _ExchangeRows(self._layout, self._tree)
        self._spare: list[GradientRow] = []

    def step(self, parts: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        """Leave the gradient of the whole batch in `.grad`. `parts` are those of the own shards, as many of each.

        Random numbers of a shard follow from the seed that torch was given for this step.
        """
        seed = torch.default_generator.initial_seed()
        num_parts = len(parts) // self._shards.num_held
        self._buffers.begin()

        def compute(block: Block) -> GradientRow | None:
            if block.stop - block.first > 1:
                return None
            own = block.first - self._shards.first
            torch.default_generator.manual_seed(derive_seed(seed, "shard", block.first))
            return self._compute_shard(block.first, parts[own * num_parts : (own + 1) * num_parts], measure)

        try:
            for place, block in enumerate(self._tree.own):
                row = add_up(block, compute, self._add)
                self._rows.put(place, row)
                self._spare.append(row)
            votes = vote()
            self._rows.tails[0][-len(votes) :] += torch.tensor(votes, dtype=torch.float32)
            summed = self._rows.reduce()
            tail = summed.tail.tolist()
            users, totals = tail[: len(self._parameters)], tail[len(self._parameters) :]
            self._buffers.agree()
        except BaseException:
            self._buffers.undo()  # the step in flight is dropped, and with it what it did to batch norms
            raise
        return self._finish(summed, users, totals, measure)

    def _compute_shard(self, shard: int, parts: Sequence[Batch], measure: bool) -> GradientRow:
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._computation.forward_backward(
            self._model, [aligned(part) for part in parts], total_count=self._nominal_count, measure=measure
        )
        self._buffers.collect(shard, has_samples=loss.num_samples > 0)
        row = self._spare.pop() if self._spare else self._layout.row()
        flags = copy_gradients(row.views, [parameter.grad for parameter in self._parameters])
        row.tail.copy_(torch.tensor([*flags, *loss.summands(), *Votes()]))
        return row

    def _add(self, one: GradientRow, other: GradientRow) -> GradientRow:
        torch._foreach_add_(one.flats, other.flats)
        self._spare.append(other)
        return one

    def _finish(self, summed: GradientRow, users: list[float], totals: list[float], measure: bool) -> Loss:
        loss = Loss.from_totals(totals, has_accuracy=measure and self._computation.counts_classes)
        used = [view for view, num in zip(summed.views, users, strict=True) if num]
        if loss.count and loss.count != self._nominal_count and used:
            torch._foreach_mul_(used, self._nominal_count / loss.count)
        for parameter, view, num in zip(self._parameters, summed.views, users, strict=True):
            parameter.grad = view if num else None
        return loss


def aligned(batch: Batch) -> Batch:
    """Return the batch in memory whose start does not change how kernels go through it."""
    return batch.map(lambda t: t if t.data_ptr() % ALIGNMENT_BYTES == 0 else t.clone())


class _ExchangeRows:
    """The memory from which a worker's blocks are exchanged."""

    def __init__(self, layout: GradientLayout, tree: TreeSum) -> None:
        self._layout, self._tree = layout, tree
        self._stacks = [tree.rows(size, dtype, layout.device) for dtype, size in layout.sizes.items()]
        unbound = zip(*(stack.unbind(0) for stack in self._stacks), strict=True)
        self._rows = [layout.over(list(flats)) for flats in unbound]
        self.tails = [row.tail for row in self._rows]
        self._sums: dict[tuple[int, ...], GradientRow] = {}

    def put(self, place: int, row: GradientRow) -> None:
        torch._foreach_copy_(self._rows[place].flats, row.flats)

    def reduce(self) -> GradientRow:
        flats = [self._tree.reduce(stack) for stack in self._stacks]
        place = tuple(flat.data_ptr() for flat in flats)  # the same memory every time, but for the first
        if place not in self._sums:
            self._sums = {place: self._layout.over(flats)}
        return self._sums[place]


class _BufferKeeper:
    """What a model keeps beside its parameters: every shard starts from the same, and their mean is kept.

    Of buffers that are not floating-point (counters) the first shard's are kept. A buffer that no shard changed
    is left alone.
    """

    def __init__(self, model: nn.Module, tree: TreeSum) -> None:
        self._model, self._tree = model, tree
        self._buffers: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._changes: dict[int, dict[int, Tensor]] = {}  # shard -> buffer -> what the shard made of it
        self._present: set[int] = set()  # shards with samples

    def begin(self) -> None:
        """Remember the buffers as they are."""
        self._buffers = list(self._model.buffers())
        self._starts = [buffer.clone() for buffer in self._buffers]
        self._changes, self._present = {}, set()

    def collect(self, shard: int, *, has_samples: bool) -> None:
        """Take what a shard's pass made of the buffers, and put them back for the next."""
        if has_samples:
            self._present.add(shard)
        if not self._buffers:
            self._changes[shard] = {}
            return  # the modules need not be gone through again for each shard
        # Compared by value: torch's batch norm does not count up the version of what it changes.
        self._buffers = list(self._model.buffers())  # some models put a new tensor in the place of the old one
        pairs = enumerate(zip(self._buffers, self._starts, strict=True))
        self._changes[shard] = {i: new.double().clone() for i, (new, old) in pairs if not torch.equal(new, old)}
        self._restore(self._changes[shard])

    def agree(self) -> None:
        """Give every member the mean over the shards. Collective, if the model has buffers at all."""
        if not self._buffers:
            return
        flags = self._tree_sum(lambda shard: self._flags(shard), len(self._buffers) + 1)
        *users, num_present = flags.tolist()
        changed = [i for i, num in enumerate(users) if num]
        if not changed:
            return
        size = sum(self._buffers[i].numel() for i in changed)
        total = self._tree_sum(lambda shard: self._values(shard, changed), size)
        with torch.no_grad():
            for i, part in zip(changed, torch.split(total, [self._buffers[i].numel() for i in changed]), strict=True):
                buffer = self._buffers[i]
                mean = part / num_present if buffer.is_floating_point() else part
                buffer.copy_(mean.view_as(buffer))

    def undo(self) -> None:
        """Put everything back as it was at the start of the step."""
        self._restore(range(len(self._starts)))

    def _restore(self, which: Iterable[int]) -> None:
        with torch.no_grad():
            for i in which:
                self._buffers[i].copy_(self._starts[i])

    def _flags(self, shard: int) -> Tensor:
        changed = self._changes[shard]
        flags = [float(i in changed) for i in range(len(self._buffers))]
        return torch.tensor([*flags, float(shard in self._present)], dtype=torch.float64)

    def _values(self, shard: int, changed: Sequence[int]) -> Tensor:
        parts = []
        for i in changed:
            value = self._changes[shard].get(i, self._starts[i].double())
            counts = shard in self._present and (self._buffers[i].is_floating_point() or shard == 0)
            parts.append(value.reshape(-1) if counts else torch.zeros(value.numel(), dtype=torch.float64))
        return torch.cat(parts)

    def _tree_sum(self, of_shard: Callable[[int], Tensor], size: int) -> Tensor:
        rows = self._tree.rows(size, torch.float64, torch.device("cpu"))
        for place, block in enumerate(self._tree.own):
            rows[place] = add_up(
                block,
                lambda node: of_shard(node.first) if node.stop - node.first == 1 else None,
                add_in_place,
            )
        return self._tree.reduce(rows)
