"""One worker's way through a run: resume, announce, train, sum up. The same alone and in a team."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from torch import Tensor

from cordee import checkpoint
from cordee.checkpoint import Folder, Loaded, State, Verified
from cordee.checkpoint.layout import memory_of
from cordee.cluster import Team
from cordee.cluster.messages import TeamReport
from cordee.communication.exchange import find_lost_peer
from cordee.communication.traffic import SENT
from cordee.compute.devices import MemoryWatch
from cordee.core.errors import CommunicationError, CordeeError, TrainingError
from cordee.core.fault_points import reach
from cordee.monitoring import Monitor, Summary, events
from cordee.trainer import Trainer
from cordee.training.components import Components
from cordee.training.hand_over import load_together, map_together, nothing_left, share_furthest
from cordee.training.progress import Outcome, step_of, summarise
from cordee.training.slice_saving import choose_folder

log = logging.getLogger("cordee.session")

SAVE_OFTEN = "with a smaller checkpoint.every_steps"


class Session:
    """Takes the parts of one worker through a run. The run's checkpoints are in `run_dir`, unless `store` is given."""

    def __init__(
        self,
        parts: Components,
        monitor: Monitor,
        run_dir: Path,
        should_stop: Callable[[], bool],
        should_pause: Callable[[], bool] = lambda: False,
        report: Callable[[TeamReport], None] = lambda _: None,
        memory: MemoryWatch | None = None,
        store: checkpoint.Store | None = None,
    ) -> None:
        self._parts = parts
        self._memory = memory or MemoryWatch()
        self._monitor = monitor
        self._run_dir = run_dir
        self._store = store or checkpoint.Folder(run_dir / "checkpoints")
        self._trainer = Trainer(
            parts, monitor, self._store, should_stop=should_stop, should_pause=should_pause, report=report
        )
        # Between two generations `_held` is what this worker has; in one, the trainer has it and `_is_live` is set.
        # Never both: what a generation is entered from stays here, untouched, until the generation is entered.
        self._held: State | None = None
        self._is_live = False
        self._is_untrained = True  # the model is as it was built
        self._started = time.time()
        self._outcome: Outcome | None = None

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self._trainer.progress.step

    def run(self, *, resume: bool, log_file: Path) -> None:
        """Train to the end. Raises CordeeError; an error in the user's code is one too, with its place named."""
        with self._naming_errors(log_file):
            if resume and (state := self._load()) is not None:
                self._trainer.resume(state)
            self._announce()
            self._outcome = self._trainer.run()

    def train(self, team: Team, *, may_load: bool, log_file: Path, is_end: Callable[[], bool]) -> bool:
        """Train as a member of `team` until the run ends or the team does; return whether the run has ended.

        Collective. Members that are behind, or new, get everything from the one that is furthest. Where nobody has
        anything, all load the newest checkpoint if `may_load`, or begin. Raises CommunicationError when a member is
        lost: the step that was under way did not happen, and `train` may be called with another team.
        """
        with self._naming_errors(log_file):
            self._enter(team, may_load)
            self._announce()  # the coordinator takes the first: that of a generation that came about
            self._trainer.report_commit()
            self._outcome = self._trainer.run(is_end)
            if self._outcome is not None:
                reach("end.reached")
                team.any(False)  # nobody leaves before all have done their part
        return self._outcome is not None

    def close(self) -> None:
        """Wait for a checkpoint that is being written. For before the process ends, unless it is in a hurry."""
        self._trainer.wait_for_checkpoint()

    @property
    def ready_step(self) -> int:
        """How many steps this worker can continue from; -1 while it has nothing that is the team's."""
        if self._held is not None:
            return step_of(self._held)
        return self._trainer.agreed_step if self._is_live else -1

    def forget(self) -> None:
        """What this worker has is not the team's any more: it gets everything from the others."""
        with contextlib.suppress(CommunicationError):  # the coordinator takes nothing of a worker that was given up
            self._trainer.wait_for_checkpoint()
        self._held, self._is_live = None, False

    @property
    def has_dropped(self) -> bool:
        """Whether a step was begun that could not be finished."""
        return self._trainer.is_stepping

    def _enter(self, team: Team, may_load: bool) -> None:
        """Become a member of `team`, with the state that is furthest. Collective.

        Whatever fails on the way, this worker still has what it had, or what it got whole from another member.
        """
        is_elastic = self._parts.is_elastic
        if not team.is_first or not is_elastic:
            self._trainer.wait_for_checkpoint()  # another may save the same step from here on, or look for it
        if not is_elastic:
            # The parts of the last team are of no use in another: what it saved when it halted, or before, is.
            team.any(False)  # everybody has waited
            self._require_checkpoint()
            self.forget()
        self._hold()
        self._agree(team, may_load)
        parts = self._parts = self._parts.in_team(team)
        self._is_untrained = self._is_untrained and self._held is None
        reach("enter.agreed")
        parts.setup()
        reach("enter.set_up")
        self._trainer.enter(parts, self._held)
        self._held, self._is_live, self._is_untrained = None, True, False

    def _hold(self) -> None:
        """Take over what the trainer has: setting up makes a new optimizer and overwrites the weights. Local."""
        if self._is_live:
            self._held, self._is_live = _apart(self._trainer.state()), False

    def _agree(self, team: Team, may_load: bool) -> None:
        """Have every member hold the same state, or none where there is none. Collective."""
        shared = share_furthest(team, self._held, self.ready_step)
        if shared is None and may_load:
            # Where each member needs a part only, none reads the rest.
            folder = None if self._parts.is_whole else choose_folder(self._store, team)
            if folder is None:
                in_files = not self._parts.is_whole
                shared = load_together(team, self._map if in_files else self._load, in_files=in_files)
            else:
                shared = map_together(team, partial(self._find, folder))
        self._held = shared
        if shared is None:
            self._begin_together(team)

    def _begin_together(self, team: Team) -> None:
        """Have every member begin with the model as one of them built it. Collective.

        A worker that was given up and came back has trained: its weights are of no use, nor is its place in the data.
        """
        untrained = team.gather(int(self._is_untrained))
        if not any(untrained):
            raise TrainingError(nothing_left(self.step, SAVE_OFTEN))
        if all(untrained):
            return  # setting up gives all the first one's weights
        source = untrained.index(1)
        own = State.join(model=State(checkpoint.model_state(self._parts.model), {}))
        built = checkpoint.share_state(own if team.worker_index == source else None, source)
        checkpoint.load_model_state(self._parts.model, built.part("model").tensors)
        self._trainer.begin()
        self._is_untrained = True

    def _require_checkpoint(self) -> None:
        """Raise TrainingError where this worker has trained before and there is nothing to continue from."""
        if self._is_live and not self._store.names():
            raise TrainingError(nothing_left(self.step, SAVE_OFTEN))

    @contextlib.contextmanager
    def _naming_errors(self, log_file: Path) -> Iterator[None]:
        try:
            yield
        except (CordeeError, KeyboardInterrupt):
            raise
        except Exception as problem:  # the user's model, data or loss: their traceback is in the log
            if (lost := find_lost_peer(problem)) is not None:
                raise lost from problem
            log.exception("training failed at step %d", self.step + 1)
            raise TrainingError(
                f"step {self.step + 1} raised {type(problem).__name__}: {_explain(problem)} "
                f"(the traceback is in {log_file})"
            ) from problem

    def summarise(self, error: BaseException | None) -> Summary:
        """Return what came out, also of a run that ended with `error`."""
        summary = summarise(
            self._parts.describe(),
            self._trainer.progress,
            self._outcome,
            started=self._started,
            num_batches=self._parts.train.num_batches,
            error=error,
        )
        weights_sha256 = None
        if self._outcome is not None:
            weights_sha256 = self._outcome.weights_sha256
            weights_sha256 = weights_sha256 or checkpoint.weights_sha256(self._parts.strategy.model.state_dict())
        return msgspec.structs.replace(
            summary,
            peak_memory_bytes=self._memory.peak_bytes() or None,
            bytes_sent=SENT.num_bytes,
            weights_sha256=weights_sha256,
        )

    def _load(self) -> State | None:
        """Return the newest whole checkpoint, if there is one. Local."""
        loaded = self._store.load_newest()
        self._report_found(loaded)
        return None if loaded is None else loaded.state

    def _map(self) -> State | None:
        """Return the same; where this worker has the files, what is looked at is read. Local."""
        if not isinstance(self._store, Folder):
            return self._load()
        path = self._find(self._store)
        return None if path is None else checkpoint.map_state(path)

    def _find(self, folder: Folder) -> Path | None:
        """Return where the newest whole checkpoint is, if there is one. Local."""
        found = checkpoint.newest_whole(folder.root)
        self._report_found(found)
        return None if found is None else found.path

    def _report_found(self, found: Loaded | Verified | None) -> None:
        if found is None:
            self._warn("the run has no checkpoint yet: starting from the beginning")
            return
        for path, reason in found.damaged:
            self._warn(f"checkpoint {path.name} is damaged ({reason}); using {found.path.name}")

    def _warn(self, message: str) -> None:
        self._monitor.emit(events.Warned(message=message))

    def _announce(self) -> None:
        self._monitor.emit(self._parts.describe(self._run_dir, self.step))


