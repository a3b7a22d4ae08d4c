"""A loop of one's own under `cordee run --elastic`: what a commit costs, and how soon a lost worker is trained around.

Both are of the same script: LeNet on images of 28×28, 32 for each of two workers, Adam. Each worker measures its own
steps and commits, and writes a line for each step that it has committed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

from cordee.bench.harness import goal_outcome
from cordee.bench.recovery import await_gap, read_lines, running, wait_for

BATCH_SIZE = 32  # per worker
NUM_STEPS = 400  # of a round in which commits are measured
WARM_STEPS = 50
GOAL_SHARE = 0.01  # of a step that a commit takes
GOAL_S = 1.0  # from a kill to the next step
KILL, COMMIT = "elastic/kill", "elastic/commit"

SCRIPT = """
import json, os, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import cordee
from cordee.models.lenet import lenet

folder, num_steps, two_optimizers = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "two"
torch.manual_seed(0)
images, labels = torch.randn(8192, 1, 28, 28), torch.randint(10, (8192,))
data = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, drop_last=True)
model = lenet(input_shape=(1, 28, 28), num_classes=10)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
other = torch.nn.Linear(10, 10)
second = torch.optim.Adam(other.parameters(), lr=1e-3)
with cordee.join() as team:
    model, optimizer, batches = team.prepare(model, optimizer, data)
    things = dict(other=other, second=second) if two_optimizers else {}
    if two_optimizers:
        team.prepare(other, second)
    state = team.state(model=model, optimizer=optimizer, step=0, **things)

    @team.elastic
    def train():
        with open(os.path.join(folder, f"steps-{os.getpid()}.jsonl"), "a", buffering=1) as lines:
            while state.step < num_steps:
                begun = time.perf_counter()
                for x, y in batches:
                    outputs = model(x)
                    team.backward(F.cross_entropy(outputs, y))
                    optimizer.step()
                    optimizer.zero_grad()
                    if two_optimizers:
                        team.backward(F.cross_entropy(other(outputs.detach()), y))
                        second.step()
                        second.zero_grad()
                    state.step += 1
                    computed = time.perf_counter()
                    team.commit()
                    now = time.perf_counter()
                    lines.write(json.dumps([state.step, time.time(), now - begun, now - computed]) + "\\n")
                    begun = time.perf_counter()
                    if state.step >= num_steps:
                        break

    train()
"""


def measures(rounds: int, say: Callable[[str], None]) -> dict[str, Callable[[], dict[str, list[float]]]]:
    """Return what is measured, by the names of the cases."""
    return {COMMIT: lambda: _measure_commits(rounds, say), KILL: lambda: _measure_kills(rounds, say)}


def rows(raw: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield what a person reads of the figures that are there."""
    for name, unit in (("one optimizer", "share of a step"), ("two optimizers", "share of a step")):
        if figures := raw.get(f"{COMMIT}: {name}"):
            share, goal = statistics.median(figures), GOAL_SHARE if name == "one optimizer" else None
            outcome = goal_outcome(share <= goal) if goal is not None else ""
            yield _row(COMMIT, name, unit, figures, goal, outcome)
    if figures := raw.get(f"{KILL}: seconds to the next step"):
        reached = goal_outcome(statistics.median(figures) <= GOAL_S)
        yield _row(KILL, "cordee", "seconds to the next step", figures, GOAL_S, reached)
        redone = raw[f"{KILL}: steps redone"]
        yield _row(KILL, "cordee", "steps redone", redone, 1.0, goal_outcome(max(redone) <= 1))


def _row(
    case: str, contestant: str, unit: str, figures: list[float], goal: float | None, outcome: str
) -> dict[str, Any]:
    return {
        "case": case,
        "contestant": contestant,
        "unit": unit,
        "median": statistics.median(figures),
        "worst": max(figures),
        "goal": goal,
        "outcome": outcome,
    }


def _measure_commits(rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the share of the time that commits take, comparisons, copies and events included, in each round."""
    raw: dict[str, list[float]] = {"one optimizer": [], "two optimizers": [], "ms of a step": []}
    for number in range(rounds):
        for name in ("one optimizer", "two optimizers"):
            with _started(NUM_STEPS, name.split()[0]) as (folder, process):
                process.wait(120)
                (_, lines), *_ = sorted(_read_steps(folder).items())
                spent = [(step_s, commit_s) for _, _, step_s, commit_s in lines[WARM_STEPS:]]
                raw[name].append(sum(commit_s for _, commit_s in spent) / sum(step_s for step_s, _ in spent))
            if name == "one optimizer":
                raw["ms of a step"].append(1e3 * statistics.mean(step_s for step_s, _ in spent))
        say(f"round {number + 1} of {rounds}: " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in raw.items()))
    return raw


def _measure_kills(rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the seconds from a kill to the next step that is committed, and the steps redone, in each round."""
    raw: dict[str, list[float]] = {"seconds to the next step": [], "steps redone": []}
    for number in range(rounds):
        with _started(10**9, "one") as (folder, process):
            wait_for(lambda: len(_steps(folder)) >= 2 * WARM_STEPS, process)
            victim = [event["pid"] for event in _events(folder) if event.get("type") == "worker_started"][1]
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            _, _, next_s = await_gap(partial(_steps, folder, victim), killed_s, process)
            wait_for(lambda: any(event.get("type") == "recovery" for event in _events(folder)), process)
            recovery = next(event for event in _events(folder) if event.get("type") == "recovery")
            raw["seconds to the next step"].append(next_s - killed_s)
            raw["steps redone"].append(float(recovery["steps_redone"]))
        say(f"round {number + 1} of {rounds}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in raw.items()))
    return raw


@contextmanager
def _started(num_steps: int, optimizers: str) -> Iterator[tuple[Path, Popen[bytes]]]:
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        options = ["--elastic", "-n", "2", "--run-dir", str(folder / "run"), "--set", "max_restarts=1000"]
        arguments = [str(folder / "script.py"), name, str(num_steps), optimizers]
        with running([sys.executable, "-m", "cordee", "run", *options, *arguments]) as process:
            yield folder, process


def _read_steps(folder: Path) -> dict[int, list[tuple[int, float, float, float]]]:
    """Return the lines of each worker, by its process id."""
    found = {}
    for path in folder.glob("steps-*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if line.endswith("]")]
        found[int(path.stem.partition("-")[2])] = [tuple(json.loads(line)) for line in lines]
    return found


def _steps(folder: Path, without: int = 0) -> list[tuple[float, int]]:
    """Return (time, step) of every commit but those of one process, in their order."""
    lines = [line for pid, own in _read_steps(folder).items() if pid != without for line in own]
    return sorted((at_s, step) for step, at_s, _, _ in lines)


def _events(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "run" / "events.jsonl")
