"""Comparing what the members of a team continue from, and what they were compared by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cordee import checkpoint
from cordee.checkpoint import Digest, State
from cordee.core.fault_points import reach
from cordee.monitoring import events
from cordee.strategies.strategy import TrainsAlone
from cordee.training.components import Components
from cordee.training.progress import Progress

AddProgress = Callable[[State], State]  # returns a strategy's state with the progress of the run


class StateComparison:
    """Compares a digest of all that one worker continues from with the digests of the others."""

    def __init__(self) -> None:
        self._comparison = checkpoint.Comparison()
        self._compared: Digest | None = None  # the last that was compared

    def begin(self) -> None:
        """Begin with another team."""
        self._comparison.begin()

    def is_due(self, step: int) -> bool:
        return self._comparison.is_due(step)

    def compare(
        self,
        parts: Components,
        step: int,
        add_progress: AddProgress,
        *,
        is_consolidated: bool = False,
        common: State | None = None,
    ) -> None:
        """Raise TrainingError, on every member, if members that should have the same do not. Collective.

        Of a model that is split, what can be compared is the whole model where it was just put together, or what is
        `common` to all members: buffers, and the optimizer's counters.
        """
        team = parts.team
        reach("compare.begun")
        digest = partial(_digest, parts, add_progress, is_consolidated, common)
        self._compared = self._comparison.compare(step, digest, team.gather_rows, team.numbers)
        reach("compare.done")

    def describe_commit(self, progress: Progress, generation: int) -> events.Commit:
        """Return the event that tells where this worker is and what it was compared by, for `cordee doctor --run`."""
        assert self._compared is not None
        return events.Commit(
            step=progress.step,
            epoch=progress.epoch,
            batch=progress.batch,
            samples=progress.samples,
            samples_lost=progress.samples_lost or None,
            generation=generation,
            digest=self._compared.describe(),
        )


def _digest(parts: Components, add_progress: AddProgress, is_consolidated: bool, common: State | None) -> Digest:
    strategy = parts.strategy
    model = strategy.model
    if isinstance(strategy, TrainsAlone):
        return checkpoint.digest_state(add_progress(strategy.agreed_state()), checkpoint.buffer_names(model))
    if parts.is_elastic:
        return checkpoint.digest_state(add_progress(strategy.state_dict()), checkpoint.buffer_names(model))
    if common is not None:
        # The optimizer's counters count as buffers: there is no digest of a whole optimizer.
        whole = State.join(model=State(common.tensors, {}))
        return checkpoint.digest_state(add_progress(whole), common.tensors)
    # Each worker has a part of the optimizer, but when it is about to save the whole model.
    weights = checkpoint.model_state(model) if is_consolidated else {}
    state = add_progress(State.join(model=State(weights, {})))
    return checkpoint.digest_state(state, checkpoint.buffer_names(model) if is_consolidated else ())
