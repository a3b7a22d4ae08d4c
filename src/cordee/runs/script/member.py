"""This process as a worker of a script's run, and the loop that it takes from one generation to the next.

`ElasticLoop` is what survives: it forms the group of each generation, has every member hold the state of the one that
is furthest, calls the loop's function, and begins again when a member is lost or somebody joins. It knows nothing of
models: `LoopContents` has the state, `Commits` the last commit, and `enter` takes a team and a place in the data.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from cordee import checkpoint
from cordee.checkpoint import Comparison, Digest, State
from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.messages import FirstStep, WorkerSummary
from cordee.communication.exchange import find_differences, find_lost_peer
from cordee.communication.shared_memory.rounds import CallsDifferError
from cordee.compute.devices import MemoryWatch
from cordee.compute.gpus import set_random_state
from cordee.core.errors import CommunicationError, JobError, StorageError, TrainingError
from cordee.core.fault_points import reach
from cordee.core.settings import Checkpoint
from cordee.monitoring import Monitor, Summary, events
from cordee.monitoring.events import SCHEMA_VERSION
from cordee.runs.checkpoints import open_store
from cordee.runs.script.program import SCRIPT
from cordee.runs.team.link import Answer, TeamLink
from cordee.runs.team.worker import LinkSink, form_group
from cordee.training.checkpointer import Checkpointer
from cordee.training.commits import Commits
from cordee.training.hand_over import load_together, nothing_left, share_furthest
from cordee.training.loop_state import LoopContents
from cordee.training.progress import step_of
from cordee.version import __version__

log = logging.getLogger("cordee.worker")

EVENT_EVERY_S = 0.5  # at most so often a step is recorded: sending an event takes as long as a small commit

Result = TypeVar("Result")


class LoopLeft(BaseException):
    """The run is over for this process, in the middle of its loop. Not an Exception: a script must not catch it."""


class Halted(BaseException):
    """All members have agreed to leave the loop after this commit, to begin it again as another team or to end."""


_present: ScriptMember | None = None


def present_member() -> ScriptMember | None:
    """Return this process as a worker of an elastic run, if it is one."""
    return _present


@contextlib.contextmanager
def present_as(member: ScriptMember) -> Iterator[None]:
    """Inside, `cordee.join()` finds this member."""
    global _present
    _present = member
    try:
        yield
    finally:
        _present = None


class ScriptMember:
    """What belongs to this process: its link, its events, the run's checkpoints."""

    def __init__(self, spec: MemberSpec, link: TeamLink, memory: MemoryWatch) -> None:
        self.spec, self.link, self.memory = spec, link, memory
        self.sink = LinkSink(link, spec.index)
        self.monitor = Monitor([self.sink], member=f"worker {spec.index}")
        self.has_loop = False
        self._stack = contextlib.ExitStack()
        self.store: checkpoint.Store

    @property
    def step(self) -> int:
        return self.link.step

    def __enter__(self) -> ScriptMember:
        self.store = self._stack.enter_context(open_store(self.spec, self.link))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.monitor.close()

    def at_end(self, close: Callable[[], None]) -> None:
        """Have something closed when the script has come to its end."""
        self._stack.callback(close)

    def warn(self, message: str) -> None:
        self.monitor.emit(events.Warned(message=message))


