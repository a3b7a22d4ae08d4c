"""Two workers on one host: `data_parallel` against DDP on gloo, Accelerate and Lightning, and FSDP2 on both backends.

One kernel thread per process for everybody; samples per second of both processes together. `independent` is two
processes that train alone at the same time: what two workers would reach if agreeing cost nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from cordee.bench.contest import Contestant, Loop
from cordee.bench.loops import accelerate_loop, cordee_loop, ddp_loop, fsdp_loop, lightning_loop
from cordee.bench.materials import image_data
from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians
from cordee.core.settings import Data

BATCH_SIZE = 32  # per worker
NUM_WORKERS = 2


class _Goal(NamedTuple):
    ours: str
    peer: str
    least: float


class _Heat(NamedTuple):
    """Contestants that are measured in turn, all on one model."""

    model: str
    num_steps: int  # per round: one to three seconds
    data: Data
    loops: Mapping[str, Loop]
    goals: tuple[_Goal, ...]


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    heats = _heats(say)
    for heat in heats:
        say(f"{heat.model}: {', '.join(heat.loops)}; {heat.num_steps} steps of {BATCH_SIZE} per worker and round")
        with contextlib.ExitStack() as stack:
            running = {name: stack.enter_context(contextlib.closing(_start(heat, name))) for name in heat.loops}
            figures = interleave(running, rounds, say)
        raw |= {f"{heat.model}, {name}": values for name, values in figures.items()}
        rows += _rows(heat, figures)
    settings = {
        "workers": NUM_WORKERS,
        "batch_size_per_worker": BATCH_SIZE,
        "threads_per_worker": 1,
        "rounds": rounds,
        "steps_per_round": {heat.model: heat.num_steps for heat in heats},
        "data": {heat.model: heat.data.use for heat in heats},
    }
    return Report("data_parallel", describe_machine(), settings, raw, "samples/s", rows)


def _heats(say: Callable[[str], None]) -> list[_Heat]:
    images = image_data()
    cifar_like = Data("synthetic", args={"shape": [3, 32, 32], "num_classes": 10, "size": 10_000, "test_size": 0})
    lenet: dict[str, Any] = {"model": "lenet", "data": images, "batch_size": BATCH_SIZE}
    resnet: dict[str, Any] = {"model": "resnet18", "data": cifar_like, "batch_size": BATCH_SIZE}
    mlp: dict[str, Any] = {"model": "mlp", "data": images, "batch_size": BATCH_SIZE}
    loops: dict[str, Loop] = {
        "cordee": partial(cordee_loop, **lenet),
        "ddp on gloo": partial(ddp_loop, **lenet),
        "ddp on gloo, tuned": partial(ddp_loop, **lenet, tuned=True),
    }
    for name, loop in (("accelerate", accelerate_loop), ("lightning", lightning_loop)):
        if importlib.util.find_spec(name):
            loops[name] = partial(loop, **lenet)
        else:
            say(f"not installed, so left out: {name} (pip install 'cordee[bench]')")
    alone: Loop = partial(cordee_loop, **resnet)
    return [
        _Heat("lenet", 300, images, loops, tuple(_Goal("cordee", name, 1.4) for name in loops if name != "cordee")),
        _Heat(
            "resnet18",
            2,
            cifar_like,
            {"cordee": alone, "ddp on gloo": partial(ddp_loop, **resnet), "independent": alone, "one worker": alone},
            (_Goal("cordee", "ddp on gloo", 1.05), _Goal("cordee", "independent", 0.9)),
        ),
        _Heat(
            "lenet, fsdp2",
            40,
            images,
            {name: partial(fsdp_loop, **lenet, backend=name) for name in ("cordee", "gloo")},
            (_Goal("cordee", "gloo", 1.0),),
        ),
        _Heat(
            "mlp of 40 M, fsdp2",
            3,
            images,
            {name: partial(fsdp_loop, **mlp, backend=name) for name in ("cordee", "gloo")},
            (_Goal("cordee", "gloo", 1.5),),
        ),
    ]


class _Several:
    """Contestants of one process each that run at the same time, without knowing of each other."""

    def __init__(self, members: list[Contestant]) -> None:
        self._members = members

    def __call__(self) -> float:
        for member in self._members:
            member.begin()
        return sum(member.end() for member in self._members)

    def close(self) -> None:
        for member in self._members:
            member.close()


def _start(heat: _Heat, name: str) -> Contestant | _Several:
    loop, steps = heat.loops[name], heat.num_steps
    if name == "independent":
        return _Several([Contestant(loop, size=1, num_steps=steps, batch_size=BATCH_SIZE) for _ in range(NUM_WORKERS)])
    size = 1 if name == "one worker" else NUM_WORKERS
    return Contestant(loop, size=size, num_steps=steps, batch_size=BATCH_SIZE)


def _rows(heat: _Heat, figures: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    middle, goals = medians(figures), {goal.peer: goal for goal in heat.goals}
    rows = []
    for name in figures:
        ratio = median_ratio(figures["cordee"], figures[name])
        goal = goals.get(name)
        rows.append(
            {
                "model": heat.model,
                "contestant": name,
                "samples_per_second": middle[name],
                "cordee_is_times": ratio,
                "goal": goal.least if goal else None,
                "outcome": "" if goal is None else "reached" if ratio >= goal.least else "MISSED",
            }
        )
    return rows
