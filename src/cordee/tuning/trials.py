"""The trials of a search as processes: each is a run of `cordee train` in a directory of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cordee.cluster.engines.fork_server import die_with_parent
from cordee.core.env import child_environment
from cordee.core.errors import RunDirectoryError
from cordee.monitoring import events, follow
from cordee.monitoring.run_directory import JOB_FILE, LOCK_FILE, SUMMARY_FILE, is_locked
from cordee.monitoring.summary import Summary, read_summary
from cordee.tools.run_control import OUTPUT_FILE

_RELEASE_S = 60.0  # for which a run that lost its tuner may take to save and end


class Measured(NamedTuple):
    """One evaluation of a trial: the how-manieth it is, and what was measured."""

    place: int  # from 1; the same for trials with other batch sizes, whose steps are not comparable
    value: float | None  # None: not a number


class Readings:
    """What a run has measured, read as it goes. A step that is evaluated again after a resume counts once."""

    def __init__(self, run: Path, metric: str) -> None:
        self._run, self._metric = run, metric
        self._offset = self._step = self._place = 0
        self.last: Measured | None = None

    def new(self) -> list[Measured]:
        """Return the evaluations since the last call."""
        found, self._offset = follow(self._run, self._offset)
        measured = []
        for event in found:
            if isinstance(event, events.Evaluation) and event.step > self._step:
                self._step, self._place = event.step, self._place + 1
                self.last = Measured(self._place, value_of(event, self._metric))
                measured.append(self.last)
        return measured


def value_of(event: events.Evaluation, metric: str) -> float | None:
    """Return what an evaluation says of a metric."""
    named = {"loss": event.test_loss, "accuracy": event.test_accuracy, "top5_accuracy": event.test_top5_accuracy}
    return event.metrics[metric] if metric in event.metrics else named.get(metric)


class TrialProcess:
    """A trial under way. Its process is asked to save and end when this process dies, however it dies."""

    def __init__(self, number: int, run: Path, job: Path, overrides: Sequence[str], metric: str) -> None:
        self.number, self.run = number, run
        self.readings = Readings(run, metric)
        self.is_pruned = False
        run.mkdir(parents=True, exist_ok=True)
        _wait_for_release(run)
        command = [sys.executable, "-m", "cordee", "train", str(job), "--quiet", "--run-dir", str(run)]
        command += [f"--set={override}" for override in overrides]
        command += ["--resume"] if (run / JOB_FILE).is_file() else []
        with (run / OUTPUT_FILE).open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in the terminal reaches the tuner, which then stops its trials
                env=child_environment(),
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    @property
    def exit_code(self) -> int | None:
        """None as long as the process runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Have the run save and end after its step."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once; nothing is lost that a checkpoint has."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        self._process.wait()

    def problem(self) -> str:
        """Return why the process failed, in a line."""
        code = self._process.poll()
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        said = (self.run / OUTPUT_FILE).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        messages = [line.removeprefix("cordee: ") for line in said if line.startswith("cordee: ")]
        return messages[-1] if messages else said[-1] if said else f"it ended with exit code {code}"


def _wait_for_release(run: Path) -> None:
    """Wait until a process that lost its tuner has saved and left the directory. Raises RunDirectoryError."""
    deadline_s = time.monotonic() + _RELEASE_S
    while is_locked(run / LOCK_FILE):
        if time.monotonic() > deadline_s:
            raise RunDirectoryError(f"{run} is still in use by another process: `cordee stop {run}` ends it")
        time.sleep(0.1)


def finished_summary(run: Path) -> Summary | None:
    """Return the summary of a run that ended well; None if it has to be run, or continued."""
    if not (run / SUMMARY_FILE).is_file() or is_locked(run / LOCK_FILE):
        return None
    summary = read_summary(run / SUMMARY_FILE)
    return summary if summary is not None and summary.status in ("completed", "stopped") else None
