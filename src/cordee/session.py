"""One worker's way through a run: resume, announce, train, sum up. The same alone and in a team."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cordee import checkpoint
from cordee.assembly import Assembly
from cordee.core.errors import CordeeError, TrainingError
from cordee.monitoring import Monitor, Summary
from cordee.monitoring.summary import Status
from cordee.trainer import Outcome, Trainer
from cordee.version import __version__

log = logging.getLogger("cordee.session")


class Session:
    """Takes the parts of one worker through a run. `run_dir` is where the team's checkpoints are."""

    def __init__(self, parts: Assembly, monitor: Monitor, run_dir: Path, should_stop: Callable[[], bool]) -> None:
        self._parts = parts
        self._monitor = monitor
        self._run_dir = run_dir
        self._trainer = Trainer(parts, monitor, run_dir / "checkpoints", should_stop=should_stop)
        self._started = time.time()
        self._outcome: Outcome | None = None

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self._trainer.progress.step

    def run(self, *, resume: bool, log_file: Path) -> None:
        """Train to the end. Raises CordeeError; an error in the user's code is one too, with its place named."""
        try:
            if resume:
                self._resume()
            self._announce()
            self._outcome = self._trainer.run()
        except (CordeeError, KeyboardInterrupt):
            raise
        except Exception as problem:  # the user's model, data or loss: their traceback is in the log
            log.exception("training failed at step %d", self.step + 1)
            raise TrainingError(
                f"step {self.step + 1} raised {type(problem).__name__}: {problem} (the traceback is in {log_file})"
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
            self._monitor.emit("warning", message="the run has no checkpoint yet: starting from the beginning")
            return
        for path, reason in loaded.damaged:
            message = f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}"
            self._monitor.emit("warning", message=message)
        self._trainer.resume(loaded.state)

    def _announce(self) -> None:
        parts, job, splits = self._parts, self._parts.job, self._parts.splits
        self._monitor.emit(
            "run_started",
            run_dir=str(self._run_dir),
            name=job.name,
            strategy=job.strategy.name,
            workers=parts.team.num_workers,
            device=str(parts.computation.device),
            threads=parts.num_threads,
            model=job.to_dict()["model"]["use"],
            data=splits.name,
            parameters=parts.num_parameters,
            train_samples=splits.train.num_samples,
            test_samples=splits.test.num_samples if splits.test else None,
            batch_size=job.training.batch_size,
            total_steps=parts.total_steps,
            epochs=job.training.num_epochs,
            start_step=self.step,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
        )


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
