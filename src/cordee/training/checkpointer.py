"""The checkpoints of one worker's run: one at a time, beside the training or at once, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
from torch import nn

from cordee.checkpoint import CheckpointWriter, Request, Saved, State, Store
from cordee.cluster import Team
from cordee.core import settings
from cordee.core.errors import StorageError, TrainingError
from cordee.monitoring import Monitor, events
from cordee.strategies.strategy import SavesSlices, Strategy
from cordee.training.blame import not_finite_error
from cordee.training.components import Components
from cordee.training.progress import Progress
from cordee.training.slice_saving import SharedSlices, choose_folder, write_together

WORTH_SAYING_S = 0.5  # that a checkpoint waited for the one before


class Checkpointer:
    """Saves, and reports it. A disk that is full costs the checkpoint, not the run."""

    def __init__(
        self,
        store: Store,
        rules: settings.Checkpoint,
        monitor: Monitor,
        on_written: Callable[[events.Checkpoint], None] | None = None,
    ) -> None:
        """`on_written` is called with each checkpoint that was written, from the thread that wrote it."""
        self._on_written = on_written
        self._store = store
        self._rules = rules
        self._monitor = monitor
        self._writer = CheckpointWriter(store, self._report)
        self._has_waited = False  # for a slow disk, and said so
        self.step = -1  # of the last checkpoint, also of one that is being written
        self.problem: StorageError | None = None  # why it is missing
        self.stall_s = 0.0  # that training stood still for checkpoints

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is where the run's are, or on its way there from this worker."""
        return self._writer.step == step or f"step-{step}" in self._store.names()

    def find_slices(self, strategy: Strategy, team: Team) -> SharedSlices | None:
        """Return what this member has of the state and where all write; None where one saves all of it. Collective."""
        if not isinstance(strategy, SavesSlices) or (slices := strategy.slices()) is None:
            return None
        folder = choose_folder(self._store, team)
        return None if folder is None else SharedSlices(slices, folder)

    def begin(self, step: int) -> None:
        """Make ready for the checkpoint of `step`: wait for the one before, if it is still being written."""
        before = self._writer.step
        started_s = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - started_s
        if waited_s >= WORTH_SAYING_S and not self._has_waited:
            self._has_waited = True
            self._monitor.emit(
                events.Warned(
                    message=f"step {step} waited {waited_s:.1f} s for the checkpoint of step {before}, "
                    "which was still being written: save less often with checkpoint.every_steps"
                )
            )
        self.step, self.problem = step, None

    def save(self, state: State, *, best_step: int, since_s: float, at_once: bool) -> None:
        """Save the state of the step that was begun; training has stood still since `since_s`."""
        protected = (best_step,) if self._rules.keep_best else ()
        request = Request(self.step, state, self._rules.keep, protected, since_s)
        if at_once or not self._rules.asynchronous:
            self._writer.write(request)
        else:
            self._writer.start(request)

    def save_together(
        self, shared: SharedSlices, parts: Components, progress: Progress, *, since_s: float, at_once: bool
    ) -> None:
        """Save the state of the step that was begun, of which each member has slices. Collective.

        Raises TrainingError, on every member, for weights that are not finite.
        """
        own = State({name: one.values for name, one in shared.slices.own.items()}, {})
        names = sorted(shared.slices.kinds)
        name = find_not_finite(own, _parameter_names(parts.strategy.model))
        found = [number for number in parts.team.gather(names.index(name) if name is not None else -1) if number >= 0]
        if found:
            raise _not_finite(names[found[0]], progress, self)
        protected = (progress.best_step,) if self._rules.keep_best else ()
        keep = self._rules.keep
        prepared = write_together(shared.folder, self.step, shared.slices, parts.team, keep=keep, protected=protected)
        if prepared.save is None:
            if prepared.problem is not None:
                self._monitor.emit(events.Warned(message=str(prepared.problem)))
        elif at_once or not self._rules.asynchronous:
            self._writer.write_prepared(self.step, prepared.save, since_s=since_s)
        else:
            self._writer.start_prepared(self.step, prepared.save, since_s=since_s)

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        self._writer.wait()

    def last(self) -> str | None:
        """Return the name of the newest checkpoint, once nothing is being written."""
        self.wait()
        kept = self._store.names()
        return kept[-1] if kept else None

    def describe_lost_weights(self) -> str:
        """Return what to say where a run has ended and its weights could not be saved."""
        kept = self.last()
        start = f"continues after {kept}" if kept else "starts again"
        return (
            f"step {self.step} was reached, but its weights could not be saved: {self.problem}. "
            f"Free some space, then --resume {start}"
        )

    def _report(self, saved: Saved) -> None:
        """Tell what became of a checkpoint. Called from the thread that wrote it."""
        self.stall_s += saved.stall_s
        if saved.problem is not None:
            self.problem = saved.problem
            message = f"checkpoint at step {saved.step} was not saved: {saved.problem}"
            self._monitor.emit(events.Warned(message=message, stall_s=saved.stall_s))
            return
        event = events.Checkpoint(step=saved.step, path=str(saved.path), seconds=saved.seconds, stall_s=saved.stall_s)
        self._monitor.emit(event)
        if self._on_written is not None:
            self._on_written(event)


def require_finite(state: State, model: nn.Module, progress: Progress, saver: Checkpointer) -> None:
    """Raise TrainingError for a state that must not be saved. Local."""
    if (name := find_not_finite(state, _parameter_names(model))) is not None:
        raise _not_finite(name, progress, saver)


def _parameter_names(model: nn.Module) -> list[str]:
    """Return all names of parameters: a tied one is saved under any of its names."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _not_finite(name: str, progress: Progress, saver: Checkpointer) -> TrainingError:
    what = f"'{name}' has values that are not finite"
    return not_finite_error(what, progress.step, progress.epoch_number, saver.last())


def find_not_finite(state: State, parameters: Collection[str]) -> str | None:
    """Return the name of a tensor that must not be saved, if there is one. Pure."""
    names = {f"model.{name}" for name in parameters}
    for name, tensor in state.tensors.items():
        if not tensor.is_floating_point():
            continue
        # A mask of minus infinities is an ordinary buffer, and observers start from infinity.
        is_sound = torch.isfinite(tensor).all() if name in names else not torch.isnan(tensor).any()
        if not is_sound:
            return name
    return None
