"""A round of simulated clients beside the pure work of its clients, Flower and pfl, and the memory of many clients.

100 clients, all taking part, LeNet on Fashion-MNIST (made-up images of its shape without the files), 600 samples each,
one local epoch with batches of 32, two workers of one thread. The pure work is a hand-written loop over the same
clients in one process: no server, no sums. Two workers on two cores could be twice as fast at best, so a ratio of 1 to
half of it is no overhead at all. Flower (with its simulation on Ray) and pfl (two processes under torchrun) train the
same model on the same samples (`federated_peers.py`), each with the Python of an environment of its own:
`make bench-federated` makes both. A peer whose environment is missing is not measured. Of each contestant the second
round of a run counts, so that no start is measured. Ours has a third one, because the last round of a run is evaluated
and saved whatever the job says, and no peer does that.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cordee.bench import federated_peers
from cordee.bench.harness import Report, describe_machine, goal_outcome, interleave, measure_cases, median_ratio
from cordee.bench.loops import build, image_data, train_tensors
from cordee.cluster import Team
from cordee.core import Job, env
from cordee.core.errors import CordeeError
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.training.components import assemble

ROUNDS = 3
NUM_CLIENTS, BATCH_SIZE, WORKERS = 100, federated_peers.BATCH_SIZE, federated_peers.WORKERS
FEW, MANY = 100, 10_000  # clients whose memory is compared
GOAL_OVERHEAD, GOAL_MEMORY = 1.15, 1.1
PEERS = {"flower": Path(".venv-flower/bin/python"), "pfl": Path(".venv-pfl/bin/python")}
GOALS = {"flower": 10.0, "pfl": 1.0}  # times that a round of ours is faster
PEER_TIMEOUT_S = 240.0
Raw = dict[str, list[float]]


def measure(
    *, rounds: int, say: Callable[[str], None], cases: Sequence[str] = (), earlier: Report | None = None
) -> Report:
    """Measure the cases `round` and `memory`."""
    measures: dict[str, Callable[[], Raw]] = {"round": partial(_rounds, rounds, say), "memory": _memory}
    raw, dates = measure_cases(measures, cases, earlier, say)
    settings = {"clients": NUM_CLIENTS, "batch_size": BATCH_SIZE, "workers": WORKERS, "measured": dates}
    return Report("federated", describe_machine(), settings, raw, "s, MB", list(_rows(raw)))


def _rows(raw: Mapping[str, list[float]]) -> Iterable[dict[str, Any]]:
    ours = raw.get("round: cordee")
    if ours:
        ratio = median_ratio(ours, raw["round: pure work"]) * WORKERS
        yield _row("a round beside half of the pure work, s", ours, raw["round: pure work"], ratio, GOAL_OVERHEAD)
        for name, goal in GOALS.items():
            if theirs := raw.get(f"round: {name}"):
                yield _row(f"a round of {name}, s", ours, theirs, median_ratio(theirs, ours), -goal)
    if f"memory: {MANY}" in raw:
        many, few = raw[f"memory: {MANY}"], raw[f"memory: {FEW}"]
        yield _row(f"memory of {MANY} beside {FEW} clients, MB", many, few, many[0] / few[0], GOAL_MEMORY)


def _row(what: str, ours: list[float], beside: list[float], ratio: float, goal: float) -> dict[str, Any]:
    """A goal below 0 is one to reach, one above 0 is not to be passed."""
    is_reached = ratio >= -goal if goal < 0 else ratio <= goal
    return {
        "what": what,
        "cordee": float(torch.tensor(ours).median()),
        "beside": float(torch.tensor(beside).median()),
        "ratio": ratio,
        "goal": f"{'at least' if goal < 0 else 'at most'} {abs(goal):g}",
        "outcome": goal_outcome(is_reached),
    }


def _rounds(rounds: int, say: Callable[[str], None]) -> Raw:
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        contestants: dict[str, Callable[[], float]] = {"cordee": _round_s, "pure work": _pure_work_s}
        for name, python in PEERS.items():
            if python.exists():
                contestants[name] = partial(_peer_s, name, python.absolute(), folder)
            else:
                say(f"{name} is not measured: there is no {python} (make bench-federated)")
        inputs, targets = train_tensors(image_data())
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        model = build("lenet").state_dict()
        torch.save({"inputs": inputs, "targets": targets, "order": order, "model": model}, Path(folder) / "data.pt")
        del inputs, targets
        return interleave(contestants, rounds, say, warm_up=False)


def _peer_s(name: str, python: Path, folder: str) -> float:
    """Return how long the second round of a peer takes."""
    start = [str(python)]
    if name == "pfl":
        start = [str(python.with_name("torchrun")), "--nproc-per-node", str(WORKERS)]
    command = [*start, federated_peers.__file__, name, folder, str(NUM_CLIENTS)]
    # Ray makes its workers nice unless told not to, which would be unfair on a machine that is not quiet.
    settings = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "PFL_PYTORCH_DEVICE": "cpu"}
    with contextlib.ExitStack() as stack:
        for key, value in settings.items():
            stack.enter_context(env.with_default(key, value))
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise CordeeError(f"{name} did not end within {PEER_TIMEOUT_S:g} s") from None
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"seconds"')]
    if ended.returncode or len(lines) != 1:
        raise CordeeError(f"{name} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return float(json.loads(lines[0])["seconds"])


def _memory() -> Raw:
    return {str(count): [_peak_memory_mb(count)] for count in (FEW, MANY)}


def _job(num_clients: int, **strategy: Any) -> Job:
    return Job.from_dict(
        {
            "model": {"use": "lenet"},
            "data": image_data(),
            "optimizer": {"use": "sgd", "lr": federated_peers.LEARNING_RATE},
            "training": {"batch_size": BATCH_SIZE, "threads": 1},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
            "strategy": {
                "name": "federated", "workers": WORKERS, "partition": {"clients": num_clients}, **strategy,
            },
        }
    )  # fmt: skip


def _pure_work_s() -> float:
    """Return how long one process takes to train all clients of a round, one after the other."""
    components = assemble(_job(NUM_CLIENTS), Team(threads=1))
    model, source = components.model, components.splits.train
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = components.recipe.make(model.named_parameters())
    assert source.num_samples is not None
    order = torch.randperm(source.num_samples, generator=torch.Generator().manual_seed(0))
    began_s = 0.0
    for client, samples in enumerate(order.tensor_split(NUM_CLIENTS)):
        if client == 1:  # the first one is slower
            began_s = time.perf_counter()
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), start, strict=True):
                parameter.copy_(first)
        for indices in torch.split(samples, BATCH_SIZE):
            batch = source.gather(indices)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return (time.perf_counter() - began_s) * NUM_CLIENTS / (NUM_CLIENTS - 1)


def _round_s() -> float:
    """Return how long the second of three rounds takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(_job(NUM_CLIENTS, rounds=3), run_dir=Path(folder) / "run", quiet=True)
        events = [event for event in read_events(run.directory / "events.jsonl") if event["type"] == "round"]
    return float(events[1]["seconds"])


def _peak_memory_mb(num_clients: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = _job(num_clients, rounds=1, local_steps=1)
        run = train(job, run_dir=Path(folder) / "run", quiet=True)
        return (run.summary.peak_memory_bytes or 0) / 1e6
