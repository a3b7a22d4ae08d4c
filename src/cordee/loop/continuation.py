"""What makes a loop of one's own continue: its state, its commits, and where these are saved.

Alone, under torchrun and under `cordee run`, a loop has commits and checkpoints. Under `cordee run --elastic` it is
taken from one generation to the next as well (`cordee.runs.script.member.ElasticLoop`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.checkpoint.layout import step_of
from cordee.communication.exchange import find_lost_peer
from cordee.core.errors import CheckpointError, CommunicationError, JobError
from cordee.core.fault_points import reach
from cordee.data.shared_batches import Pass, Progress
from cordee.runs.script.member import ElasticLoop, ScriptMember
from cordee.training.commits import Commits, refuse_generator
from cordee.training.hand_over import load_together
from cordee.training.loop_state import RUN, LoopContents, LoopState

if TYPE_CHECKING:
    from cordee.loop.team import LoopTeam

KEPT = 3  # checkpoints of a loop
UNCOMMITTED = 500  # exchanges after which a loop that has never committed is warned of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Continuation:
    """Of one loop of a team."""

    def __init__(self, team: LoopTeam, member: ScriptMember | None, progress: Progress) -> None:
        self._team, self._member, self._progress = team, member, progress
        self._contents: LoopContents | None = None
        self._commits: Commits | None = None
        self._elastic: ElasticLoop | None = None
        self._is_looping = False
        self._has_gradients = False  # that were exchanged, and no optimizer has used
        self._has_local = False  # gradients that were not exchanged
        self._has_voted = False  # since the last commit
        self._is_halt_agreed = False
        self._num_exchanges = 0  # of gradients, since the loop began
        self._committed_epoch: Any = None
        self._num_trained = 0  # iterations over batches that had ended by the last commit
        self._lost: CommunicationError | None = None  # a member, in an exchange of this attempt at the loop
        self._committed_at: dict[Pass, int] = {}  # iterations that were open at the last commit, and their batches
        self._unkept: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # not in the state: commits at first

    @property
    def is_waiting(self) -> bool:
        """Whether the workers of an elastic run have not met yet."""
        return self._member is not None and self._elastic is None

    @property
    def num_commits(self) -> int:
        return self._commits.step if self._commits is not None else 0

    @property
    def wants_halt(self) -> bool:
        return self._elastic is not None and self._is_looping and self._elastic.wants_halt

    # State ---------------------------------------------------------------------------------------------------------

    def make_state(self, things: dict[str, Any]) -> LoopState:
        if self._contents is not None:
            raise JobError("team.state: there is a state already: give all of it to one call")
        if not things:
            raise JobError("team.state: give it what the loop continues from: team.state(model=model, epoch=0)")
        self._contents = LoopContents(things)
        self._team.keep_place()
        self._commits = Commits(self._contents, self._team.mark_progress)
        return LoopState(self._contents, self._save, self._restore)

    def check_preparing(self) -> None:
        if self._member is not None and self._is_looping:
            raise JobError(
                "team.prepare inside of the loop: prepare before it, so that a worker that joins later has prepared "
                "the same"
            )

    # The loop --------------------------------------------------------------------------------------------------------

    def wrap(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        refuse_generator(function, "@team.elastic")

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            return self._run(lambda: function(*args, **kwargs))

        return call

    def _run(self, function: Callable[[], Result]) -> Result:
        if self._contents is None or self._commits is None:
            raise JobError(
                "@team.elastic: make the state that the loop continues from first: team.state(model=model, …)"
            )
        if self._is_looping:
            raise JobError("@team.elastic: one loop inside of another: give the decorator to the outer function only")
        self._team.check_kept(self._contents)
        if self._member is not None:
            self._elastic = ElasticLoop(self._member, self._contents, self._commits, self._team.continue_from)
        else:
            self._begin_together()
        try:
            return self._looping(function)() if self._elastic is None else self._elastic.run(self._looping(function))
        finally:
            self._is_looping, self._progress.at_next = False, None

    def _looping(self, function: Callable[[], Result]) -> Callable[[], Result]:
        def call() -> Result:
            self._is_looping = True
            self._has_gradients = self._has_local = self._has_voted = self._is_halt_agreed = False
            self._num_exchanges, self._num_trained, self._lost = 0, self._progress.num_trained, None
            assert self._contents is not None
            self._committed_epoch, self._committed_at = self._contents.values.get("epoch"), {}
            self._progress.at_next = self._check_rest
            return function()

        return call

    def _begin_together(self) -> None:
        """Give all workers the first one's state, where a run is not elastic. Collective."""
        assert self._contents is not None and self._commits is not None
        team = self._team.team
        self._commits.begin(self._commits.step)
        state = self._commits.state()
        if team.num_workers > 1:
            state = checkpoint.share_state(state if team.is_first else None)
            self._contents.load(state)
            self._team.print(
                "cordee: this loop is not elastic: a lost worker ends it. `cordee run --elastic -n N script.py` starts "
                "workers that continue without it"
            )
        self._team.continue_from(team, state.values["progress"])
        self._commits.begin(state.values["progress"]["step"])

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._elastic is not None:
                self._elastic.close()

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin_exchange(self, call: str, *, has_gradients: bool | None = None) -> None:
        """Note that a collective call is about to be made; `has_gradients` is of one that adds to gradients."""
        if self.is_waiting:
            raise JobError(
                f"{call} before the loop: under --elastic the workers meet where the loop begins. Call it inside of "
                "the function with @team.elastic, or after it"
            )
        if self._commits is not None:
            self._commits.note_exchange()
        self._num_exchanges += has_gradients is True
        if self._elastic is not None and self._is_looping:
            self._elastic.begin_step()
            if self._num_exchanges == UNCOMMITTED and self.num_commits == 0 and self._member is not None:
                self._member.warn(
                    f"{UNCOMMITTED} exchanges and no team.commit(): until the loop commits, a loss begins it again "
                    "from the start, nobody can join it, and Ctrl-C cannot end it in order"
                )
        if has_gradients is not None:
            self._has_gradients, self._has_local = self._has_gradients or has_gradients, not has_gradients

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Inside, a member may turn out to be lost: nothing is committed then, whatever the script does about it."""
        try:
            yield
        except Exception as error:
            self._lost = self._lost or find_lost_peer(error)
            raise

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to take a step. Raises JobError for one whose state no commit keeps."""
        self._has_gradients = False
        if self._is_looping and self._contents is not None:
            self._check_is_kept(optimizer, self._contents)
            self._check_iteration(optimizer, self._contents)
        if self._commits is not None:
            self._commits.note_step()

    def _check_is_kept(self, optimizer: Optimizer, contents: LoopContents) -> None:
        if contents.has(optimizer) or not contents.is_changed_by(optimizer):
            return
        begun_at = self._unkept.setdefault(optimizer, self.num_commits)
        if begun_at < self.num_commits and any(optimizer.state.values()):
            raise JobError(
                f"{type(optimizer).__name__}.step(): the optimizer has accumulated values over several commits and is "
                "not in the state: continued from a commit, the loop would begin with a new one. Give it to "
                "team.state(optimizer=optimizer, …)"
            )

    def take_votes(self, votes: float, loss: float | None) -> None:
        """Take what all workers have agreed on in an exchange."""
        self._has_voted = True
        self._is_halt_agreed = self._is_halt_agreed or votes > 0
        if loss is not None and self._elastic is not None:
            self._elastic.loss = loss

    def commit(self) -> None:
        if self._commit() and self._elastic is not None:
            self._elastic.halt()

    def _commit(self) -> bool:
        """Commit; return whether all workers have agreed to leave the loop here."""
        if not self._is_looping or self._commits is None:
            raise JobError(
                "team.commit: outside of the loop: put the loop into a function with the decorator @team.elastic, and "
                "call that function"
            )
        if self._lost is not None:  # the script has caught the error, and what it did instead is no step
            raise CommunicationError(str(self._lost))
        if self._has_local or self._has_gradients:
            self._check_gradients()
        self._check_epoch()
        if self._elastic is not None:
            self._elastic.check_generation()
        reach("loop.commit")
        self._commits.commit()
        self._committed_at = self._progress.places()
        reach("loop.committed")
        if self._team.num_workers == 1:
            self._is_halt_agreed = self.wants_halt
        elif not self._has_voted and not self._num_exchanges:
            self._team.vote()  # of a loop whose exchanges are not the team's; else the next exchange does it
        is_halt, self._has_voted, self._is_halt_agreed = self._is_halt_agreed, False, False
        if self._elastic is not None:
            self._elastic.committed()
        return is_halt

    def _check_gradients(self) -> None:
        """Raise JobError where gradients would be lost with a worker: a commit keeps none."""
        assert self._contents is not None
        if self._has_local:
            raise JobError(
                "team.commit with gradients that have not been exchanged (exchange=False): commit after "
                "optimizer.step(), not between the parts of one step"
            )
        if self._has_gradients and any(g is not None and bool(g.any()) for g in self._contents.gradients()):
            raise JobError(
                "team.commit between team.backward and optimizer.step(): commit after the step, or call "
                "optimizer.zero_grad() where the step is left out"
            )
        self._has_gradients = False

    def _check_epoch(self) -> None:
        """Raise JobError where the loop, continued from here, would train an epoch twice."""
        assert self._contents is not None
        epoch, num_trained = self._contents.values.get("epoch"), self._progress.num_trained
        is_over = num_trained > self._num_trained and not self._progress.open
        if epoch is not None and epoch == self._committed_epoch and is_over:
            raise JobError(
                f"team.commit (or state.save) after the loop over an epoch's batches, and state.epoch is still "
                f"{epoch}: continued from here, the loop would train that epoch again. Write state.epoch += 1 before "
                "it, or commit inside of the loop over the batches only"
            )
        self._committed_epoch, self._num_trained = epoch, num_trained

    def _check_iteration(self, optimizer: Optimizer, contents: LoopContents) -> None:
        """Raise JobError where the loop, continued from the last commit, would leave a step out."""
        if self._progress.is_in_same_iteration(self._committed_at) and contents.is_changed_by(optimizer):
            raise JobError(
                f"{type(optimizer).__name__}.step() after team.commit() in one iteration of a loop over prepared "
                "batches: continued from the commit, the loop would begin with its next batch and leave the rest of "
                "the iteration out. Commit at the end of the iteration"
            )

    def _check_rest(self) -> None:
        """Raise JobError at the end of an iteration whose last part would be left out, continued from its commit."""
        assert self._contents is not None
        if self._progress.is_in_same_iteration(self._committed_at) and (changed := self._contents.find_change()):
            raise JobError(
                f"{changed} changed after team.commit() in one iteration of a loop over prepared batches: continued "
                "from the commit, the loop would begin with its next batch and leave the change out. Commit at the end "
                "of the iteration"
            )

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save(self, path: Path | None) -> None:
        assert self._contents is not None and self._commits is not None
        self._team.check_kept(self._contents)
        is_halt = False
        if self._is_looping:
            is_halt = self._commit()
        elif self.is_waiting:
            raise JobError("state.save before the loop: under --elastic the workers meet where the loop begins")
        else:
            self._commits.begin(self._commits.step)
        if path is None and self._elastic is not None:
            self._elastic.save()
        elif self._team.is_first:
            folder = path or _default_folder()
            _check_folder(folder, self._contents.run)
            checkpoint.save(folder, self._commits.step, self._commits.state(), keep=KEPT)
        if is_halt and self._elastic is not None:
            self._elastic.halt()

    def _restore(self, path: Path | None) -> bool:
        assert self._contents is not None and self._commits is not None
        if self._is_looping:
            raise JobError("state.restore inside of the loop: restore before it begins")
        self._team.check_kept(self._contents)
        team = self._team.team

        def load() -> State | None:
            if path is None and self._member is not None:
                loaded = self._member.store.load_newest()
                return loaded.state if loaded is not None else None
            return _load(path)

        state = load() if self.is_waiting or team.num_workers == 1 else load_together(team, load)
        if state is None:
            return False
        self._contents.load(state)
        if path is not None and _has_later(path):
            self._contents.begin_run()
        progress = state.values["progress"]
        self._team.continue_from(team, progress)
        self._commits.begin(progress["step"])
        return True


