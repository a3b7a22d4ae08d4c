"""This worker's share of each batch: how it is cut, and shares by measured speed for workers of unlike hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from cordee.compute import split_batch
from cordee.core import Batch, Job
from cordee.core.batch import Pieces
from cordee.core.errors import JobError
from cordee.core.shards import Shards, share_by_speed
from cordee.data import GrowingSource, Splits
from cordee.data.datasets import IterableSource
from cordee.monitoring import Monitor
from cordee.monitoring.events import Balance as BalanceEvent
from cordee.strategies.choice import entry_of
from cordee.strategies.table import quote_names, strategies_where

if TYPE_CHECKING:
    from cordee.training.components import Components

FIRST_STEPS = 10  # of a team, that are measured before shares are changed; the very first is not counted
EVERY_STEPS = 100  # after that
LEAST_GAIN = 0.03  # of the time of a step: a change costs what is read ahead


def cut(batch: Batch | Pieces, parts: Components) -> list[Batch]:
    """Return the parts of a share to compute one after the other: of the first logical shard, then of the next."""
    shards = split_batch(batch, parts.shards.num_held) if parts.job.training.reproducible else [batch]
    return [part for shard in shards for part in split_batch(shard, parts.job.training.accumulate)]


def check_balance(job: Job, splits: Splits) -> None:
    """Raise JobError where the job asks for shares by speed and cannot have them."""
    if not job.cluster.balance:
        return
    workers, able = job.strategy.workers, quote_names(strategies_where(lambda entry: entry.can_balance))
    if not entry_of(job).can_balance or workers < 2:
        raise JobError(
            f"cluster.balance = true gives workers shares of a batch by their speed, which strategy "
            f"'{job.strategy.name}' with {workers} worker{'s' * (workers > 1)} cannot: use {able} with at least 2 "
            "workers, or remove the setting"
        )
    if job.training.reproducible:
        raise JobError(
            "cluster.balance = true changes who computes what by measured speed, which training.reproducible = true "
            "rules out: remove one of the two"
        )
    if isinstance(splits.train, IterableSource | GrowingSource):
        raise JobError(
            f"cluster.balance = true reads on at any place with other shares, and data {splits.name!r} is a stream: "
            "use data with a length, or remove the setting"
        )


class Decision(NamedTuple):
    """What was decided."""

    samples: list[int]  # of a whole batch, by worker
    samples_per_second: list[float]


class Balance:
    """Measures one worker of a team, and decides on the shares of all."""

    def __init__(self, batch_size: int, num_workers: int) -> None:
        self._batch_size = batch_size
        self._shares = share_by_speed(batch_size, [1.0] * num_workers)
        self._num_steps = -1
        self._next = FIRST_STEPS
        self._seconds, self._samples = 0.0, 0

    @classmethod
    def of(cls, parts: Components) -> Balance:
        """Return what measures a member of a team; it never decides anything where the job does not ask for it."""
        is_wanted = parts.job.cluster.balance and parts.team.num_workers > 1
        return cls(parts.job.training.batch_size, parts.team.num_workers if is_wanted else 1)

    def record(self, seconds: float, num_samples: int) -> None:
        """Take what this worker's own part of a step took."""
        self._num_steps += 1
        if self._num_steps > 0:
            self._seconds += seconds
            self._samples += num_samples

    @property
    def is_due(self) -> bool:
        """Whether it is time to decide: after the same steps on all workers."""
        return len(self._shares) > 1 and self._num_steps >= self._next

    def take_speed(self) -> int:
        """Return this worker's samples in 1000 s, and begin to measure again. 0 where it had nothing to do."""
        self._next = self._num_steps + EVERY_STEPS
        seconds, samples = self._seconds, self._samples
        self._seconds, self._samples = 0.0, 0
        return round(1000 * samples / seconds) if seconds > 0 else 0

    def change(self, parts: Components, step: int, monitor: Monitor) -> Components | None:
        """Where it is time to, give slower workers less: return the parts with other shares, or None.

        Collective: all decide the same after the same step.
        """
        if not self.is_due:
            return None
        shares = self.decide(parts.team.gather(self.take_speed()))
        if shares is None:
            return None
        monitor.emit(BalanceEvent(step=step, shares=shares.samples, samples_per_second=shares.samples_per_second))
        first = sum(shares.samples[: parts.team.worker_index])
        own = Shards(first, first + shares.samples[parts.team.worker_index], self._batch_size)
        return replace(parts, train=parts.train.with_shards(own), shards=own)

    def decide(self, speeds: Sequence[int]) -> Decision | None:
        """Return other shares, given what `take_speed` returned on each worker, or None where they stay."""
        if min(speeds) <= 0:
            return None  # who has not computed anything has no speed
        wanted = share_by_speed(self._batch_size, [float(speed) for speed in speeds])
        now_s = max(share / speed for share, speed in zip(self._shares, speeds, strict=True))
        then_s = max(share / speed for share, speed in zip(wanted, speeds, strict=True))
        if then_s > (1 - LEAST_GAIN) * now_s:
            return None
        self._shares = wanted
        return Decision(wanted, [speed / 1000 for speed in speeds])
