"""A round of simulated clients beside the pure work of its clients, and the memory of few and of many clients.

100 clients, all taking part, LeNet on made-up images of 28 × 28, 600 samples each, one local epoch with batches of 32,
two workers of one thread. The pure work is a hand-written loop over the same clients in one process: no server, no
sums. Two workers on two cores could be twice as fast at best, so that `over_half_of_pure` is 1 for no overhead at all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cordee.bench.harness import Report, describe_machine, goal_outcome, median_ratio, medians
from cordee.cluster import Team
from cordee.core import Job
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.training.components import assemble

ROUNDS = 3
NUM_CLIENTS, SAMPLES_OF_CLIENT, BATCH_SIZE, WORKERS = 100, 600, 32, 2
FEW, MANY = 100, 10_000  # clients whose memory is compared
GOAL_OVERHEAD, GOAL_MEMORY = 1.15, 1.1


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {"pure work": [], "cordee": []}
    for index in range(rounds):
        raw["pure work"].append(_pure_work_s())
        raw["cordee"].append(_round_s())
        say(f"round {index + 1} of {rounds}: {raw['pure work'][-1]:.2f} s alone, {raw['cordee'][-1]:.2f} s on workers")
    middle = medians(raw)
    ratio = median_ratio(raw["cordee"], raw["pure work"]) * WORKERS
    memory = {f"memory of {count} clients, MB": [_peak_memory_mb(count)] for count in (FEW, MANY)}
    few, many = (figures[0] for figures in memory.values())
    rows: list[dict[str, Any]] = [
        {
            "what": "a round",
            "cordee": middle["cordee"],
            "beside": middle["pure work"] / WORKERS,
            "ratio": ratio,
            "goal": f"at most {GOAL_OVERHEAD}",
            "outcome": goal_outcome(ratio <= GOAL_OVERHEAD),
        },
        {
            "what": f"memory of a worker, {MANY} and {FEW} clients, MB",
            "cordee": many,
            "beside": few,
            "ratio": many / few,
            "goal": f"at most {GOAL_MEMORY}",
            "outcome": goal_outcome(many <= GOAL_MEMORY * few),
        },
    ]
    settings = {"clients": NUM_CLIENTS, "batch_size": BATCH_SIZE, "workers": WORKERS, "rounds": rounds}
    return Report("federated", describe_machine(), settings, {**raw, **memory}, "s", rows)


def _job(num_clients: int, **strategy: Any) -> Job:
    num_samples = NUM_CLIENTS * SAMPLES_OF_CLIENT
    data = {"use": "synthetic", "shape": [1, 28, 28], "size": num_samples, "test_size": 16, "num_classes": 10}
    return Job.from_dict(
        {
            "model": {"use": "lenet"},
            "data": data,
            "optimizer": {"use": "sgd", "lr": 0.01},
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
    order = torch.randperm(NUM_CLIENTS * SAMPLES_OF_CLIENT, generator=torch.Generator().manual_seed(0))
    began_s = 0.0
    for client, samples in enumerate(torch.split(order, SAMPLES_OF_CLIENT)):
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
    """Return how long the second round of a run takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(_job(NUM_CLIENTS, rounds=2), run_dir=Path(folder) / "run", quiet=True)
        events = [event for event in read_events(run.directory / "events.jsonl") if event["type"] == "round"]
    return float(events[1]["seconds"])


def _peak_memory_mb(num_clients: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = _job(num_clients, rounds=1, local_steps=1)
        run = train(job, run_dir=Path(folder) / "run", quiet=True)
        return (run.summary.peak_memory_bytes or 0) / 1e6
