"""What the choice of kernels brings: `auto` beside plain PyTorch, Accelerate, Lightning, and every way by itself.

Batches of 32 for each worker, one kernel thread for each process, Adam. `auto` is what a job gets that says nothing,
`auto, bf16 allowed` what it gets with `training.precision = "auto"`: measured in its own process before the first
step, with an empty cache. The ways by themselves are jobs that fix the memory format and the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cordee.bench.harness import (
    Clock,
    Contestant,
    Loop,
    Place,
    Report,
    compete,
    describe_machine,
    goal_outcome,
    measure_cases,
    median_ratio,
    medians,
)
from cordee.bench.loops import (
    LEARNING_RATE,
    MODELS,
    build,
    endless_job,
    image_data,
    installed_peers,
    own_batches,
    synthetic_images,
    torch_loop,
    train_for_ever,
    train_tensors,
)
from cordee.cluster import Team
from cordee.core import env
from cordee.core.settings import Data
from cordee.planner.kernels import choose_kernels
from cordee.training.components import assemble

BATCH_SIZE = 32  # per worker
ROUNDS = 5
AUTO, AUTO_BF16, PLAIN = "auto", "auto, bf16 allowed", "plain pytorch"
BY_HAND = "pytorch, channels-last by hand"  # of the model and of each batch, as torch's tutorial has it
NEAR_BEST = 0.97  # of the fastest way by itself
# Steps of a round, workers, and how many times as fast as plain PyTorch and the peers `auto` should be, without and
# with bf16 allowed.
CASES: dict[str, tuple[str, int, int, float | None, float | None]] = {
    "resnet20": ("resnet20", 12, 1, 1.25, 1.9),
    "resnet18": ("resnet18", 2, 1, 1.1, 1.9),
    "lenet": ("lenet", 200, 1, 1.0, None),
    "mlp": ("mlp of 4 M", 30, 1, 1.0, None),
    "resnet20-two": ("resnet20", 12, 2, 1.25, 1.9),
}
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"memory_format": "contiguous"},
    "channels-last": {"memory_format": "channels_last"},
    "bf16": {"memory_format": "contiguous", "precision": "bf16"},
    "channels-last, bf16": {"memory_format": "channels_last", "precision": "bf16"},
}


def measure(
    *, rounds: int, say: Callable[[str], None], cases: Sequence[str] = (), earlier: Report | None = None
) -> Report:
    measures = {case: partial(_measure, case, rounds, say) for case in CASES}
    raw, dates = measure_cases(measures, cases, earlier, say)
    settings = {"batch_size_per_worker": BATCH_SIZE, "threads_per_worker": 1, "rounds": rounds, "measured": dates}
    return Report("kernels", describe_machine(), settings, raw, "samples/s", list(_rows(raw)))


def _measure(case: str, rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    model, num_steps, size, _, _ = CASES[case]
    is_image = model.startswith("resnet")
    data = synthetic_images(3, 32, size=10_000, test_size=0) if is_image else image_data()
    work: dict[str, Any] = {"model": model, "data": data, "batch_size": BATCH_SIZE}
    loops: dict[str, Loop] = {
        PLAIN: partial(torch_loop, **work),
        **{name: partial(loop, **work) for name, loop in installed_peers(say).items()},
        BY_HAND: partial(_by_hand, **work),
        AUTO: partial(_cordee, model=model, data=data, training={}),
        AUTO_BF16: partial(_cordee, model=model, data=data, training={"precision": "auto"}),
    }
    ways = WAYS if is_image or model == "lenet" else {name: way for name, way in WAYS.items() if "last" not in name}
    if size == 1:
        loops |= {name: partial(_cordee, model=model, data=data, training=way) for name, way in ways.items()}
    return compete({name: Contestant(loop, size, num_steps, BATCH_SIZE) for name, loop in loops.items()}, rounds, say)[
        0
    ]


def _by_hand(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    network: nn.Module = build(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if place.size > 1:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        network = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for x, y in own_batches(place, *train_tensors(data), batch_size):
        clock.tick()
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x.to(memory_format=torch.channels_last)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _cordee(place: Place, clock: Clock, *, model: str, data: Data, training: dict[str, Any]) -> None:
    """Train with the kernels that the launcher would choose; the other workers take those of the first."""
    env.adopt({"CORDEE_CACHE": str(Path(place.folder) / f"cache-{place.rank}")})
    job = endless_job(MODELS[model], data, BATCH_SIZE * place.size, place.size, **training)
    chosen = Path(place.folder) / "training.json"
    if job.training.automatic and place.rank == 0:
        parts = assemble(job, Team(num_workers=place.size, num_local_workers=place.size))
        choice = choose_kernels(job.training, parts).training
        waiting = chosen.with_suffix(".part")
        waiting.write_bytes(msgspec.json.encode(choice))
        waiting.rename(chosen)
    if job.training.automatic:
        clock.wait_for(chosen)
        job = msgspec.structs.replace(job, training=msgspec.json.decode(chosen.read_bytes(), type=type(job.training)))
    train_for_ever(job, place, clock)


def _rows(raw: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    for case, (_, _, _, goal, goal_bf16) in CASES.items():
        figures = {name.partition(": ")[2]: values for name, values in raw.items() if name.startswith(f"{case}: ")}
        if not figures:
            continue
        speeds = medians(figures)
        best = max((name for name in WAYS if name in speeds and "bf16" not in name), key=speeds.__getitem__, default="")
        best_bf16 = max((name for name in WAYS if name in speeds), key=speeds.__getitem__, default="")
        for name in figures:
            times, times_bf16 = (median_ratio(figures[own], figures[name]) for own in (AUTO, AUTO_BF16))
            least = NEAR_BEST if name == best else goal if name in (PLAIN, "accelerate", "lightning") else None
            least_bf16 = NEAR_BEST if name == best_bf16 else goal_bf16 if name == PLAIN else None
            yield {
                "case": case,
                "contestant": name,
                "samples_per_second": speeds[name],
                "auto_is_times": times,
                "goal": least,
                "outcome": "" if least is None else goal_outcome(times >= least),
                "auto_with_bf16_is_times": times_bf16,
                "goal_with_bf16": least_bf16,
                "outcome_with_bf16": "" if least_bf16 is None else goal_outcome(times_bf16 >= least_bf16),
            }
