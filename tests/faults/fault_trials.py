"""One trial: a small run in a scenario in which a fault point is passed, a fault there, and what must hold after.

The command, its signals and its processes are real; a `WarmServer` launches it. What brings a run to where something
can happen to it is a fault as well (a worker killed before its 4th step, one held before its 5th), not the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from cordee.cluster.control import scale_run
from cordee.core import fault_points
from cordee.core.errors import CordeeError
from cordee.core.fault_points import Fault
from cordee.monitoring import read_events
from cordee.tools.audit import audit_run
from warm_launch import WarmProcess, WarmServer

STEP_LIMIT_S = 20.0  # for what a scenario waits for; a fault may have made it impossible
NOT_HAPPENED = "the fault did not happen"
RUN_LIMIT_S = 90.0  # a run that has not ended by then hangs
GONE_LIMIT_S = 10.0  # for the processes of a run that has ended
NAP_S = 0.01
FAIL = "fail"  # the file that makes a job fail that is there to fail
LAUNCHER_SLEEP_S = 1.0  # how long a launcher is frozen: nobody replaces it, it is woken


# The job of a walk: Adam and dropout, so that its optimizer and its random numbers have a state to lose.
JOB = """
[model]
{model}
[data]
use = "synthetic"
shape = [8]
num_classes = 3
size = 64
test_size = 16
[optimizer]
use = "adam"
lr = 0.01
[training]
batch_size = 16
steps = {steps}
threads = 1
{training}
[strategy]
workers = 2
{strategy}
[cluster]
failure_timeout = "2s"
max_restarts = 20
[monitoring]
every_steps = 1
[checkpoint]
every_steps = {save_every}
keep = 1
"""


def job_text(
    model: str, strategy: str, *, steps: int, save_every: int, is_reproducible: bool = True, training: str = ""
) -> str:
    """Return the file of a job; `model`, `strategy` and `training` are lines of these sections."""
    training = f"reproducible = true\n{training}" if is_reproducible else training
    return JOB.format(model=model, strategy=strategy, steps=steps, save_every=save_every, training=training)


class Expected(msgspec.Struct, frozen=True):
    """What the run ends with if nothing happens to it."""

    weights_sha256: str
    steps: int
    samples: int
    files: dict[str, str]  # of the last checkpoint: the SHA-256 of each file of tensors


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trial; `problem` is empty if all held."""

    strategy: str
    scenario: str
    fault: Fault
    problem: str = ""
    seconds: float = 0.0
    ended: str = ""  # completed, or resumed after it had ended early
    folder: str = ""  # of a trial that failed: it is kept


class Trial:
    """A run that is under way, for the scenario that drives it."""

    def __init__(self, server: WarmServer, folder: Path, process: WarmProcess, environment: Mapping[str, str]) -> None:
        self._server, self._environment = server, environment
        self.folder, self.process = folder, process
        self.run_dir, self.faults = folder / "run", folder / "faults"
        self.others: list[WarmProcess] = []  # commands that were started beside it

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return []
        return [event for event in read_events(path) if event["type"] == kind]

    def num_visits(self, point: str, process: str) -> int:
        return fault_points.visits(self.faults).count((point, process))

    def has_happened(self, fault: Fault) -> bool:
        return fault in fault_points.happened(self.faults)

    def until(self, holds: Callable[[], object], limit_s: float = STEP_LIMIT_S) -> bool:
        """Wait; return whether it holds now. Ends early when the run does."""
        deadline_s = time.monotonic() + limit_s
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                return bool(holds())
            time.sleep(NAP_S)
        return True

    def until_held(self, hold: Fault) -> bool:
        return self.until(lambda: self.has_happened(hold))

    def release(self, hold: Fault) -> None:
        fault_points.release(self.faults, hold)

    def until_members(self, num_members: int, told: str) -> None:
        """Wait until a team of this size trains, or `told`, who is held, has heard that one is to be formed."""
        before = self.num_visits("link.pause", told)

        def is_so() -> bool:
            formed = self.events("generation")
            is_formed = bool(formed) and len(formed[-1]["members"]) == num_members
            is_given_up = any(other.poll() is not None for other in self.others)
            return is_formed or is_given_up or self.num_visits("link.pause", told) > before

        self.until(is_so)

    def scale(self, num_workers: int) -> None:
        """Ask until a coordinator answers."""

        def is_answered() -> bool:
            try:
                scale_run(self.run_dir, num_workers)
            except CordeeError:
                return False
            return True

        self.until(is_answered)

    def join(self) -> None:
        """Have a worker join by itself."""
        arguments = ("join", str(self.run_dir))
        self.others.append(self._server.cordee(*arguments, folder=self.folder, environment=self._environment))

    def pid_of(self, kind: str, worker: int | None = None) -> int | None:
        """Return the newest process that an event of `kind` names, if it lives."""
        started = [event for event in self.events(kind) if worker is None or event["worker"] == worker]
        pid = started[-1]["pid"] if started else None
        return pid if pid is not None and psutil.pid_exists(pid) else None

    def signal(self, pid: int | None, number: signal.Signals) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Scenario(NamedTuple):
    """A run in which something happens, besides the fault that is tried."""

    drive: Callable[[Trial], None] = lambda trial: None
    base: tuple[Fault, ...] = ()  # what happens in it by itself
    settings: tuple[str, ...] = ()
    resumes: str = ""  # the scenario whose saved run it continues
    ends_early: bool = False  # by itself: the user interrupts it, or it fails; it is resumed then
    prepare: Callable[[Path], None] = lambda folder: None  # before it starts


