"""Horovod's elastic mode over the loop of `cordee run --elastic`: the same commits, generations and run directory.

The function of `run` is called again, with the state of the last commit, when a rank is lost or ranks join or leave.
Under `python`, torchrun and `cordee run` without `--elastic` the function is called once. Shared by all front ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from cordee import checkpoint
from cordee.cluster import Team
from cordee.communication.exchange import find_lost_peer
from cordee.compute import share_threads
from cordee.core.errors import JobError, TrainingError, nearest
from cordee.core.fault_points import reach
from cordee.horovod import operations, world
from cordee.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from cordee.runs.script.member import ElasticLoop, ScriptMember, present_member
from cordee.training.commits import Commits, check_same_commits, refuse_generator
from cordee.training.loop_state import LoopContents

COMMITS_TOLD = 2**20  # commits are counted modulo this number where ranks compare them: squares stay exact

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
AnyState = TypeVar("AnyState", bound="State")


class State:
    """What the function of `run` continues from. `ObjectState` and the states of the frameworks derive from it."""

    _reset_callbacks: list[Callable[[], Any]]

    def __init__(self) -> None:
        self._reset_callbacks = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Have these functions called on every rank when the team is another one, before the function is called again.

        They find the state of the last commit, and `hvd.size()` of the new team: for a rate that follows the size.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Take notice that the team is another one. Called on every rank, with the state of the last commit."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """For classes of one's own: make again what depends on the team."""

    def commit(self) -> None:
        """Have the function continue from here when a rank is lost; leave it if ranks wait to join or leave."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        raise NotImplementedError

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError


class ObjectState(State):
    """Values by name, which are attributes. What a commit keeps is copied at each of them, as in Horovod.

    Values are numbers, texts, lists, dicts and tensors, and objects with `state_dict` and `load_state_dict`. Nothing is
    pickled: another object is refused by name.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        """The first two are accepted for scripts that give them: a state is sent without them."""
        super().__init__()
        self._contents = self._make_contents(kwargs)
        self._commits = Commits(self._contents, self._mark_progress)
        self._commits.is_copying = True  # `restore` is of the last commit, in whatever way the weights were changed
        self._loop: ElasticLoop | None = None
        self._team = Team()
        self._is_running = False

    def _make_contents(self, things: Mapping[str, Any]) -> LoopContents:
        for name in things:
            if hasattr(type(self), name):
                raise JobError(f"{type(self).__name__}: '{name}' cannot be a name in a state: a method is called so")
        return LoopContents(things)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._contents.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name not in self._contents.names:
            known = nearest(name, self._contents.names)
            raise JobError(
                f"state.{name} = …: the state has no '{name}'{known}, and a loop that is continued would lose it: give "
                f"it to {type(self).__name__}(...)"
            )
        elif value is not self._contents.get(name):
            self._contents.assign(name, value)

    def save(self) -> None:
        """Keep a copy of the state in memory. Local; every rank saves the same steps."""
        self._require_function("save")
        if (lost := world.lost_rank()) is not None:  # the script has caught the error, and may have gone on without
            raise lost
        self._check_commit()
        if self._loop is not None:
            self._loop.check_generation()
        reach("loop.commit")
        self._commits.commit()
        reach("loop.committed")
        if self._loop is not None:
            self._loop.committed()

    def check_host_updates(self) -> None:
        """Leave the function, with the state as it is now, if ranks wait to join or leave. Collective.

        Raises HostsUpdatedInterrupt on every rank, which `run` catches.
        """
        self._require_function("check_host_updates")
        loop = self._loop
        if loop is None:
            return
        if self._agree_on_halt(loop):
            if self._commits.is_changed:  # not called by `commit`
                self._commits.commit()
                loop.committed()
            raise HostsUpdatedInterrupt
        loop.begin_step()

    def _agree_on_halt(self, loop: ElasticLoop) -> bool:
        if self._team.num_workers == 1:
            return loop.wants_halt
        commits = self._commits.step % COMMITS_TOLD
        own = torch.tensor([float(loop.wants_halt), commits, commits**2], dtype=torch.float64)
        handle = operations.allreduce([own], operations.Sum, name="hvd.elastic.commit")
        votes, *told = handle.wait()[0].tolist()
        check_same_commits(self._team, self._commits.step, *told, call="state.commit()")
        return bool(votes)

    def restore(self) -> None:
        """Make everything what it was at the last commit. Local."""
        self._contents.load(self._commits.state())
        self._forget_gradients()

    def sync(self) -> None:
        """Give all ranks the state of rank 0. Collective. `run` does it by itself."""
        if world.size() > 1:
            world.global_process_set.queue().compare("hvd.elastic.sync")
            own = None
            if world.rank() == 0:
                self._commits.begin(self._commits.step)
                own = self._commits.state()
            self._contents.load(checkpoint.share_state(own))
        self._commits.begin(self._commits.step)

    def _require_function(self, call: str) -> None:
        if not self._is_running:
            raise JobError(
                f"state.{call}() outside of the loop: put the loop into a function with the decorator @hvd.elastic.run "
                "and call that function with the state"
            )

    # What `run` does with a state ---------------------------------------------------------------------------------

    def _mark_progress(self) -> Callable[[], dict[str, Any]]:
        values = self._contents.values
        epoch, batch = (value if type(value := values.get(name)) is int else 0 for name in ("epoch", "batch"))
        progress = {
            "samples": self._num_samples(),
            "epoch": max(0, epoch),
            "batch": max(0, batch),
            "ranks": self._team.num_workers if self._loop is not None and self._team.generation else 0,
        }
        return progress.copy

    def _num_samples(self) -> int:
        """Return how many samples were recorded as processed, for the events of the run."""
        return 0

    def _enter(self, team: Team, progress: dict[str, Any]) -> None:
        """Become a rank of a team, with the state of a commit. Local, but for what callbacks do."""
        started_with = world.size()
        if self._team.generation or team.threads:
            share_threads(team.threads, team.num_local_workers)
        self._team = team
        world.form(team)
        self._forget_gradients()
        self._follow_team()
        is_first_team = team.generation == 1 and progress["ranks"] == 0 and team.num_workers == started_with
        if not is_first_team:
            self.on_reset()

    def _check_commit(self) -> None:
        """Raise JobError where the state is in the middle of a step."""

    def _follow_team(self) -> None:
        """Cut the data for the team as it is now."""

    def _forget_gradients(self) -> None:
        """Forget what a step that did not happen has left."""


