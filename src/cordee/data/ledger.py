"""The sample ledger: which samples are handed out to whom, and which have counted. Decides without I/O.

A run is a sequence of steps, each a global batch or several in a row; a step is cut into as many units as there were
workers when it was begun. Units are handed out in order, on demand, and committed once their gradient has gone into the
weights. What a lost worker had in hand goes to the next that asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from cordee.core.shards import shard_part
from cordee.data.order import count_batches


@dataclass(frozen=True)
class Exchanges:
    """Which global batches make up each step of a ledger: up to `size` in a row, all of one epoch.

    Within an epoch, steps begin at multiples of `size`, wherever the run begins. Only the first and the last step of a
    run may have fewer batches than that, and the last one of an epoch. Batches are counted over all epochs.
    """

    num_samples: int
    batch_size: int
    last: int  # the run ends before this batch
    first: int = 0  # and begins with this one
    size: int = 1

    @property
    def batches_per_epoch(self) -> int:
        return count_batches(self.num_samples, self.batch_size)

    @property
    def per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.size)

    @property
    def first_step(self) -> int:
        return self._step_of(self.first) if self.first < self.last else self.num_steps

    @property
    def num_steps(self) -> int:
        """The number of the last step, plus one."""
        return self._step_of(self.last - 1) + 1 if self.last > 0 else 0

    def batches(self, step: int) -> tuple[int, int]:
        """Return the batches [start, stop) of a step."""
        epoch, within = divmod(step, self.per_epoch)
        before = epoch * self.batches_per_epoch
        start = before + within * self.size
        stop = before + min((within + 1) * self.size, self.batches_per_epoch)
        return max(start, self.first), min(stop, self.last)

    def batches_before(self, step: int) -> int:
        """Return how many batches are used up when all steps before `step` are done."""
        return self.first if step <= self.first_step else self.batches(step - 1)[1]

    def samples(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of a step and its positions [start, stop) in it."""
        first, last = self.batches(step)
        epoch, batch = divmod(first, self.batches_per_epoch)
        stop = (batch + last - first) * self.batch_size
        return epoch, batch * self.batch_size, min(stop, self.num_samples)

    def _step_of(self, batch: int) -> int:
        epoch, within = divmod(batch, self.batches_per_epoch)
        return epoch * self.per_epoch + within // self.size


@dataclass(frozen=True)
class Unit:
    """A piece of work: the positions [start, stop) of an epoch."""

    number: int  # step * units per step + share: grows over the run
    step: int
    share: int
    num_shares: int  # units of its step that have samples
    epoch: int
    start: int
    stop: int
    first_batch: int  # of its step, counted over all epochs
    num_batches: int  # of its step

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


class LedgerState(msgspec.Struct, frozen=True):
    """Where a ledger is, to continue from there."""

    committed_steps: int
    next_unit: int | None  # the first that was never handed out
    committed: list[int]  # units at or after the first incomplete step
    returned: list[int]
    taken: dict[int, str]  # unit -> who has it


