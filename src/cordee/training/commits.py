"""The last commit of a loop of one's own: what the loop continues from when a member is lost. All of it is local.

A commit keeps what is small. Weights and the optimizers' tensors are not copied as long as nothing can be lost
between the first step of an optimizer and the commit: a lost member is noticed in an exchange, and where all exchanges
of a step come before its optimizer, the weights are then still those of the commit. Where an exchange comes after (two
optimizers, a sum before the commit), that is noticed, and from then on every commit makes a copy. A copy is also made
now and then, for loops that change their ways: they fall back to an earlier commit, with its place in the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from cordee.checkpoint import Copies, State
from cordee.training.loop_state import LoopContents

SHARE = 0.001  # of the time that copies take which are made just in case


class Commits:
    """Keeps the last commit of one loop. `read_progress` returns the place in the data as plain values, cheaply."""

    def __init__(self, contents: LoopContents, read_progress: Callable[[], dict[str, Any]]) -> None:
        self._contents = contents
        self._read_progress = read_progress
        self.step = 0  # commits that were made
        self.is_copying = False  # at every commit: exchanges were seen after a step of an optimizer
        self._is_stepped = False  # an optimizer has taken a step since the commit
        self._changes = 0
        self._progress: dict[str, Any] = {}
        self._random = torch.get_rng_state()
        self._copies, self._copy = Copies(), State({}, {})
        self._copied_random: Tensor | None = None
        self._next_copy_s = 0.0
        self.copy_s = 0.0  # that the last copy took

    @property
    def progress(self) -> dict[str, Any]:
        """The place in the data of the last commit."""
        return self._progress

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
        return self._is_stepped or self._changes != self._contents.changes

    def state(self) -> State:
        """Return the last commit that is still there: the last one, unless weights were changed and not copied.

        Tensors share the memory of the models and optimizers where these have not changed.
        """
        if not self.is_changed:
            return self._as_state()
        return self._copy

    def random_state(self) -> Tensor:
        """Return the state of torch's random numbers at the commit that `state` returns."""
        if self.is_changed and self._copied_random is not None:
            return self._copied_random
        return self._random

    def _note(self) -> None:
        self._progress = self._read_progress()
        self._random = torch.get_rng_state()
        self._is_stepped, self._changes = False, self._contents.changes

    def _as_state(self) -> State:
        state = self._contents.recorded()
        progress = {**msgspec.to_builtins(self._progress), "step": self.step}
        return State(state.tensors, {**state.values, "progress": progress})

    def _make_copy(self) -> None:
        started_s = time.perf_counter()
        self._copy, self._copied_random = self._copies.copy(self._as_state()), self._random
        now_s = time.perf_counter()
        self.copy_s = now_s - started_s
        self._next_copy_s = now_s + self.copy_s / SHARE
