"""The last commit of a loop of one's own: what the loop continues from when a member is lost. All of it is local.

A commit keeps what is small. Weights and the optimizers' tensors are not copied as long as nothing can be lost
between the first step of an optimizer and the commit: a lost member is noticed in an exchange, and where all exchanges
of a step come before its optimizer, the weights are then still those of the commit. Where an exchange comes after (two
optimizers, a sum before the commit), that is noticed, and from then on every commit makes a copy. A copy is also made
now and then, for loops that change their ways: they fall back to an earlier commit, with its place in the data.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from operator import is_
from typing import Any

import msgspec
import torch
from torch import Tensor

from cordee.checkpoint import Copies, State
from cordee.checkpoint.layout import memory_of
from cordee.cluster import Team
from cordee.compute.gpus import random_state
from cordee.core.errors import JobError, TrainingError
from cordee.training.loop_state import LoopContents

SHARE = 0.001  # of the time that copies take which are made just in case


def check_same_commits(team: Team, num_commits: int, total: float, total_of_squares: float, *, call: str) -> None:
    """Raise TrainingError on every worker if some have committed more steps than others. Collective.

    `total` is the sum over the workers of their commits, in any modulus, `total_of_squares` that of the squares.
    """
    if team.num_workers * total_of_squares == total**2:
        return
    counts = team.gather(num_commits)
    described = ", ".join(f"worker {number} {count}" for number, count in zip(team.numbers, counts, strict=True))
    raise TrainingError(
        f"the workers have committed different steps ({described}): every worker must call {call} after the same "
        "steps, not only where it is the first"
    )


def refuse_generator(function: Callable[..., Any], decorator: str) -> None:
    """Raise JobError for a function that, when it is called, has not run."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        kind = "a generator" if inspect.isgeneratorfunction(function) else "asynchronous"
        raise JobError(
            f"{decorator}: {getattr(function, '__name__', 'the function')} is {kind}: calling it runs nothing of the "
            "loop. Give the decorator to an ordinary function, without yield or async, which returns at the end"
        )


class Commits:
    """Keeps the last commit of one loop.

    `mark_progress` notes the place in the data, cheaply, and returns what gives it as plain values.
    """

    def __init__(self, contents: LoopContents, mark_progress: Callable[[], Callable[[], dict[str, Any]]]) -> None:
        self._contents = contents
        self._mark_progress = mark_progress
        self.step = 0  # commits that were made
        # At every commit: exchanges were seen after a step of an optimizer, or weights are changed without any.
        self.is_copying = not contents.optimizers
        self._is_stepped = False  # an optimizer has taken a step since the commit
        self._progress: Callable[[], dict[str, Any]] = dict
        self._random = random_state()
        self._copies, self._copy = Copies(), State({}, {})
        # Where tensors are at the same places as at the last copy, only they are copied, in one call.
        self._sources: list[Tensor] | None = None
        self._targets: list[Tensor] = []
        self._is_copy_recorded = False  # the copy has tensors only, of the commit that is recorded
        self._copied_random, self._copied_step = self._random, -1
        self._next_copy_s = 0.0
        self.copy_s = 0.0  # that the last copy took

    @property
    def progress(self) -> dict[str, Any]:
        """The place in the data of the last commit."""
        return self._progress()

    def begin(self, step: int) -> None:
        """Take what there is now for what was committed after `step` commits, and copy it."""
        self._contents.record()
        self.step = step
        self._note()
        self._make_copy()

    def commit(self) -> None:
        """Take what there is now for committed. Raises JobError for a value that cannot be saved."""
        self._contents.record()
        self.step += 1
        self._note()
        if self.is_copying and self._copy_again():
            return
        self._is_copy_recorded = False
        if self.is_copying or time.perf_counter() >= self._next_copy_s:
            self._make_copy()

    def note_step(self) -> None:
        """An optimizer is about to take a step."""
        self._is_stepped = True

    def note_exchange(self) -> None:
        """Members are about to exchange something, in which one may turn out to be lost."""
        if self._is_stepped:
            self.is_copying = True

    @property
    def is_changed(self) -> bool:
        """Whether weights may be others than those that were committed."""
        return self._is_stepped or self._contents.has_changed_weights

    def state(self) -> State:
        """Return the last commit that is still there: the last one, unless weights were changed and not copied.

        Tensors are those of the copy of this commit; without one they share the memory of the models and optimizers.
        """
        if self._copied_step != self.step and not self.is_changed:
            return self._as_state()
        return self._as_state(self._copy) if self._is_copy_recorded else self._copy

    def random_state(self) -> list[Tensor]:
        """Return the state of torch's random numbers at the commit that `state` returns."""
        if self._copied_step != self.step and not self.is_changed:
            return self._random
        return self._copied_random

    def _note(self) -> None:
        self._progress = self._mark_progress()
        self._random = random_state()
        self._is_stepped = False
        self._contents.note_weights()

    def _as_state(self, large: State | None = None) -> State:
        state = self._contents.recorded(large)
        progress = {**msgspec.to_builtins(self._progress()), "step": self.step}
        return State(state.tensors, {**state.values, "progress": progress})

    def _make_copy(self) -> None:
        started_s = time.perf_counter()
        state = self._as_state()
        self._copy, self._copied_random = self._copies.copy(state), self._random
        self._copied_step, self._is_copy_recorded = self.step, False
        self._pair(state)
        now_s = time.perf_counter()
        self.copy_s = now_s - started_s
        self._next_copy_s = now_s + self.copy_s / SHARE

    def _pair(self, state: State) -> None:
        """Note which tensors are copied to which, where these are all that a later copy needs."""
        self._sources = None
        if not self.is_copying or (sources := self._contents.large_tensors()) is None:
            return
        places = {
            memory_of(tensor): name for name, tensor in state.tensors.items() if not self._contents.is_small(name)
        }
        names = [places.get(memory_of(source)) for source in sources]
        if None in names or places.keys() - {memory_of(source) for source in sources}:
            return
        self._sources, self._targets = sources, [self._copy.tensors[name] for name in names if name is not None]

    def _copy_again(self) -> bool:
        """Copy tensors that are where they were at the last copy; return False, and do nothing, if they are not."""
        if self._sources is None or (sources := self._contents.large_tensors()) is None:
            return False
        if len(sources) != len(self._sources) or not all(map(is_, sources, self._sources)):
            return False
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, sources)
        self._copied_random, self._copied_step, self._is_copy_recorded = self._random, self.step, True
        return True
