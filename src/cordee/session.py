"""One worker's way through a run: resume, announce, train, sum up. The same alone and in a team."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cordee import checkpoint
from cordee.assembly import Assembly
from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.communication.lost_peer import find_lost_peer
from cordee.compute.memory import MemoryWatch
from cordee.core.errors import CordeeError, TrainingError
from cordee.monitoring import Monitor, Summary
from cordee.monitoring.summary import Status
from cordee.progress import Outcome
from cordee.trainer import Trainer
from cordee.version import __version__

log = logging.getLogger("cordee.session")


class Session:
    """Takes the parts of one worker through a run. `run_dir` is where the team's checkpoints are."""

    def __init__(
        self,
        parts: Assembly,
        monitor: Monitor,
        run_dir: Path,
        should_stop: Callable[[], bool],
        should_pause: Callable[[], bool] = lambda: False,
        memory: MemoryWatch | None = None,
    ) -> None:
        self._parts = parts
        self._memory = memory or MemoryWatch()
        self._monitor = monitor
        self._run_dir = run_dir
        self._trainer = Trainer(
            parts, monitor, run_dir / "checkpoints", should_stop=should_stop, should_pause=should_pause
        )
        self._is_up_to_date = False
        self._started = time.time()
        self._outcome: Outcome | None = None

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self._trainer.progress.step

    def run(self, *, resume: bool, log_file: Path) -> None:
        """Train to the end. Raises CordeeError; an error in the user's code is one too, with its place named."""
        with self._naming_errors(log_file):
            if resume:
                self._resume()
            self._announce()
            self._outcome = self._trainer.run()

    def go_on(self, team: Team, *, may_load: bool, log_file: Path, is_end: Callable[[], bool]) -> bool:
        """Train as a member of `team` until the run ends or the team does; return whether the run has ended.

        Collective. Members that are behind, or new, get everything from the one that is furthest. Where nobody has
        anything, all load the newest checkpoint if `may_load`, or begin. Raises CommunicationError when a member is
        lost: the step that was under way did not happen, and `go_on` may be called with another team.
        """
        with self._naming_errors(log_file):
            self._enter(team, may_load)
            self._announce()  # the coordinator takes the first: that of a generation that came about
            self._outcome = self._trainer.run(is_end)
            if self._outcome is not None:
                team.any(False)  # nobody leaves before all have done their part
        return self._outcome is not None

    def close(self) -> None:
        """Wait for a checkpoint that is being written. For before the process ends, unless it is in a hurry."""
        self._trainer.settle()

    @property
    def ready_step(self) -> int:
        """How many steps this worker can go on from; -1 before it has a model that is the team's."""
        return self.step if self._is_up_to_date else -1

    def forget(self) -> None:
        """What this worker has is not the team's any more: it gets everything from the others."""
        self._is_up_to_date = False

    @property
    def has_dropped(self) -> bool:
        """Whether a step was begun that could not be finished."""
        return self._trainer.is_stepping

    def _enter(self, team: Team, may_load: bool) -> None:
        if not team.is_first:
            self._trainer.settle()  # another may save the same step from here on
        own, steps = self.ready_step, team.gather(self.ready_step)
        if not self._parts.is_elastic:
            # The parts of the last team are of no use in another: what it saved when it halted, or before, is.
            own, steps = -1, [-1] * team.num_workers
            self._require_checkpoint()
        parts = self._parts.in_team(team)
        state: State | None = None
        if own >= 0:
            state = self._trainer.state()  # setting up makes a new optimizer
        furthest = max(steps)
        if state is not None and steps[0] < furthest:  # setting up gives all the first one's weights
            state = State({name: tensor.clone() for name, tensor in state.tensors.items()}, state.values)
        if min(steps) < furthest:
            source = steps.index(furthest)
            shared = checkpoint.share_state(state if team.worker_index == source else None, source)
            state = state if own == furthest else shared
        self._parts = parts
        parts.setup()
        self._trainer.enter(parts, state)
        self._is_up_to_date = True
        if furthest < 0 and may_load:
            self._resume_together(team)
        self._trainer.report_commit()

    def _resume_together(self, team: Team) -> None:
        """Load the newest checkpoint everywhere. Collective."""
        if team.is_first or not team.is_wide:
            self._resume()
        if team.is_wide:  # the others may have no way to the run directory
            shared = checkpoint.share_state(self._trainer.state() if team.is_first else None)
            if not team.is_first:
                self._trainer.resume(shared)

    def _require_checkpoint(self) -> None:
        """Raise TrainingError where this worker has trained before and there is nothing to go on from."""
        if self._is_up_to_date and not checkpoint.list_checkpoints(self._run_dir / "checkpoints"):
            raise TrainingError(
                f"the team was lost at step {self.step}, and there is no checkpoint yet: start the run again, with a "
                "smaller checkpoint.every_steps"
            )

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
                f"step {self.step + 1} raised {type(problem).__name__}: {problem}{_advice(problem)} "
                f"(the traceback is in {log_file})"
            ) from problem

    def summarise(self, error: BaseException | None) -> Summary:
        """Return what came out, also of a run that ended with `error`."""
        parts, progress, outcome = self._parts, self._trainer.progress, self._outcome
        metrics = outcome.metrics if outcome else None
        status, stopped_by = _status(outcome, error)
        return Summary(
            status=status,
            name=parts.job.name,
            strategy=parts.job.strategy.name,
            workers=parts.team.num_workers,
            device=str(parts.computation.device),
            parameters=parts.num_parameters,
            steps=progress.step,
            epochs=progress.epoch,
            samples=progress.samples,
            wall_seconds=progress.elapsed_s,
            samples_per_second=(outcome.samples_per_second or None) if outcome else None,  # 0: no step was left to take
            step_seconds=_step_s(outcome),
            checkpoint_stall_seconds=outcome.stall_s if outcome else None,
            best_step=progress.best_step if progress.best_step >= 0 else None,
            peak_memory_bytes=self._memory.peak_bytes() or None,
            train_loss=outcome.train_loss if outcome else None,
            test_loss=metrics.loss if metrics else None,
            test_accuracy=metrics.accuracy if metrics else None,
            test_top5_accuracy=metrics.top5_accuracy if metrics else None,
            weights_sha256=checkpoint.weights_sha256(parts.strategy.model.state_dict()) if outcome else None,
            stopped_by=stopped_by,
            error=str(error) if status == "failed" else None,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
            started=self._started,
            ended=time.time(),
        )

    def _resume(self) -> None:
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints")
        if loaded is None:
            self._warn("the run has no checkpoint yet: starting from the beginning")
            return
        for path, reason in loaded.damaged:
            self._warn(f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}")
        self._trainer.resume(loaded.state)

    def _warn(self, message: str) -> None:
        if self._parts.team.is_first:  # all workers would say the same
            self._monitor.emit("warning", message=message)

    def _announce(self) -> None:
        self._monitor.emit("run_started", run_dir=str(self._run_dir), start_step=self.step, **self._parts.describe())


def _status(outcome: Outcome | None, error: BaseException | None) -> tuple[Status, str | None]:
    if isinstance(error, KeyboardInterrupt) or (outcome is not None and outcome.stopped_by == "interrupt"):
        return "interrupted", "interrupt"
    if outcome is None:
        return "failed", "error"
    return ("stopped" if outcome.stopped_by else "completed"), outcome.stopped_by


def _step_s(outcome: Outcome | None) -> float | None:
    if outcome is None or not outcome.samples_per_second or not outcome.progress.step:
        return None
    return outcome.progress.samples / outcome.progress.step / outcome.samples_per_second


def _advice(problem: Exception) -> str:
    """Return what to do about an error of torch whose cause is in the job."""
    if "Expected more than 1 value per channel" not in str(problem):
        return ""
    return (
        ": a batch norm cannot train on a single sample, which is a worker's share, or a micro-batch, of the last, "
        "smaller batch of an epoch: choose a training.batch_size that divides the samples, or fewer micro-batches or "
        "workers"
    )
