"""Which task of a federated run is next: a small state machine over rounds. Decided without I/O.

A task may be done twice: by a worker that was given up, or when its coordinator was killed. Both write the same files
with the same bits, and the first report counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

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
        """Look at the places of the round once: each hand-out would take as long as there are clients."""
        if self.round is None:
            return
        if len(self.state.done) != self.round.num_places:
            self.state.done, self.state.merged = bytes(self.round.num_places), []
        self._tasks = {task.place: task for task in self.round.tasks}
        self._order = list(self._tasks)  # of the places, as they are handed out
        self._turns = {place: turn for turn, place in enumerate(self._order)}
        self._next_turn = 0  # before it all places are done, or taken
        self.blocks = list(blocks_of(self.round.num_places, BLOCK_PLACES))
        self._num_open = [0] * len(self.blocks)  # places that are not done, by block
        for place in self._order:
            if not self.state.done[place]:
                self._num_open[place // BLOCK_PLACES] += 1
        self._num_waiting = sum(self._num_open)
        # Blocks whose sum can be made, and is not.
        merged = set(self.state.merged)
        self._complete = [n for n, count in enumerate(self._num_open) if not count and n not in merged]

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
        key = self.state.taken.pop(worker, None)
        if key is not None and key.kind == "client" and key.round == self.state.round:
            self._next_turn = min(self._next_turn, self._turns[key.place])
        return key

    def finish(self, worker: str, key: TaskKey, *, is_refused: bool = False) -> bool:
        """Take the report that a task is done; return whether it is the first one."""
        self.requeue(worker)
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
            block = key.place // BLOCK_PLACES
            self._num_waiting -= 1
            self._num_open[block] -= 1
            if not self._num_open[block]:
                bisect.insort(self._complete, block)
            return True
        if key.kind == "merge":
            if key.place in state.merged:
                return False
            state.merged.append(key.place)
            self._complete.remove(key.place)
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

    def task_of(self, place: int) -> tuple[int, int]:
        """Return the client at a place, and from which round it begins."""
        task = self._tasks[place]
        return task.client, task.base

    def places_of(self, block: int) -> tuple[int, ...]:
        """Return the places of a block that took part."""
        first, stop = self.blocks[block]
        return tuple(place for place in range(first, stop) if self.state.done[place] == 1)

    def _next(self) -> TaskKey | None:
        state, taken = self.state, set(self.state.taken.values())
        if state.stage == "over" or self.round is None:
            return None
        if state.stage == "prepare":
            key = TaskKey("prepare", state.round)
            return None if key in taken else key
        if self._merges:
            for block in self._complete:
                key = TaskKey("merge", state.round, block)
                if key not in taken:
                    return key
        while self._next_turn < len(self._order):
            place = self._order[self._next_turn]
            key = TaskKey("client", state.round, place)
            if not state.done[place] and key not in taken:
                return key
            self._next_turn += 1
        if self._num_waiting or (self._merges and self._complete):
            return None
        key = TaskKey("finish", state.round)
        return None if key in taken else key
