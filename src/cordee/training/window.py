"""Steps between two agreements: what is known of them, and what is due when members agree.

Members of most strategies agree in every step. Others take several steps alone (`strategies/strategy.py`): their place
in the data moves on, what was counted is known only when they agree. What is due at a step in between (to evaluate, to
save) is done where they agree next.
"""

from __future__ import annotations

import msgspec

from cordee.checkpoint import State, share_value
from cordee.cluster import Team
from cordee.monitoring import Monitor, events
from cordee.strategies.strategy import TrainsAlone
from cordee.training.components import Components
from cordee.training.progress import Progress


class Window:
    """The steps that this worker has taken since all members agreed."""

    def __init__(self) -> None:
        self.start: Progress | None = None  # where members agreed last; None: they agree now
        self.end: Progress | None = None  # how far this worker was when its team was lost
        self._before = (0, 0)  # steps and epochs, where members had agreed before they agreed last

    @property
    def is_open(self) -> bool:
        """Whether this worker has taken steps that the others do not know of."""
        return self.start is not None

    def open(self, progress: Progress) -> None:
        """Begin, before the first step that is taken alone, unless that was done."""
        if self.start is None:
            self.start = msgspec.convert(msgspec.to_builtins(progress), Progress)

    def close(self, progress: Progress) -> None:
        """Members agree; `progress` has what `resume` needs of the steps before."""
        assert self.start is not None
        progress.agreed_before = self._before = self.start.step, self.start.epoch
        self.start = self.end = None

    def take_up(self, strategy: TrainsAlone, progress: Progress, team: Team) -> Progress | None:
        """Open again what members did alone before their last team was lost; return how far that goes. Collective.

        `progress` is that of the last agreement. None: nobody has anything.
        """
        end = self.end if strategy.has_window else None
        ends = team.gather(-1 if end is None else end.step)
        furthest = max(ends)
        if furthest < 0:
            self.drop()
            return None
        if end is None or end.step != furthest:
            strategy.drop_window()  # it would count what the others do not
        self.open(progress)
        place = State({}, {"progress": msgspec.to_builtins(end or progress)})
        if team.num_workers > 1:
            place = share_value("progress", place, ends.index(furthest))
        return msgspec.convert(place.values["progress"], Progress)

    def drop(self) -> None:
        self.start = self.end = None

    def carry(self, progress: Progress) -> None:
        """Take along how far this worker is: its team is over, and `progress` will be that of the last agreement."""
        if self.start is not None:
            self.end, self.start = self.end or progress, None

    def resume(self, progress: Progress) -> None:
        """Continue from where members agreed: after steps that they took alone, or after a single one."""
        self._before = progress.agreed_before or (max(0, progress.step - 1), progress.epoch)

    def record_step(self, progress: Progress) -> None:
        """Members have agreed in the step that led to `progress`."""
        self._before, progress.agreed_before = (progress.step - 1, progress.epoch), None

    def passed_step(self, every: int, progress: Progress) -> bool:
        """Whether one of the steps since members had agreed before is the last of `every`; 0 is never."""
        return bool(every) and progress.step // every > self._before[0] // every

    def passed_epoch(self, every: int, progress: Progress) -> bool:
        """Whether one of the epochs that ended while members were apart is the last of `every`; 0 is never."""
        return bool(every) and progress.epoch // every > self._before[1] // every


def record_lost_samples(progress: Progress, parts: Components, monitor: Monitor) -> None:
    """Record the samples that a member which was lost had trained on alone: nobody has what it learnt of them.

    All members count the same; the first speaks. Where the data has no length nobody knows how many there were.
    """
    num_samples = parts.splits.train.num_samples
    if num_samples is None:
        return
    passed = progress.epoch * num_samples + min(progress.batch * parts.job.training.batch_size, num_samples)
    lost = passed - progress.samples
    if lost > progress.samples_lost:
        monitor.emit(events.SamplesLost(samples=lost - progress.samples_lost, step=progress.step))
    progress.samples_lost = lost
