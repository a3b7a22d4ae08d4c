"""What a round between sites costs beside training: ten clients on loopback, a model of 100 KB, plain and secure.

Each client takes one step with one sample, so a round is nearly all overhead: asking, sending, writing and syncing the
results, summing, the checkpoint. The time is that of the server, from asking to the saved round.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cordee.bench.harness import Report, describe_machine, goal_outcome
from cordee.core.errors import CommunicationError, CordeeError
from cordee.monitoring import read_events
from cordee.runs.federation.invitations import invite

ROUNDS = 30
NUM_CLIENTS = 10
START_S = 300.0  # that all processes have to start
GOALS_S = {"plain": 0.050, "secure": 0.200}
_SETTINGS = {"plain": "", "secure": "secure = true"}
_JOB = """
seed = 0
[model]
use = "mlp"
hidden = [340]
[data]
use = "synthetic"
shape = [64]
num_classes = 10
size = 64
test_size = 16
[optimizer]
use = "sgd"
lr = 0.01
[training]
batch_size = 1
threads = 1
[strategy]
name = "federated"
rounds = {rounds}
local_steps = 1
weights = "equal"
{settings}
[evaluation]
every_epochs = 0
[cluster]
failure_timeout = "60s"
"""


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for name, settings in _SETTINGS.items():
        say(f"{name}: {NUM_CLIENTS} client processes, {rounds} rounds")
        raw[name] = _run(settings, rounds)
        median_s = statistics.median(raw[name])
        rows.append(
            {
                "rounds": name,
                "round_ms": 1000 * median_s,
                "slowest_ms": 1000 * max(raw[name]),
                "goal_ms": 1000 * GOALS_S[name],
                "goal": goal_outcome(median_s <= GOALS_S[name]),
            }
        )
    return Report("federation", describe_machine(), {"clients": NUM_CLIENTS, "rounds": rounds}, raw, "s", rows)


def _run(settings: str, rounds: int) -> list[float]:
    """Return the seconds of each round but the first, in which clients load what they need."""
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as name:
        folder = Path(name)
        job, run_dir = folder / "job.toml", folder / "run"
        job.write_text(_JOB.format(rounds=rounds + 1, settings=settings))
        serve = ["serve", str(job), "--listen", "127.0.0.1", "--clients", str(NUM_CLIENTS), "--run-dir", str(run_dir)]
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(_started([*serve, "--quiet"]))
            deadline_s = time.monotonic() + START_S
            invitations = [_invite(run_dir, number, server, deadline_s) for number in range(NUM_CLIENTS)]
            for number, token in enumerate(invitations):
                place = ["--folder", str(folder / str(number))]
                stack.enter_context(_started(["join", token[0], "--token", token[1], *place]))
            server.wait(timeout=START_S)
        events = [event for event in read_events(run_dir / "events.jsonl") if event["type"] == "round"]
        if len(events) != rounds + 1 or any(event["num_took_part"] != NUM_CLIENTS for event in events):
            raise CommunicationError(f"{len(events)} of {rounds + 1} rounds were made, or not by all clients")
        return [float(event["seconds"]) for event in events[1:]]


def _invite(run_dir: Path, number: int, server: subprocess.Popen[bytes], deadline_s: float) -> tuple[str, str]:
    while True:
        try:
            invitation = invite(run_dir, f"site-{number}")
            return invitation.address, invitation.to_text()
        except CordeeError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


@contextlib.contextmanager
def _started(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, a process of `cordee federation` runs; it has ended afterwards."""
    command = [sys.executable, "-m", "cordee", "federation", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
            process.wait(timeout=20)
        finally:
            if process.poll() is None:
                process.kill()
