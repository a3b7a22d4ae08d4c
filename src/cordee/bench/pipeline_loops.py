"""How Cordée and torch alone train in two stages: the loops that the benchmark's processes run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from cordee.bench.contest import Clock, Place
from cordee.bench.loops import LEARNING_RATE, train_for_ever
from cordee.bench.materials import train_tensors
from cordee.communication.shared_memory import register
from cordee.compute import Computation, make_loss
from cordee.core import Job, Use
from cordee.core.settings import Data
from cordee.models import gpt, resnet
from cordee.models.cutting import Chain, cut_by_time, make_chain
from cordee.strategies.pipeline.schedules import measure_blocks

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
        Data("synthetic", args={"shape": [3, 32, 32], "num_classes": 10, "size": 2048, "test_size": 0}),
        64,
    ),
    "gpt": _Model(
        {"use": "gpt", **_GPT},
        lambda: gpt(input_shape=(64,), num_classes=256, **_GPT),
        Data("synthetic", args={"kind": "tokens", "shape": [64], "num_classes": 256, "size": 1024, "test_size": 0}),
        32,
    ),
}


class Work(NamedTuple):
    """What all contestants of a heat do."""

    model: str
    schedule: str
    num_microbatches: int
    counts: tuple[int, ...]  # blocks of each stage


def measure_cut(name: str, num_stages: int, num_microbatches: int) -> list[int]:
    """Return how many blocks each stage gets, as the pipeline strategy would cut."""
    model, chain, inputs = _chain(name)
    model.train()
    computation = Computation(make_loss(Use("cross_entropy")), torch.device("cpu"), "fp32", True)
    microbatch = inputs[: MODELS[name].batch_size // num_microbatches]
    return cut_by_time(measure_blocks(chain, microbatch, computation), num_stages)


def placement_of(chain: Chain, counts: Sequence[int]) -> list[list[str]]:
    """Return the names of all modules of each stage, for `strategy.placement`."""
    ends = itertools.accumulate(counts)
    stages = [chain.blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return [[name for block in stage for name in block.names] for stage in stages]


def cordee_loop(place: Place, clock: Clock, *, work: Work) -> None:
    _time_passes(clock)
    strategy = {
        "name": "pipeline",
        "workers": place.size,
        "schedule": work.schedule,
        "microbatches": work.num_microbatches,
        "placement": placement_of(_chain(work.model)[1], work.counts),
    }
    train_for_ever(_job(work, strategy, accumulate=1), place, clock)


def alone_loop(place: Place, clock: Clock, *, work: Work) -> None:
    """A worker that computes the same micro-batches, whoever else does so at the same time."""
    folder = Path(place.folder) / f"alone-{place.rank}"
    folder.mkdir()
    job = _job(work, {"name": "single"}, accumulate=work.num_microbatches)
    train_for_ever(job, Place(0, 1, str(folder)), clock)


def torch_loop(place: Place, clock: Clock, *, work: Work, backend: str) -> None:
    """torch's pipelining as its manual says, with an optimizer that is fused as ours is."""
    _time_passes(clock)
    register()
    dist.init_process_group(backend, init_method=place.meeting, rank=place.rank, world_size=place.size)
    _, chain, _ = _chain(work.model)
    start = sum(work.counts[: place.rank])
    blocks = chain.blocks[start : start + work.counts[place.rank]]
    module = nn.Sequential(*(module for block in blocks for module in block.modules))
    stage = PipelineStage(module, place.rank, place.size, torch.device("cpu"))
    schedule = _SCHEDULES[work.schedule](stage, work.num_microbatches, loss_fn=_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)
    for inputs, targets in _batches(work.model):
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


def _job(work: Work, strategy: dict[str, Any], *, accumulate: int) -> Job:
    model = MODELS[work.model]
    training = {"batch_size": model.batch_size, "steps": 10**9, "threads": 1, "accumulate": accumulate}
    return Job(
        model=model.use,  # type: ignore[arg-type]
        data=model.data,
        optimizer={"use": "adam", "lr": LEARNING_RATE},  # type: ignore[arg-type]
        training=training,  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        evaluation={"every_epochs": 0},  # type: ignore[arg-type]
        checkpoint={"every_steps": 0},  # type: ignore[arg-type]
    )


def _chain(name: str) -> tuple[nn.Module, Chain, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name].build()
    inputs, _ = train_tensors(MODELS[name].data)
    return model, make_chain(model, inputs[:2]), inputs


def _batches(name: str) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = train_tensors(MODELS[name].data)
    size = MODELS[name].batch_size
    for epoch in itertools.count():
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
        for at in range(0, len(order) - size + 1, size):
            yield inputs[order[at : at + size]], targets[order[at : at + size]]
