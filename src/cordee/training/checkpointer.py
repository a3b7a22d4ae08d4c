"""The checkpoints of one worker's run: one at a time, beside the training or at once, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from cordee import checkpoint
from cordee.checkpoint import CheckpointWriter, Folder, Request, Saved, State, Store
from cordee.cluster import Team
from cordee.core import settings
from cordee.core.errors import StorageError, TrainingError
from cordee.monitoring import Monitor, events
from cordee.strategies.strategy import SavesSlices, Strategy
from cordee.training.blame import not_finite_error
from cordee.training.components import Components
from cordee.training.progress import Progress
from cordee.training.slice_saving import SharedSlices, SharedWriting, choose_folder

WORTH_SAYING_S = 0.5  # that a checkpoint waited for the one before


@dataclass
class _Open:
    """A checkpoint whose slices are being written."""

    writing: SharedWriting
    step: int
    epoch_number: int
    at_once: bool
    stalled_s: float = 0.0  # that training stood still for it so far


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
        self._open: _Open | None = None  # into which members are writing
        self._folder: tuple[Team, Folder | None] | None = None  # where all members of a team can write

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is where the run's are, or on its way there from this worker."""
        return self._writer.step == step or f"step-{step}" in self._store.names()

    def find_slices(self, strategy: Strategy, team: Team) -> SharedSlices | None:
        """Return what this member has of the state and where all write; None where one saves all of it. Collective."""
        if not isinstance(strategy, SavesSlices) or (slices := strategy.slices()) is None:
            return None
        if self._folder is None or self._folder[0] is not team:
            self._folder = team, choose_folder(self._store, team)
        folder = self._folder[1]
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
        """Save the state of the step that was begun, of which each member has slices, or begin to. Collective.

        Unless it is done `at_once`, members may write while they compute the next step: then nothing of the state may
        change before `settle`. Raises TrainingError, on every member, for weights that are not finite.
        """
        parameters = {f"model.{name}" for name in _parameter_names(parts.strategy.model)}
        writing = SharedWriting(
            shared.folder,
            self.step,
            shared.slices,
            parts.team,
            parameters=parameters,
            keep=self._rules.keep,
            protected=(progress.best_step,) if self._rules.keep_best else (),
        )
        at_once = at_once or not self._rules.asynchronous
        self._open = _Open(writing, progress.step, progress.epoch_number, at_once)
        if at_once or not writing.may_continue:
            self._settle(since_s)
            return
        # A step changes weights and optimizer when everything is computed, and other tensors at any time.
        kinds = shared.slices.kinds
        writing.start([name for name in kinds if name not in parameters and not name.startswith("optimizer.")])
        self._open.stalled_s = time.perf_counter() - since_s

    @property
    def is_open(self) -> bool:
        """Whether members are writing slices of the state as it is."""
        return self._open is not None

    def settle(self) -> None:
        """Return when the state may change: all members have written their slices, if they were to. Collective.

        Raises like `save_together`.
        """
        if self._open is not None:
            self._settle(time.perf_counter() - self._open.stalled_s)

    def _settle(self, since_s: float) -> None:
        begun, self._open = self._open, None
        assert begun is not None
        prepared = begun.writing.agree()
        if prepared.unsound is not None:
            raise _not_finite(prepared.unsound, begun.step, begun.epoch_number, self)
        if prepared.save is None:
            if prepared.problem is not None:
                self._monitor.emit(events.Warned(message=str(prepared.problem)))
        elif begun.at_once:
            self._writer.write_prepared(begun.step, prepared.save, since_s=since_s)
        else:
            self._writer.start_prepared(begun.step, prepared.save, since_s=since_s)

    def drop(self) -> None:
        """Give up a checkpoint that members have not agreed on, if there is one. Local: the team has failed."""
        if self._open is not None:
            begun, self._open, self.step = self._open, None, -1
            begun.writing.abandon()
            message = f"checkpoint at step {begun.step} was not saved: the team ended before all had written their part"
            self._monitor.emit(events.Warned(message=message))

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Local."""
        self.drop()
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
        raise _not_finite(name, progress.step, progress.epoch_number, saver)


def _parameter_names(model: nn.Module) -> list[str]:
    """Return all names of parameters: a tied one is saved under any of its names."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _not_finite(name: str, step: int, epoch_number: int, saver: Checkpointer) -> TrainingError:
    return not_finite_error(f"'{name}' has values that are not finite", step, epoch_number, saver.last())


def find_not_finite(state: State, parameters: Collection[str]) -> str | None:
    """Return the name of a tensor that must not be saved, if there is one. Pure."""
    names = {f"model.{name}" for name in parameters}
    for name, tensor in state.tensors.items():
        for chunk in checkpoint.chunks_of(name, tensor):
            if not checkpoint.is_sound(chunk, tensor.dtype, is_parameter=name in names):
                return name
    return None