def _default_folder() -> Path:
    return Path(f"{Path(sys.argv[0]).stem or 'loop'}-checkpoints")


def _check_folder(folder: Path, run: str) -> None:
    """Raise JobError if the checkpoints of a folder are of another run: the newest of both would be restored."""
    for path in reversed(checkpoint.list_checkpoints(folder)):
        with contextlib.suppress(CheckpointError):  # a damaged one says nothing
            if checkpoint.read_values(path).get(RUN, "") == run:
                return
            raise JobError(
                f"state.save: {folder} has checkpoints of another run ({path.name}), and state.restore() would take "
                "the newest of both: continue from them with state.restore() before the loop, save to another folder "
                f"with state.save(path), or remove {folder}"
            )


def _has_later(path: Path) -> bool:
    """Whether this is one checkpoint of a folder that has later ones: what continues from it is not their run."""
    own = step_of(path)
    if own is None or not (path / "manifest.json").is_file():
        return False
    return any((step := step_of(other)) and step > own for other in checkpoint.list_checkpoints(path.parent))


def _load(path: Path | None) -> State | None:
    """Return the state in a checkpoint, or the newest in a folder of them. Raises CheckpointError."""
    if path is None:
        loaded = checkpoint.load_newest(_default_folder())
        return loaded.state if loaded is not None else None
    if (path / "manifest.json").is_file():
        return checkpoint.load(path)
    loaded = checkpoint.load_newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if loaded is None:
        raise CheckpointError(f"{path} has no checkpoint")
    return loaded.state