@dataclass
class Ledger:
    """Hands out the units of a run and records those that are done."""

    exchanges: Exchanges
    num_shares: int
    taken: dict[int, tuple[str, Unit]] = field(default_factory=dict)  # unit number -> who has it
    _returned: list[Unit] = field(default_factory=list)
    _done: dict[int, int] = field(default_factory=dict)  # step -> units committed, for steps not complete

    def __post_init__(self) -> None:
        first_step = self.exchanges.first_step
        self.num_steps = self.exchanges.num_steps
        self.committed_steps = first_step
        """All units of the steps before this one are committed."""
        self._upcoming = self._units(first_step, 0)
        self._next: Unit | None = next(self._upcoming, None)
        self._committed: set[int] = set()  # unit numbers at or after the first incomplete step

    @property
    def state(self) -> LedgerState:
        return LedgerState(
            self.committed_steps,
            None if self._next is None else self._next.number,
            sorted(self._committed),
            [unit.number for unit in self._returned],
            {number: holder for number, (holder, _) in self.taken.items()},
        )

    def restore(self, state: LedgerState) -> None:
        """Be where another ledger of the same run was."""
        self.committed_steps = state.committed_steps
        if state.next_unit is None:
            self._next = None
        else:
            step, share = divmod(state.next_unit, self.num_shares)
            self._upcoming = self._units(step, share)
            self._next = next(self._upcoming, None)
        self._committed = set(state.committed)
        self._done = dict(Counter(number // self.num_shares for number in state.committed))
        self._returned = [self._unit(number) for number in state.returned]
        self.taken = {number: (holder, self._unit(number)) for number, holder in state.taken.items()}

    @property
    def is_complete(self) -> bool:
        return self.committed_steps >= self.num_steps

    @property
    def highest_step_taken(self) -> int:
        """The step of the next new unit, or the number of steps when all are handed out."""
        return self._next.step if self._next is not None else self.num_steps

    @property
    def next_share(self) -> int:
        """The share of the next new unit: above 0 where its step is begun."""
        return self._next.share if self._next is not None else 0

    @property
    def has_returned(self) -> bool:
        """Whether there is a unit that somebody had in hand before."""
        return bool(self._returned)

    def take(self, worker: str, *, limit_step: int) -> Unit | None:
        """Hand out the next unit of a step before `limit_step`, or None if there is none now."""
        if self._returned:
            unit = min(self._returned, key=lambda unit: unit.number)
            if unit.step >= limit_step:
                return None
            self._returned.remove(unit)
        elif self._next is not None and self._next.step < limit_step:
            unit = self._next
            self._next = next(self._upcoming, None)
        else:
            return None
        self.taken[unit.number] = (worker, unit)
        return unit

    def commit(self, number: int) -> bool:
        """Record that a unit is done, whoever did it; False if it was known already."""
        if number in self._committed or number // self.num_shares < self.committed_steps:
            return False
        self.taken.pop(number, None)
        self._returned = [unit for unit in self._returned if unit.number != number]
        self._committed.add(number)
        step = number // self.num_shares
        self._done[step] = self._done.get(step, 0) + 1
        while self.committed_steps < self.num_steps and self._done.get(self.committed_steps, 0) == self._num_units(
            self.committed_steps
        ):
            del self._done[self.committed_steps]
            first = self.committed_steps * self.num_shares
            self._committed -= set(range(first, first + self.num_shares))
            self.committed_steps += 1
        return True

    def reopen(self) -> None:
        """Have all units of steps that are not committed handed out again, also those that are done or in hand."""
        numbers = {*self._committed, *self.taken, *(unit.number for unit in self._returned)}
        self._returned = [self._unit(number) for number in sorted(numbers)]
        self._committed, self.taken, self._done = set(), {}, {}

    def requeue(self, worker: str) -> list[Unit]:
        """Take away what a lost worker had in hand, for others to do."""
        lost = [unit for holder, unit in self.taken.values() if holder == worker]
        for unit in lost:
            del self.taken[unit.number]
        self._returned += lost
        return lost

    def give_up(self, number: int) -> Unit | None:
        """Take one unit from a worker that is too slow with it."""
        holder = self.taken.pop(number, None)
        if holder is None:
            return None
        self._returned.append(holder[1])
        return holder[1]

    def _num_units(self, step: int) -> int:
        _, start, stop = self.exchanges.samples(step)
        return min(stop - start, self.num_shares)

    def _units(self, first_step: int, first_share: int) -> Iterator[Unit]:
        """Yield all units with samples from this one on."""
        for step in range(first_step, self.num_steps):
            for share in range(first_share if step == first_step else 0, self._num_units(step)):
                yield self._unit(step * self.num_shares + share)

    def _unit(self, number: int) -> Unit:
        step, share = divmod(number, self.num_shares)
        epoch, first, last = self.exchanges.samples(step)
        start, stop = shard_part(last - first, share, self.num_shares)
        batch, end = self.exchanges.batches(step)
        return Unit(number, step, share, self._num_units(step), epoch, first + start, first + stop, batch, end - batch)