class Walker:
    """Tries faults on one job. `job` is the text of its file, `module` that of a file parts.py beside it, which it may
    use; `scenarios` are told apart by name.
    """

    accepted_notes: frozenset[str] = frozenset()  # subjects of which the audit may say that they cannot be checked

    def __init__(
        self,
        server: WarmServer,
        folder: Path,
        strategy: str,
        job: str,
        scenarios: Mapping[str, Scenario],
        module: str = "",
    ) -> None:
        self._server, self._folder, self._strategy, self._job, self._module = server, folder, strategy, job, module
        self._scenarios = scenarios
        self._saved: dict[str, Path] = {}
        self.expected = self._observe()

    def _observe(self) -> Expected:
        folder = self._folder / "undisturbed"
        trial = self._begin(folder, Scenario(), ())
        stdout, stderr = trial.process.communicate(RUN_LIMIT_S)
        assert trial.process.returncode == 0, f"{stdout}{stderr}"
        summary = read_summary(trial.run_dir)
        return Expected(
            weights_sha256=summary["weights_sha256"],
            steps=summary["steps"],
            samples=summary["samples"],
            files=last_files(trial.run_dir),
        )

    def prepare(self, names: set[str]) -> None:
        """Make the saved runs that these scenarios continue, so that they are there for trials side by side."""
        for name in sorted(names):
            earlier = self._scenarios[name].resumes
            if not earlier or earlier in self._saved:
                continue
            folder, scenario = self._folder / f"saved-{earlier}", self._scenarios[earlier]
            trial = self._begin(folder, scenario, scenario.base)
            scenario.drive(trial)
            trial.process.communicate(RUN_LIMIT_S)
            self._saved[earlier] = trial.run_dir

    def visits(self, name: str) -> dict[tuple[str, str], int]:
        """Return how often each (point, process) is passed in a scenario in which nothing else happens."""
        self.prepare({name})
        folder, scenario = self._folder / f"visits-{name}", self._scenarios[name]
        trial = self._begin(folder, scenario, scenario.base)
        scenario.drive(trial)
        trial.process.communicate(RUN_LIMIT_S)
        counts: dict[tuple[str, str], int] = {}
        for visit in fault_points.visits(trial.faults):
            counts[visit] = counts.get(visit, 0) + 1
        return counts

    def try_fault(self, name: str, fault: Fault, *, may_end_early: bool = False, loses_updates: bool = False) -> Result:
        """Run the scenario with the fault in it, and check everything. Its folder is removed unless something is wrong.

        With `may_end_early` a run that ends with an error is resumed, and has to be right then. With `loses_updates`
        nobody is left who has all updates: the summary and the audit must say so.
        """
        scenario, started_s = self._scenarios[name], time.monotonic()
        folder = self._folder / f"{name}-{fault.point}-{fault.process}-{fault.action}-{fault.visit}".replace("*", "any")
        problem, ended = "", ""
        trial = self._begin(folder, scenario, (*scenario.base, fault))
        try:
            with contextlib.ExitStack() as stack:
                if fault.process == "launcher" and fault.action == "freeze":  # what drives it may bring the fault about
                    stack.enter_context(ThreadPoolExecutor(1)).submit(self._wake, trial, fault)
                scenario.drive(trial)
            ended = self._check(trial, scenario, fault, may_end_early, loses_updates)
        except (AssertionError, subprocess.TimeoutExpired, OSError, CordeeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            for process in family(folder):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        if not problem:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            strategy=self._strategy,
            scenario=name,
            fault=fault,
            problem=problem,
            seconds=round(time.monotonic() - started_s, 2),
            ended=ended,
            folder=str(folder) if problem else "",
        )

    def _begin(self, folder: Path, scenario: Scenario, faults: tuple[Fault, ...]) -> Trial:
        shutil.rmtree(folder, ignore_errors=True)
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        if scenario.resumes:
            shutil.copytree(self._saved[scenario.resumes], folder / "run")
        scenario.prepare(folder)
        (folder / "job.toml").write_text(self._job)
        (folder / "parts.py").write_text(self._module)
        environment = {**os.environ, "TMPDIR": str(temporary)} | fault_points.ask_for(folder / "faults", faults)
        resume = ["--resume"] if scenario.resumes else []
        process = self._train(folder, environment, [*resume, *_options(scenario)])
        return Trial(self._server, folder, process, environment)

    def _train(self, folder: Path, environment: Mapping[str, str], options: list[str]) -> WarmProcess:
        arguments = ["train", str(folder / "job.toml"), "--run-dir", str(folder / "run"), "-q", *options]
        return self._server.cordee(*arguments, folder=folder, environment=environment)

    def _wake(self, trial: Trial, fault: Fault) -> None:
        trial.until(lambda: trial.has_happened(fault))
        time.sleep(LAUNCHER_SLEEP_S)
        trial.process.send_signal(signal.SIGCONT)

    def _check(self, trial: Trial, scenario: Scenario, fault: Fault, may_end_early: bool, loses_updates: bool) -> str:
        """Wait for the end and check what holds then; return how the run ended. Raises AssertionError."""
        try:
            _, stderr = trial.process.communicate(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs: {_describe(trial)}") from None
        code = trial.process.returncode
        assert trial.has_happened(fault), f"{NOT_HAPPENED}; exit code {code}: {stderr[-2000:]}"
        is_launcher_killed = fault.process == "launcher" and fault.action == "kill"
        for other in trial.others:
            if fault.action == "freeze":
                trial.signal(other.pid, signal.SIGKILL)  # a worker that joined by itself is the user's to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(GONE_LIMIT_S)
        check_gone(trial.folder, is_launcher_killed=is_launcher_killed)
        ended = "completed"
        is_early = code != 0 or read_summary(trial.run_dir).get("status") == "interrupted"
        if is_early:
            assert may_end_early or is_launcher_killed or scenario.ends_early, f"exit code {code}: {stderr[-2000:]}"
            assert is_launcher_killed or code != 1 or "cordee:" in stderr, f"no message: {stderr[-2000:]}"
            assert "Traceback" not in stderr, stderr[-2000:]
            ended = "resumed"
            environment = {**os.environ, "TMPDIR": str(trial.folder / "temporary")}
            (trial.folder / FAIL).unlink(missing_ok=True)
            again = self._train(trial.folder, environment, ["--resume", *_options(scenario)])
            _, stderr = again.communicate(RUN_LIMIT_S)
            assert again.returncode == 0, f"resumed after exit code {code}, it ends with {again.returncode}: {stderr}"
            check_gone(trial.folder, is_launcher_killed=is_launcher_killed)
        self._check_outcome(trial, loses_updates)
        return ended

    def _check_outcome(self, trial: Trial, loses_updates: bool) -> None:
        summary, expected = read_summary(trial.run_dir), self.expected
        assert summary["status"] == "completed", summary
        assert summary["steps"] == expected.steps, f"{summary['steps']} steps instead of {expected.steps}"
        assert summary["samples"] == expected.samples, f"{summary['samples']} samples instead of {expected.samples}"
        assert not summary["not_in_storage"], f"not in the storage: {summary['not_in_storage']}"
        problems = {
            finding.subject: finding.detail
            for finding in audit_run(trial.run_dir)
            if finding.state != "ok" and not (finding.state == "note" and finding.subject in self.accepted_notes)
        }
        if loses_updates:
            assert summary["updates_lost"] > 0 and problems.keys() == {"updates"}, f"lost without a report: {problems}"
            return
        assert summary["weights_sha256"] == expected.weights_sha256, "other weights"
        files = last_files(trial.run_dir)
        assert files == expected.files, f"the last checkpoint has other contents: {files} instead of {expected.files}"
        assert not problems, f"the audit says: {problems}"


def _options(scenario: Scenario) -> list[str]:
    return [part for setting in scenario.settings for part in ("--set", setting)]


def read_summary(run_dir: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    except FileNotFoundError:
        return {}
    return summary


def last_files(run_dir: Path) -> dict[str, str]:
    """Return the hashes of the tensor files of the newest checkpoint: the model, and the state of the optimizer."""
    newest = max((run_dir / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
    manifest = json.loads((newest / "manifest.json").read_text())
    files = {name: str(written) for name, written in manifest["files"].items() if name.endswith(".safetensors")}
    return {"name": newest.name, **files}


def family(folder: Path) -> list[psutil.Process]:
    """Return the processes of the run in `folder`: it is their working folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_living = process.status() != psutil.STATUS_ZOMBIE
            if is_living and Path(f"/proc/{process.pid}/cwd").readlink().is_relative_to(folder.resolve()):
                found.append(process)
    return found


def check_gone(folder: Path, *, is_launcher_killed: bool = False) -> None:
    """Nothing may be left of a run that has ended: no process, no shared memory, no temporary folder."""
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while (left := family(folder)) and time.monotonic() < deadline_s:
        time.sleep(NAP_S)
    assert not left, f"processes are left: {[(process.pid, process.status()) for process in left]}"
    temporary = [path.name for path in (folder / "temporary").iterdir()]
    # Nobody is left who could remove those of a launcher that was killed; the next one does.
    assert is_launcher_killed or not temporary, f"left in the temporary folder: {temporary}"


def _describe(trial: Trial) -> str:
    lines = [f"{process.pid} {process.status()}" for process in family(trial.folder)]
    events = trial.run_dir / "events.jsonl"
    last = events.read_text().splitlines()[-3:] if events.exists() else []
    return f"processes {lines}; last visits {fault_points.visits(trial.faults)[-5:]}; last events {last}"