def run(
    function: Callable[Concatenate[AnyState, Arguments], Result],
) -> Callable[Concatenate[AnyState, Arguments], Result]:
    """Make a function of a state the loop that is continued. Calling it is collective.

    Under `cordee run --elastic` it is called again from the last commit when a rank is lost, joins or leaves. An error
    of the script ends the run, also calls that ranks make differently: they would come again.
    """

    refuse_generator(function, "@hvd.elastic.run")

    @functools.wraps(function)
    def call(state: AnyState, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not isinstance(state, ObjectState):
            raise JobError(
                f"hvd.elastic.run: the first argument is a {type(state).__name__}: give it a TorchState, ObjectState "
                "or a state derived from these, which says what is continued"
            )
        world.require_init()
        return _run(state, present_member(), lambda: function(state, *args, **kwargs))

    return call


def _run(state: ObjectState, member: ScriptMember | None, function: Callable[[], Result]) -> Result:
    if state._is_running:
        raise JobError("hvd.elastic.run: one loop inside of another: give the decorator to the outer function only")
    watches = [optimizer.register_step_pre_hook(_note_step(state)) for optimizer in state._contents.optimizers.values()]

    def attempt() -> Result:
        state._is_running = True
        if state._loop is not None:
            state._loop.begin_step()
        return _without_script_errors(function)

    try:
        if member is None:
            state.sync()
            state._is_running = True
            return function()
        advice = "and have the function save a checkpoint of the state now and then"
        state._loop = ElasticLoop(member, state._contents, state._commits, state._enter, advice=advice)
        member.at_end(state._loop.close)
        return state._loop.run(attempt)
    finally:
        state._is_running = False
        for watch in watches:
            watch.remove()


def _note_step(state: ObjectState) -> Callable[..., None]:
    return lambda *_: state._commits.note_step()


def _without_script_errors(function: Callable[[], Result]) -> Result:
    """Return what a function returns. Raises a CommunicationError for a lost rank, and for nothing else."""
    try:
        return function()
    except HorovodInternalError as error:
        if error.__cause__ is not None:
            raise
        problem: Exception = TrainingError(str(error))
    except Exception as error:
        lost = world.lost_rank()
        if lost is None or find_lost_peer(error) is not None:
            raise
        problem = lost  # a framework has made an error of its own of it
    raise problem  # outside of the handler: an error is taken for the loss of a rank if it comes from one
