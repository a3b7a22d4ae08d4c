"""Runs the cases in both checkouts and gathers what they leave behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.cases import RUN, Case, Command
from compare.checkouts import Checkout
from compare.comparing import Outcome, Verdict, judge
from compare.processes import Ended, run_command

TIMEOUT_S = 600.0  # of one command: seconds on a quiet machine


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A case, what it left behind in each run, and what follows from it."""

    case: Case
    befores: list[Outcome]
    afters: list[Outcome]
    verdict: Verdict


def compare_case(
    case: Case, before: Checkout, after: Checkout, folder: Path, *, ignored_events: Collection[str]
) -> Compared:
    """Run `case` in both; where the outcomes differ, once more in both, to tell a change from chance."""
    ignored = {*case.varies, *(f"event {kind}" for kind in ignored_events)}
    befores: list[Outcome] = []
    afters: list[Outcome] = []
    while True:
        befores.append(run_case(case, before, before, folder / f"before-{len(befores)}"))
        afters.append(run_case(case, after, before, folder / f"after-{len(afters)}"))
        verdict = judge(befores, afters, case.precision, ignored=ignored)
        if verdict.is_same or len(befores) == 2:
            return Compared(case=case, befores=befores, afters=afters, verdict=verdict)


def run_case(case: Case, checkout: Checkout, before: Checkout, folder: Path) -> Outcome:
    """Run the commands of `case` up to the first that fails; return what they left in `folder`, which is removed."""
    folder.mkdir(parents=True)
    run = folder / "run"
    started_s = time.monotonic()
    ended: list[Ended] = []
    for command in case.commands:
        ended.append(_run(command, before if command.is_by_before else checkout, folder, run))
        if ended[-1].exit_code != 0:
            break
    seconds = time.monotonic() - started_s
    printed = _read_answer(ended[-1].stdout)
    if case.exported and (run / case.exported).is_file():
        printed["sha256 of the export"] = hashlib.sha256((run / case.exported).read_bytes()).hexdigest()
    outcome = Outcome(
        exit_codes=[one.exit_code for one in ended],
        summary=_read_summary(run),
        printed=printed,
        events=read_events(run),
        files=sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
        left_behind=[name for one in ended for name in one.left_behind],
        seconds=seconds,
        last_words="" if ended[-1].exit_code == 0 else ended[-1].last_words(),
    )
    shutil.rmtree(folder)
    return outcome


def _run(command: Command, checkout: Checkout, folder: Path, run: Path) -> Ended:
    arguments = [argument.replace(RUN, str(run)) for argument in command.arguments]
    while_running: Callable[[], None] = lambda: None  # noqa: E731
    if command.kills_after_step is not None:
        while_running = Killer(run, command.kills_after_step)
    return run_command(
        [checkout.python, *arguments],
        environment=checkout.environment,
        folder=folder,
        timeout_s=TIMEOUT_S,
        while_running=while_running,
    )


@dataclass
class Killer:
    """Kills worker 1 of a run with SIGKILL, once, after it has recorded a step."""

    run: Path
    after_step: int
    killed_s: float | None = field(default=None, init=False)  # unix seconds

    def __call__(self) -> None:
        if self.killed_s is not None:
            return
        events = read_events(self.run)
        if not any(event.get("type") == "step" and event["step"] >= self.after_step for event in events):
            return
        for event in events:
            if event.get("type") == "worker_started" and event["worker"] == 1:
                self.killed_s = time.time()
                os.kill(event["pid"], signal.SIGKILL)
                return


def read_events(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run so far; a line that is being written is left out."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _read_summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return summary


def _read_answer(stdout: str) -> dict[str, Any]:
    """Return the JSON that a script printed as its last line; nothing if it printed something else."""
    lines = stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