def _apart(state: State) -> State:
    """Return the state with weights of its own. The optimizer's tensors stay shared: a new one never writes to them."""
    copies: dict[object, Tensor] = {}
    tensors = {}
    for name, tensor in state.tensors.items():
        if name.startswith("model."):
            tensor = copies.setdefault(memory_of(tensor), tensor.clone())
        tensors[name] = tensor
    return State(tensors, state.values)


# What to do about errors of torch whose cause is in the job.
_ADVICE = {
    "Expected more than 1 value per channel": (
        "a batch norm cannot train on a single sample, which is a worker's share, or a micro-batch, of a small batch, "
        "as the last one of an epoch may be: choose a larger training.batch_size, or one that divides the samples, or "
        "fewer micro-batches or workers"
    ),
    "Expected to mark a variable ready only once": (
        "torch's DDP cannot train a layer that is used twice under re-entrant checkpointing: pass "
        "use_reentrant=False to torch.utils.checkpoint, or set strategy.reducer = 'flat'"
    ),
    "incompatible with .grad()": (
        "re-entrant checkpointing needs the whole backward pass at once: pass use_reentrant=False to "
        "torch.utils.checkpoint, or set strategy.schedule = '1f1b'"
    ),
}


def _explain(problem: Exception) -> str:
    """Return an error in words: what it says, or its first sentence and what to do about it."""
    for words, advice in _ADVICE.items():
        if words in str(problem):
            return f"{str(problem).partition('. ')[0]}: {advice}"
    return str(problem)
