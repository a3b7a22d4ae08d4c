"""The passes of micro-batches through the stages of this process, of the few steps that are sampled.

A strategy that cuts a batch into micro-batches adds what it computes; the timeline of the process takes it after the
step. Used by the thread that trains.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from time import perf_counter_ns

_MOST_PASSES = 2000  # of one step that are kept; the rest is not recorded


class PassKind(IntEnum):
    """What a pass computes."""

    FORWARD = 0
    BACKWARD = 1  # all of it, or the gradients of the inputs where `WEIGHTS` come later
    WEIGHTS = 2


class Passes:
    """Records passes while it is on: outside of sampled steps a pass costs one look at `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._rows = array("q")

    def begin(self) -> None:
        """Record from now on; what was recorded before is dropped."""
        self._rows = array("q")
        self.is_on = True

    def add(self, kind: PassKind, stage: int, microbatch: int, begin_ns: int) -> None:
        """A pass that began at `begin_ns` has ended now."""
        if len(self._rows) < 5 * _MOST_PASSES:
            self._rows.extend((kind, stage, microbatch, begin_ns, perf_counter_ns() - begin_ns))

    def take(self) -> array[int]:
        """Return kind, stage, micro-batch, begin and length in ns of each pass; record nothing until `begin`."""
        rows, self._rows, self.is_on = self._rows, array("q"), False
        return rows


PASSES = Passes()


def is_sampled(step: int) -> bool:
    """Return whether the passes of a step are recorded: nine steps of each power of ten. Pure.

    The same on every member, so that the passes of one step are recorded by all of them.
    """
    magnitude: int = 10 ** (len(str(step)) - 1)
    return step % magnitude == 0


def sampled_around(step: int) -> tuple[int, int]:
    """Return the last step that is sampled up to a step, from 1 on, and the first after it. Pure."""
    magnitude: int = 10 ** (len(str(step)) - 1)
    last = step - step % magnitude
    return last, last + magnitude