class ElasticLoop:
    """Takes one loop through the generations of a run.

    `enter` is called when a generation has been formed and its state agreed on, with the team and the place in the
    data.
    """

    def __init__(
        self,
        member: ScriptMember,
        contents: LoopContents,
        commits: Commits,
        enter: Callable[[Team, dict[str, Any]], None],
        *,
        advice: str = "and call state.save() now and then",
    ) -> None:
        """`advice` is what a script does so that a team that is lost as a whole has a checkpoint."""
        if member.has_loop:
            raise JobError("a script has one elastic loop: call both functions from one that has the decorator")
        member.has_loop = True
        self._member, self._link = member, member.link
        self._contents, self._commits, self._enter_team = contents, commits, enter
        self._advice = advice
        self._saver = Checkpointer(member.store, Checkpoint(), member.monitor)
        self._group = contextlib.ExitStack()
        # Between two generations `_held` is what this worker has; in one, the models have it and `_is_live` is set.
        self._held: State | None = None
        self._random: list[Tensor] | None = None  # torch's random numbers at that commit, if it is this worker's own
        self._asked_step = -1  # of the last checkpoint that the script asked for
        self._is_live = False
        self._is_untrained = True
        self._num_returns = 0
        self._is_begun = False  # something was begun since the last commit
        self._has_dropped = False
        self._reason = ""
        self._is_new_team = False
        self._comparison = Comparison()
        self._compared: Digest | None = None
        self._started = time.time()
        self._started_s, self._training_s = time.perf_counter(), 0.0
        self._start_samples = 0
        self._window = (0, self._started_s)
        self.team = Team()
        self.loss: float | None = None

    # One generation after the other ---------------------------------------------------------------------------

    def run(self, function: Callable[[], Result]) -> Result:
        """Return what `function` returns when it has come to its end in one generation. Collective.

        Raises LoopLeft when the run is over for this worker, and what `function` raises but for a lost member.
        """
        answer = self._await()
        lost: CommunicationError | None = None
        while True:
            if answer.directive.action == "leave":
                if answer.directive.reason:
                    raise CommunicationError(answer.directive.reason)
                raise LoopLeft
            assert answer.directive.action == "new_generation", answer
            try:
                self.team = self._group.enter_context(form_group(self._member.spec, answer, self._link))
                self._enter()
                result = function()
                self._saver.wait()
                reach("end.reached")
                # Nobody leaves before all have done their part. Weights that were changed after the last commit are not
                # those of any commit that all members have.
                if not self.team.any(self._commits.is_changed):
                    self.compare()
                self._end(None)
                return result
            except Halted:
                self._has_dropped, self._reason = False, ""
                answer = self._await()  # in the group: others may still read what this member has sent
                self._leave_group()
                if answer.directive.action == "finish":
                    self._save(at_once=True)
                    if self._saver.problem is not None:
                        raise StorageError(
                            f"the run was to end at step {self._commits.step}, which could not be saved: "
                            f"{self._saver.problem}"
                        ) from None
                    self._end("interrupt")
                    raise LoopLeft from None
                continue
            except Exception as error:
                if (lost := find_lost_peer(error)) is None:
                    raise
                self._has_dropped, self._reason = self._is_begun, str(lost)
                log.warning("generation %d is over at step %d: %s", answer.generation, self._commits.step, lost)
            if isinstance(lost, CallsDifferError):  # raised out of the handler: it does not come from a lost member
                raise TrainingError(
                    f"the workers have made different calls at step {self._commits.step + 1}: {lost}. A call that is "
                    "collective (team.backward, team.sum, team.gather) is for every worker, not only for the first"
                )
            self._leave_group()
            answer = self._await()

    def close(self) -> None:
        """Give up the group of the last generation, and wait for a checkpoint that is being written."""
        self._saver.wait()
        self._group.close()

    def _leave_group(self) -> None:
        with contextlib.suppress(CommunicationError, RuntimeError):  # of a group whose members are gone
            self._group.close()
        self._group = contextlib.ExitStack()

    def _await(self) -> Answer:
        """Wait for what to do next; one that was given up meanwhile begins again."""
        self._hold()
        if self._num_returns != self._link.num_returns:
            self._forget()
        step = -1 if self._held is None else step_of(self._held)
        answer = self._link.await_generation(step, has_dropped=self._has_dropped, reason=self._reason)
        if self._num_returns != self._link.num_returns:
            self._forget()
        return answer

    def _hold(self) -> None:
        """Take over the last commit from the models: what they have may be of a step that did not happen."""
        if self._is_live:
            self._held, self._random = self._commits.state(), self._commits.random_state()
            self._is_live = False
            self._training_s += time.perf_counter() - self._started_s

    def _forget(self) -> None:
        self._num_returns = self._link.num_returns
        with contextlib.suppress(CommunicationError):
            self._saver.wait()
        self._held, self._is_live = None, False

    def _enter(self) -> None:
        """Become a member of the team, with the state that is furthest. Collective.

        Whatever fails on the way, this worker still has what it had, or what it got whole from another member.
        """
        team = self.team
        self._member.sink.is_first = team.is_first
        if not team.is_first:
            self._saver.wait()  # another may save the same step from here on
        own_step = -1 if self._held is None else step_of(self._held)
        state = share_furthest(team, self._held, own_step)
        if state is None and (self._member.spec.resume or team.generation > 1):
            state = load_together(team, self._load)
        if state is None:
            state = self._begin_together()
        self._held = state
        reach("enter.agreed")
        self._contents.load(state)
        self._is_untrained = False
        reach("enter.set_up")
        progress = state.values["progress"]
        self._enter_team(team, progress)
        if own_step != progress["step"]:
            self._random = None
        elif self._random is not None:
            set_random_state(self._random)
        self._commits.begin(progress["step"])
        self._is_begun, self._is_new_team, self._link.step = False, True, progress["step"]
        reach("enter.resumed")
        self._comparison.begin()
        self.compare()
        self._saver.step = (
            self._commits.step if team.gather(int(team.is_first and self._saver.holds(self._commits.step)))[0] else -1
        )
        if max(team.gather(self._asked_step)) == self._commits.step:  # who was to write it may be gone
            self._save(at_once=False)
        reach("enter.done")
        self._held, self._is_live = None, True
        self._announce(progress)
        self.report_commit()
        self._started_s = time.perf_counter()
        self._window = (progress["samples"], self._started_s)

    def _begin_together(self) -> State:
        """Have every member begin with the state as one of them has it. Collective."""
        team = self.team
        untrained = team.gather(int(self._is_untrained))
        if not any(untrained):
            raise TrainingError(nothing_left(self._link.step, self._advice))
        source = untrained.index(1)
        own = None
        if team.worker_index == source:
            self._commits.begin(self._commits.step)
            own = self._commits.state()
        if team.num_workers == 1:
            assert own is not None
            return own
        return checkpoint.share_state(own, source)

    def _load(self) -> State | None:
        loaded = self._member.store.load_newest()
        if loaded is None:
            self._member.warn("the run has no checkpoint yet: starting from the beginning")
            return None
        for path, reason in loaded.damaged:
            self._member.warn(f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}")
        return loaded.state

    # One step after the other -----------------------------------------------------------------------------------

    @property
    def wants_halt(self) -> bool:
        """Whether this worker has heard that the team is to be formed again, or the run to end."""
        return self._link.is_stop_asked or self._link.is_pause_asked

    def begin_step(self) -> None:
        """Something was begun that is lost with the next member."""
        self._is_begun = True

    def check_generation(self) -> None:
        """Raise CommunicationError if a member of this generation is known to be lost."""
        if reason := self._link.why_generation_ended(self.team.generation):
            raise CommunicationError(reason)

    def committed(self) -> None:
        """Follow a commit: record it, and compare when it is time. Collective."""
        step = self._commits.step
        self._is_begun, self._link.step = False, step
        if self._is_new_team:
            self._is_new_team = False
            if self.team.is_first:
                self._link.report(FirstStep(step))
        if self._comparison.is_due(step):
            self.compare()
        now_s = time.perf_counter()
        if self.team.is_first and now_s - self._window[1] >= EVENT_EVERY_S:
            self._record_step(now_s)

    def halt(self) -> None:
        """Leave the loop after a commit, as all members have agreed to."""
        raise Halted

    def compare(self) -> None:
        """Compare a digest of the last commit with the others'. Raises TrainingError on every member. Collective."""
        team, contents = self.team, self._contents
        reach("compare.begun")

        def digest() -> Digest:
            return contents.digest(self._commits.state())

        try:
            self._compared = self._comparison.compare(self._commits.step, digest, team.gather_rows, team.numbers)
        except TrainingError:
            self._name_difference()
            raise
        reach("compare.done")

    def _name_difference(self) -> None:
        """Raise TrainingError that names what differs between members that differ. Collective."""
        found = find_differences(self._contents.named_values())
        if found:
            name, others = next(iter(found.items()))
            who = ", ".join(str(self.team.numbers[place]) for place in others)
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise TrainingError(
                f"the workers' states differ at commit {self._commits.step}: {name}{more} of worker {who} is not that "
                f"of worker {self.team.numbers[0]}. Every worker must change a state in the same way: with the sums "
                "and rows of all workers (team.sum, team.gather), not with its own"
            )

    def save(self) -> None:
        """Save the last commit as a checkpoint of the run: the first member writes. Collective."""
        self._asked_step = self._commits.step
        self.compare()
        self.report_commit()
        self._save(at_once=False)

    def _save(self, *, at_once: bool) -> None:
        if self._saver.step == self._commits.step:
            return
        if self.team.is_first:
            since_s = time.perf_counter()
            reach("save.begun")
            self._saver.begin(self._commits.step)
            self._saver.save(self._held or self._commits.state(), best_step=-1, since_s=since_s, at_once=at_once)
        self._saver.step = self._commits.step

    # What is recorded of it ---------------------------------------------------------------------------------------

    def report_commit(self) -> None:
        assert self._compared is not None
        progress = self._commits.progress
        self._member.monitor.emit(
            events.Commit(
                step=self._commits.step,
                epoch=progress["epoch"],
                batch=progress["batch"],
                samples=progress["samples"],
                generation=self.team.generation,
                digest=self._compared.describe(),
            )
        )

    def _record_step(self, now_s: float) -> None:
        progress = self._commits.progress
        samples, since_s = self._window
        self._window = (progress["samples"], now_s)
        self._member.monitor.emit(
            events.Step(
                step=self._commits.step,
                epoch=progress["epoch"] + 1,
                loss=self.loss,
                samples=progress["samples"],
                samples_per_second=(progress["samples"] - samples) / (now_s - since_s),
            )
        )
        self._member.monitor.progress(step=self._commits.step, loss=self.loss)

    def _announce(self, progress: dict[str, Any]) -> None:
        self._member.monitor.emit(
            events.RunStarted(
                strategy=SCRIPT,
                workers=self.team.num_workers,
                start_step=progress["step"],
                schema_version=SCHEMA_VERSION,
                run_dir=self._member.spec.run_dir,
                name=self._member.spec.load_job().name,
                device="cpu",
                threads=torch.get_num_threads(),
                model=", ".join(type(module).__name__ for module in self._contents.modules.values()),
                data=SCRIPT,
                parameters=self._contents.num_parameters,
                trainable_parameters=self._contents.num_trainable,
                cordee_version=__version__,
                torch_version=str(torch.__version__),
            )
        )
        if self._start_samples == 0:
            self._start_samples = progress["samples"]

    def _end(self, stopped_by: str | None) -> None:
        """Report how the loop ended, for the summary of the run."""
        if self._is_live:
            self._training_s += time.perf_counter() - self._started_s
        if self.team.is_first and stopped_by is None:
            self._record_step(time.perf_counter())
        progress, step = self._commits.progress, self._commits.step
        trained = progress["samples"] - self._start_samples
        summary = Summary(
            status="interrupted" if stopped_by else "completed",
            name=self._member.spec.load_job().name,
            strategy=SCRIPT,
            workers=self.team.num_workers,
            device="cpu",
            parameters=self._contents.num_parameters,
            trainable_parameters=self._contents.num_trainable,
            steps=step,
            epochs=progress["epoch"],
            samples=progress["samples"],
            wall_seconds=time.time() - self._started,
            samples_per_second=trained / self._training_s if trained and self._training_s else None,
            train_loss=self.loss,
            peak_memory_bytes=self._member.memory.peak_bytes() or None,
            weights_sha256=checkpoint.weights_sha256(self._contents.weights()) if self.team.is_first else None,
            stopped_by=stopped_by,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
            started=self._started,
            ended=time.time(),
        )
        self._link.report(WorkerSummary(summary))
