"""Two workers on one host: `data_parallel` against DDP on gloo, Accelerate and Lightning, and FSDP2 on both backends.

One kernel thread per process for everybody; samples per second of both processes together. `independent` is two
processes that train alone at the same time: what two workers would reach if agreeing cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from cordee.bench.harness import (
    Contestant,
    Loop,
    Report,
    compare_speeds,
    compete,
    describe_machine,
    goal_outcome,
    run_apart,
)
from cordee.bench.loops import cordee_loop, fsdp_loop, image_data, installed_peers, synthetic_images, torch_loop
from cordee.core.settings import Data

BATCH_SIZE = 32  # per worker
NUM_WORKERS = 2
ONE_WORKER = "one worker"


class _Case(NamedTuple):
    """Contestants that are measured in turn, all on one model."""

    model: str
    num_steps: int  # per round: one to three seconds
    data: Data
    loops: Mapping[str, Loop]
    goals: Mapping[str, float]  # peer -> how many times as fast `cordee` should be


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    cases = _cases(say)
    for case in cases:
        say(f"{case.model}: {', '.join(case.loops)}; {case.num_steps} steps of {BATCH_SIZE} per worker and round")
        contestants = {
            name: Contestant(loop, 1 if name == ONE_WORKER else NUM_WORKERS, case.num_steps, BATCH_SIZE)
            for name, loop in case.loops.items()
        }
        figures, _ = compete(contestants, rounds, say)
        raw |= {f"{case.model}, {name}": values for name, values in figures.items()}
        for row in compare_speeds(figures):
            goal = case.goals.get(row["contestant"])
            outcome = "" if goal is None else goal_outcome(row["cordee_is_times"] >= goal)
            rows.append({"model": case.model, **row, "goal": goal, "outcome": outcome})
    settings = {
        "workers": NUM_WORKERS,
        "batch_size_per_worker": BATCH_SIZE,
        "threads_per_worker": 1,
        "rounds": rounds,
        "steps_per_round": {case.model: case.num_steps for case in cases},
        "data": {case.model: case.data.use for case in cases},
    }
    return Report("data_parallel", describe_machine(), settings, raw, "samples/s", rows)


def _cases(say: Callable[[str], None]) -> list[_Case]:
    images, cifar_like = image_data(), synthetic_images(3, 32, size=10_000, test_size=0)
    lenet: dict[str, Any] = {"model": "lenet", "data": images, "batch_size": BATCH_SIZE}
    mlp: dict[str, Any] = {**lenet, "model": "mlp of 40 M"}
    resnet: dict[str, Any] = {"model": "resnet18", "data": cifar_like, "batch_size": BATCH_SIZE}
    peers: dict[str, Loop] = {
        "ddp on gloo": partial(torch_loop, **lenet),
        "ddp on gloo, tuned": partial(torch_loop, **lenet, tuned=True),
        **{name: partial(loop, **lenet) for name, loop in installed_peers(say).items()},
    }
    ours: Loop = partial(cordee_loop, **resnet)
    resnets: dict[str, Loop] = {
        "cordee": ours,
        "ddp on gloo": partial(torch_loop, **resnet),
        "independent": partial(run_apart, loop=ours),
        ONE_WORKER: ours,
    }
    sharded: dict[str, dict[str, Loop]] = {
        model["model"]: {name: partial(fsdp_loop, **model, backend=name) for name in ("cordee", "gloo")}
        for model in (lenet, mlp)
    }
    return [
        _Case("lenet", 300, images, {"cordee": partial(cordee_loop, **lenet), **peers}, dict.fromkeys(peers, 1.4)),
        _Case("resnet18", 2, cifar_like, resnets, {"ddp on gloo": 1.05, "independent": 0.9}),
        _Case("lenet, fsdp2", 40, images, sharded["lenet"], {"gloo": 1.0}),
        _Case("mlp of 40 M, fsdp2", 3, images, sharded["mlp of 40 M"], {"gloo": 1.5}),
    ]
