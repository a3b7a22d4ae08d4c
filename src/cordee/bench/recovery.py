"""A worker is killed: how long until the next step is taken, beside torchrun's restart of the same training.

Both train the same small network on two workers and write a line with the time of each step. One worker is killed
with SIGKILL; measured is the time from there to the first step that is taken afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from cordee.bench.harness import Report, describe_machine
from cordee.core.errors import CordeeError

WARM_STEPS = 50
TIMEOUT_S = 60.0  # for the start, and for the recovery
MOST_TRIES = 4  # a restart that does not come is tried again, and counted

JOB = """
[model]
use = "mlp"
hidden = [256, 256]
[data]
use = "synthetic"
shape = [64]
num_classes = 10
size = 4096
[training]
batch_size = 64
steps = 100000000
threads = 1
[strategy]
name = "data_parallel"
workers = 2
[cluster]
max_restarts = 1000
[monitoring]
every_steps = 1
[checkpoint]
every_steps = 10
"""

# What torchrun's users write: save every 10 steps, load what is there on start.
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
                            torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, saved = 0, os.path.join(folder, "saved.pt")
if os.path.exists(saved):
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    step = state["step"]
ddp = DistributedDataParallel(model)
inputs, targets = torch.randn(4096, 64), torch.randint(10, (4096,))
with open(os.path.join(folder, f"events-{rank}.jsonl"), "a", buffering=1) as events:
    events.write(json.dumps({"pid": os.getpid()}) + "\\n")
    while True:
        at = (step * 64 + rank * 32) % 4096
        loss = torch.nn.functional.cross_entropy(ddp(inputs[at:at + 32]), targets[at:at + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        events.write(json.dumps({"step": step, "time": time.time()}) + "\\n")
        if rank == 0 and step % 10 == 0:
            torch.save({"model": model.state_dict(), "step": step}, saved + ".new")
            os.replace(saved + ".new", saved)
"""


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    """Kill a worker of each in turn, `rounds` times."""
    raw: dict[str, list[float]] = {"cordee": [], "torchrun": []}
    redone: dict[str, list[float]] = {"cordee": [], "torchrun": []}
    stuck = {"cordee": 0, "torchrun": 0}  # attempts that took no step within the time
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as name:
        folder = Path(name)
        for number in range(rounds):
            for contestant, attempt in (("cordee", _recover_cordee), ("torchrun", _recover_torchrun)):
                seconds, steps = _with_patience(attempt, folder / f"{contestant}-{number}", stuck, contestant)
                raw[contestant].append(seconds)
                redone[contestant].append(float(steps))
            figures = ", ".join(f"{contestant} {seconds[-1]:.2f} s" for contestant, seconds in raw.items())
            say(f"round {number + 1} of {rounds}: {figures}")
    median = {contestant: statistics.median(seconds) for contestant, seconds in raw.items()}
    rows = [
        {
            "contestant": contestant,
            "seconds_to_the_next_step": seconds,
            "worst": max(raw[contestant]),
            "steps_taken_again": max(redone[contestant]),
            "never_recovered": stuck[contestant],
            "times_as_long": seconds / median["cordee"],
        }
        for contestant, seconds in median.items()
    ]
    settings = {"workers": 2, "rounds": rounds, "redone": redone, "checkpoint_every_steps": 10}
    return Report("recovery", describe_machine(), settings, raw, "s", rows)


def _with_patience(
    attempt: Callable[[Path], tuple[float, int]], folder: Path, stuck: dict[str, int], contestant: str
) -> tuple[float, int]:
    for number in range(MOST_TRIES):
        here = folder / str(number)
        here.mkdir(parents=True)
        try:
            return attempt(here)
        except CordeeError:
            stuck[contestant] += 1
    raise CordeeError(f"{contestant} did not recover in {MOST_TRIES} attempts of {TIMEOUT_S:g} s")


def _recover_cordee(folder: Path) -> tuple[float, int]:
    (folder / "job.toml").write_text(JOB)
    files = [str(folder / "job.toml"), "--run-dir", str(folder / "run")]
    command = [sys.executable, "-m", "cordee", "train", *files, "-q"]
    events = folder / "run" / "events.jsonl"

    def pids() -> list[int]:
        return [event["pid"] for event in read_lines(events) if event.get("type") == "worker_started"]

    def steps() -> list[tuple[float, int]]:
        return [(event["time"], event["step"]) for event in read_lines(events) if event.get("type") == "step"]

    return _attempt(command, pids, steps)


def _recover_torchrun(folder: Path) -> tuple[float, int]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=100"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]

    def pids() -> list[int]:
        return [
            event["pid"] for rank in (0, 1) for event in read_lines(folder / f"events-{rank}.jsonl") if "pid" in event
        ]

    def steps() -> list[tuple[float, int]]:
        return [(event["time"], event["step"]) for event in read_lines(folder / "events-0.jsonl") if "step" in event]

    return _attempt([*command, str(script), str(folder)], pids, steps)


def _attempt(
    command: list[str], pids: Callable[[], list[int]], steps: Callable[[], list[tuple[float, int]]]
) -> tuple[float, int]:
    """Return the seconds from a kill to the first step after the pause that it makes, and how many were taken again."""
    with running(command) as process:
        wait_for(lambda: len(steps()) >= WARM_STEPS, process)
        killed_s = time.time()
        os.kill(pids()[1], signal.SIGKILL)
        last_s, next_step, next_s = await_gap(steps, killed_s, process)
        reached = max(step for at_s, step in steps() if at_s <= last_s)
        return next_s - killed_s, max(0, reached + 1 - next_step)


def await_gap(
    steps: Callable[[], list[tuple[float, int]]],
    killed_s: float,
    process: subprocess.Popen[bytes],
    timeout_s: float = TIMEOUT_S,
) -> tuple[float, int, float]:
    """Return when the last step before the gap was taken, and the number and time of the first after it."""

    def found() -> tuple[float, int, float] | None:
        known = steps()
        before = [entry for entry in known if entry[0] <= killed_s]
        after = [entry for entry in known if entry[0] > killed_s]
        if len(after) < 5:
            return None
        # The longest pause since the kill is the recovery.
        moments = [before[-1], *after]
        pauses = [(later[0] - earlier[0], at) for at, (earlier, later) in enumerate(itertools.pairwise(moments))]
        _, at = max(pauses)
        return moments[at][0], moments[at + 1][1], moments[at + 1][0]

    wait_for(lambda: found() is not None, process, timeout_s)
    result = found()
    assert result is not None
    return result


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise CordeeError(f"{process.args!r} did not get on (exit code {process.returncode})")
        time.sleep(0.05)


@contextlib.contextmanager
def running(command: list[str], log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, `command` runs; what it prints goes to `log`. It ends with what it has started."""
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in [*family, process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=10)
