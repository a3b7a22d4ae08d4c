"""Which pushes have counted, so that each counts once however often it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PushLog:
    """All pushes below a watermark have counted, and some pieces of later ones. A piece is named by where it starts."""

    below: int = 0
    above: set[tuple[int, int]] = field(default_factory=set)
    _newest: int = -1  # the largest number in `above`, or a larger one

    def __post_init__(self) -> None:
        self._newest = max((number for number, _ in self.above), default=-1)

    def has(self, number: int, start: int = 0) -> bool:
        return number < self.below or (number, start) in self.above

    def add(self, number: int, start: int = 0) -> None:
        self.above.add((number, start))
        if number > self._newest:
            self._newest = number

    def forget_below(self, floor: int) -> None:
        """No push below `floor` will count any more: it has, or its sender has gone past it."""
        if floor > self.below:
            self.below = floor
            if self._newest < floor:  # as with each push of a store: a set that is built again takes 0.4 µs
                self.above.clear()
            else:
                self.above = {piece for piece in self.above if piece[0] >= floor}

    def dump(self) -> tuple[int, list[tuple[int, int]]]:
        """Return plain values that `restored` makes a log of."""
        return self.below, sorted(self.above)

    @classmethod
    def restored(cls, plain: Sequence[Any]) -> PushLog:
        below, above = plain
        return cls(below, {(number, start) for number, start in above})
