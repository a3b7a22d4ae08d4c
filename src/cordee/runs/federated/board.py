"""Which task of a federated run is next: a small state machine over rounds. Decided without I/O.

A task may be done twice: by a worker that was given up, or when its coordinator was killed. Both write the same files
with the same bits, and the first report counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from cordee.core.shards import Block
from cordee.runs.federated.messages import TaskKind
from cordee.strategies.federated.aggregation import blocks_of
from cordee.strategies.federated.schedule import Round, Schedule

BLOCK_PLACES = 16  # whose sum is one task


class TaskKey(NamedTuple):
    """A task of a round."""

    kind: TaskKind
    round: int
    place: int = 0  # of a client; of a merge, the block


class BoardState(msgspec.Struct, kw_only=True):
    """What a coordinator that comes back must know of the tasks."""

    stage: Literal["prepare", "round", "over"] = "prepare"
    round: int = 0
    done: bytes = b""  # one byte for each place of the round: 1 took part, 2 was refused
    merged: list[int] = []  # blocks
    taken: dict[str, TaskKey] = {}  # by worker


class Board:
    """Hands out the tasks of a run, round after round."""

    def __init__(self, schedule: Schedule, state: BoardState, *, merges: bool) -> None:
        """`merges`: sums are made as clients come; else the finish reads every update (robust rules)."""
        self._rounds: Iterator[Round] = schedule.rounds(state.round)
        self.state = state
        self._merges = merges
        self.round: Round | None = next(self._rounds, None)
        self._begin()

    def _begin(self) -> None:
        if self.round is not None and len(self.state.done) != self.round.num_places:
            self.state.done, self.state.merged = bytes(self.round.num_places), []

    @property
    def took_part(self) -> tuple[int, ...]:
        """The places of the round whose updates count."""
        return tuple(place for place, mark in enumerate(self.state.done) if mark == 1)

    @property
    def refused(self) -> tuple[int, ...]:
        """The clients of the round whose updates do not count."""
        assert self.round is not None
        return tuple(task.client for task in self.round.tasks if self.state.done[task.place] == 2)

    def take(self, worker: str) -> TaskKey | None:
        """Give a worker the next task; None while there is none to be given."""
        key = self._next()
        if key is not None:
            self.state.taken[worker] = key
        return key

    def requeue(self, worker: str) -> TaskKey | None:
        """Take back what a worker had in hand; return it."""
        return self.state.taken.pop(worker, None)

    def finish(self, worker: str, key: TaskKey, *, is_refused: bool = False) -> bool:
        """Take the report that a task is done; return whether it is the first one."""
        self.state.taken.pop(worker, None)
        state = self.state
        if key.kind == "prepare":
            if state.stage != "prepare":
                return False
            state.stage = "round"
            return True
        if state.stage != "round" or key.round != state.round:
            return False
        if key.kind == "client":
            if state.done[key.place]:
                return False
            marks = bytearray(state.done)
            marks[key.place] = 2 if is_refused else 1
            state.done = bytes(marks)
            return True
        if key.kind == "merge":
            if key.place in state.merged:
                return False
            state.merged.append(key.place)
            return True
        return True

    def advance(self) -> None:
        """Go on to the next round: this one is finished."""
        self.round = next(self._rounds, None)
        self.state.round += 1
        self.state.done, self.state.merged, self.state.taken = b"", [], {}
        self._begin()

    def end(self) -> None:
        self.state.stage = "over"

    def task_of(self, index: int) -> tuple[int, int]:
        """Return the client at a place, and from which round it begins."""
        assert self.round is not None
        task = next(task for task in self.round.tasks if task.place == index)
        return task.client, task.base

    def places_of(self, block: int) -> tuple[int, ...]:
        """Return the places of a block that took part."""
        first, stop = self.blocks[block]
        return tuple(place for place in self.took_part if first <= place < stop)

    @property
    def blocks(self) -> list[Block]:
        assert self.round is not None
        return list(blocks_of(self.round.num_places, BLOCK_PLACES))

    def _next(self) -> TaskKey | None:
        state, taken = self.state, set(self.state.taken.values())
        if state.stage == "over" or self.round is None:
            return None
        if state.stage == "prepare":
            key = TaskKey("prepare", state.round)
            return None if key in taken else key
        open_places = [task.place for task in self.round.tasks if not state.done[task.place]]
        waiting = set(open_places)
        if self._merges:
            for number, (first, stop) in enumerate(self.blocks):
                key = TaskKey("merge", state.round, number)
                is_open = number not in state.merged and key not in taken
                if is_open and not any(first <= place < stop for place in waiting):
                    return key
        for place in open_places:
            key = TaskKey("client", state.round, place)
            if key not in taken:
                return key
        if waiting or (self._merges and len(state.merged) < len(self.blocks)):
            return None
        key = TaskKey("finish", state.round)
        return None if key in taken else key
