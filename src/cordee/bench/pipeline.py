"""Two stages on one host: `pipeline` against torch.distributed.pipelining on gloo, written by hand, with the same cut.

One kernel thread per process for everybody; samples per second. The share of their time in which stages idle is what is
left when their forward and backward passes are taken off: waiting for each other, messages, the optimizer, the loop. In
theory, with equal stages and free messages, it is (stages - 1) / (micro-batches + stages - 1). `one worker` computes
the same micro-batches one after the other; `two alone` are two such workers at the same time, each with a model of its
own, which is what these cores do when both are busy all the time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from cordee.bench.harness import (
    Clock,
    Contestant,
    Loop,
    Place,
    Report,
    compare_speeds,
    compete,
    describe_machine,
    goal_outcome,
    run_apart,
)
from cordee.bench.loops import (
    LEARNING_RATE,
    endless_job,
    own_batches,
    synthetic_images,
    train_for_ever,
    train_tensors,
)
from cordee.communication.shared_memory import register
from cordee.compute import Computation, make_loss
from cordee.core import Use
from cordee.core.settings import Data
from cordee.models import gpt, resnet
from cordee.models.cutting import Chain, cut_by_time, make_chain
from cordee.strategies.pipeline.stages import measure_blocks

NUM_STAGES = 2
NUM_MICROBATCHES = 8
LEAST_RATIO = 1.0
LARGEST_GAP = 0.10  # between the idle share and theory
_ALONE = ("one worker", "two alone")  # contestants whose processes have a whole model each
_SCHEDULES: Mapping[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class _Model(NamedTuple):
    use: dict[str, Any]
    build: Callable[[], nn.Module]
    data: Data
    batch_size: int


_GPT: dict[str, Any] = {"num_layers": 4, "num_heads": 4, "embedding_width": 128, "tie_embeddings": False}
MODELS: Mapping[str, _Model] = {
    "resnet20": _Model(
        {"use": "resnet", "depth": 20},
        lambda: resnet(input_shape=(3, 32, 32), num_classes=10, depth=20),
        synthetic_images(3, 32, size=2048, test_size=0),
        64,
    ),
    "gpt": _Model(
        {"use": "gpt", **_GPT},
        lambda: gpt(input_shape=(64,), num_classes=256, **_GPT),
        Data("synthetic", args={"kind": "tokens", "shape": [64], "num_classes": 256, "size": 1024, "test_size": 0}),
        32,
    ),
}


class _Case(NamedTuple):
    """What all contestants that are measured in turn do."""

    model: str
    schedule: str
    num_steps: int  # per round: one to three seconds
    counts: tuple[int, ...] = ()  # blocks of each stage

    @property
    def label(self) -> str:
        return f"{self.model}, {self.schedule}"


CASES = (_Case("resnet20", "1f1b", 5), _Case("gpt", "1f1b", 6), _Case("gpt", "gpipe", 6))


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    cuts = {model: measure_cut(model) for model in MODELS}
    for case in (case._replace(counts=tuple(cuts[case.model])) for case in CASES):
        say(f"{case.label}: {cuts[case.model]} blocks on the stages, {case.num_steps} steps a round")
        figures, busy_shares = compete(_contestants(case), rounds, say)
        idle = {name: [1 - share for share in busy] for name, busy in busy_shares.items() if name not in _ALONE}
        raw |= {f"{case.label}, {name}": values for name, values in figures.items()}
        raw |= {f"{case.label}, {name}, idle share": values for name, values in idle.items()}
        rows += _rows(case.label, figures, idle)
    settings = {
        "stages": NUM_STAGES,
        "microbatches": NUM_MICROBATCHES,
        "batch_size": {name: model.batch_size for name, model in MODELS.items()},
        "blocks_per_stage": cuts,
        "threads_per_worker": 1,
        "rounds": rounds,
        "steps_per_round": {case.label: case.num_steps for case in CASES},
    }
    return Report("pipeline", describe_machine(), settings, raw, "samples/s", rows)


def _contestants(case: _Case) -> dict[str, Contestant]:
    batch_size = MODELS[case.model].batch_size
    one: Loop = partial(run_apart, loop=partial(_train_whole, case=case))
    loops: dict[str, Loop] = {
        "cordee": partial(_train_stage, case=case),
        "torch on gloo": partial(_train_by_torch, case=case, backend="gloo"),
        "torch on cordee": partial(_train_by_torch, case=case, backend="cordee"),
    }
    # A contestant counts the samples of all its processes; those of a pipeline have one batch between them.
    split = {
        name: Contestant(loop, NUM_STAGES, case.num_steps, batch_size // NUM_STAGES) for name, loop in loops.items()
    }
    alone = {name: Contestant(one, size, case.num_steps, batch_size) for name, size in zip(_ALONE, (1, 2), strict=True)}
    return split | alone


def _rows(
    label: str, figures: Mapping[str, list[float]], idle_shares: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    theory = (NUM_STAGES - 1) / (NUM_MICROBATCHES + NUM_STAGES - 1)
    rows = []
    for row in compare_speeds(figures):
        name, outcome = row["contestant"], ""
        idle = statistics.median(idle_shares[name]) if name in idle_shares else None
        if name == "torch on gloo":
            outcome = goal_outcome(row["cordee_is_times"] >= LEAST_RATIO)
        elif name == "cordee":
            outcome = goal_outcome(idle is not None and idle - theory <= LARGEST_GAP)
        in_theory = None if name in _ALONE else theory
        rows.append({"model": label, **row, "idle_share": idle, "idle_in_theory": in_theory, "outcome": outcome})
    return rows


def measure_cut(name: str) -> list[int]:
    """Return how many blocks each stage gets, as the pipeline strategy would cut."""
    model, chain, inputs = _chain(name)
    model.train()
    computation = Computation(make_loss(Use("cross_entropy")), torch.device("cpu"), "fp32", True)
    microbatch = inputs[: MODELS[name].batch_size // NUM_MICROBATCHES]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the contestants have
    try:
        return cut_by_time(measure_blocks(chain, microbatch, computation), NUM_STAGES)
    finally:
        torch.set_num_threads(num_threads)


def placement_of(chain: Chain, counts: Sequence[int]) -> list[list[str]]:
    """Return the names of all modules of each stage, for `strategy.placement`."""
    ends = itertools.accumulate(counts)
    stages = [chain.blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return [[name for block in stage for name in block.names] for stage in stages]


def _train_stage(place: Place, clock: Clock, *, case: _Case) -> None:
    _time_passes(clock)
    model = MODELS[case.model]
    strategy = {
        "name": "pipeline",
        "schedule": case.schedule,
        "microbatches": NUM_MICROBATCHES,
        "placement": placement_of(_chain(case.model)[1], case.counts),
    }
    job = endless_job(model.use, model.data, model.batch_size, place.size, strategy=strategy)
    train_for_ever(job, place, clock)


def _train_whole(place: Place, clock: Clock, *, case: _Case) -> None:
    """A worker that computes the same micro-batches."""
    model = MODELS[case.model]
    job = endless_job(model.use, model.data, model.batch_size, 1, accumulate=NUM_MICROBATCHES)
    train_for_ever(job, place, clock)


def _train_by_torch(place: Place, clock: Clock, *, case: _Case, backend: str) -> None:
    """torch's pipelining as its manual says, with an optimizer that is fused as ours is."""
    _time_passes(clock)
    register()
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    _, chain, _ = _chain(case.model)
    start = sum(case.counts[: place.rank])
    blocks = chain.blocks[start : start + case.counts[place.rank]]
    module = nn.Sequential(*(module for block in blocks for module in block.modules))
    stage = PipelineStage(module, place.rank, place.size, torch.device("cpu"))
    schedule = _SCHEDULES[case.schedule](stage, NUM_MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)
    model = MODELS[case.model]
    for inputs, targets in own_batches(Place(0, 1, ""), *train_tensors(model.data), model.batch_size):
        clock.tick()
        optimizer.zero_grad()
        if place.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()


def _time_passes(clock: Clock) -> None:
    """Have this process's stages add the time of each forward and backward pass to the clock's."""

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                clock.busy_s += time.perf_counter() - started

        return call

    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(PipelineStage, name, timed(getattr(PipelineStage, name)))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _chain(name: str) -> tuple[nn.Module, Chain, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name].build()
    inputs, _ = train_tensors(MODELS[name].data)
    return model, make_chain(model, inputs[:2]), inputs
