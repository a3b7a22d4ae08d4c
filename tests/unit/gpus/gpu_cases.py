"""Every strategy computes steps on a GPU that is not there: what can be wrong without one is an error here.

`test_strategies_on_gpus.py` runs this file, in a process of its own: what is pretended stays for the life of a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_gpus import FakeGpus, fake_group

from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.compute import Votes, evaluate
from cordee.compute.computation import split_batch
from cordee.core import Batch, Job
from cordee.strategies.strategy import TrainsAlone
from cordee.training.components import Components, assemble

MODELS: dict[str, dict[str, Any]] = {
    "batch-norm": {"use": f"{__name__}:Normalised"},
    "dropout": {"use": f"{__name__}:Dropped"},
}


class Normalised(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(6, 16),
            torch.nn.ReLU(),
            torch.nn.BatchNorm1d(16),
            torch.nn.Linear(16, 4),
        )


class Dropped(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
        )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    found = FakeGpus()
    found.install(monkeypatch)
    return found


# DTensor and FSDP compare pointers of tensors, which fake ones answer with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def job_of(strategy: dict[str, Any], *, model: str = "dropout", **training: Any) -> Job:
    return Job.from_dict(
        {
            "model": MODELS[model],
            "data": {"use": "synthetic", "shape": [6], "num_classes": 4, "size": 64, "test_size": 16},
            "optimizer": {"use": "adam", "lr": 0.01},
            "training": {"batch_size": 16, "steps": 2, "device": "cuda", **training},
            "strategy": strategy,
        }
    )


@contextlib.contextmanager
def worker(gpus: FakeGpus, job: Job, index: int) -> Iterator[tuple[Components, list[list[Batch]]]]:
    """Inside, this process is a worker on the GPU of its number, and its tensors are fake."""
    size = job.strategy.workers
    team = Team(index, size, num_local_workers=size, local_rank=index, generation=1)
    parts = assemble(job, team)
    group = fake_group(index, size) if size > 1 else contextlib.nullcontext()
    with contextlib.closing(parts.train.batches(0)) as read:
        # Before: what is read and cut is on the host, where it is real.
        batches = [split_batch(batch, job.training.accumulate) for _, batch in zip(range(2), read)]
    with group, gpus.computing():
        parts.setup()
        yield parts, batches


def take_steps(parts: Components, batches: Sequence[list[Batch]]) -> None:
    for step, pieces in enumerate(batches):
        parts.seed_step(step)
        strategy = parts.strategy
        if isinstance(strategy, TrainsAlone):
            strategy.train_alone(pieces, step=step, measure=True)
            if (step + 1) % strategy.sync_every:
                continue
            strategy.agree(Votes, is_end=step + 1 == len(batches))
        else:
            strategy.forward_backward(pieces, measure=True, vote=Votes)
        strategy.update(step)


PLAN = {"1": "column", "4": "row"}
UP, LEAST_BATCH = ["cpu", "cuda"], 24
NO_PARTS = ("pipeline", "mesh")  # which cut a batch themselves
GATHERED = ("pipeline", "mesh")
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "ddp": {"name": "data_parallel", "workers": 2},
    "flat": {"name": "data_parallel", "workers": 2, "reducer": "flat"},
    "overlapped": {"name": "data_parallel", "workers": 2, "reducer": "overlapped"},
    "synchronised": {"name": "data_parallel", "workers": 2, "reducer": "flat", "batch_norm": "sync"},
    "sharded": {"name": "sharded", "workers": 2},
    "offload": {"name": "sharded", "workers": 2, "offload": True},
    "pipeline": {"name": "pipeline", "workers": 2},
    "tensor": {"name": "tensor", "workers": 2, "plan": PLAN},
    "hybrid": {"name": "hybrid", "workers": 4, "mesh": {"data": 2, "tensor": 2}, "plan": PLAN},
    "mesh": {"name": "hybrid", "workers": 4, "mesh": {"pipeline": 2, "sharded": 2}},
    "local_sgd": {"name": "local_sgd", "workers": 2, "sync_every": 2},
}
WITHOUT_BATCH_NORM = ("tensor", "hybrid", "mesh")  # sliced layers, and micro-batches of one sample
COMPRESSIONS = ("fp16", "bf16", "int8", "int4", "topk", "topk_2bit", "powersgd")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("model", ["batch-norm", "dropout"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps(gpus: FakeGpus, name: str, model: str, index: int) -> None:
    if (index and name == "single") or (model == "batch-norm" and name in WITHOUT_BATCH_NORM):
        return
    job = job_of(STRATEGIES[name], model=model, clip_norm=1.0)
    with worker(gpus, job, index) as (parts, batches):
        device = torch.device("cuda", index)
        assert parts.computation.device == device and gpus.current == index
        gpus.answers.copies.clear()
        take_steps(parts, batches)
        assert {p.device for p in parts.strategy.model.parameters()} == {device}
        batches_up = [is_free for *way, numel, is_free in gpus.answers.copies if way == UP and numel >= LEAST_BATCH]
        assert all(batches_up), "a batch is copied to the GPU, and somebody waits for it"
        seeded = [number for number, generator in enumerate(gpus.generators) if generator.seeds]
        assert seeded == [index], "random numbers of another GPU than this worker's were seeded"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_precision(gpus: FakeGpus, name: str, precision: str) -> None:
    if name == "local_sgd" and precision == "fp16":
        return  # refused: its workers would have different scales
    with worker(gpus, job_of(STRATEGIES[name], precision=precision), 0) as (parts, batches):
        take_steps(parts, batches)


@pytest.mark.parametrize("strategy", ["data_parallel", "local_sgd"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compression(gpus: FakeGpus, strategy: str, compression: str) -> None:
    key = {"data_parallel": "compression", "local_sgd": "compress"}[strategy]
    job = job_of({"name": strategy, "workers": 2, key: compression})
    with worker(gpus, job, 1) as (parts, batches):
        take_steps(parts, batches)
        strategy = parts.strategy
        strategy.consolidate()
        if isinstance(strategy, TrainsAlone):
            strategy.prepare_save()
        state = strategy.state_dict()
        strategy.load_state_dict(State({key: tensor.cpu() for key, tensor in state.tensors.items()}, state.values))
        take_steps(parts, batches)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_saved_and_loaded(gpus: FakeGpus, name: str, accumulate: int) -> None:
    if name == "hybrid":
        return  # torch's gathering of a slice along one axis of a mesh does not know its own size here
    job = job_of(STRATEGIES[name], **({"accumulate": accumulate} if name not in NO_PARTS else {}))
    with worker(gpus, job, 0) as (parts, batches):
        take_steps(parts, batches)
        strategy = parts.strategy
        strategy.consolidate()
        evaluate(strategy.model, [batches[0][0]], parts.computation, num_classes=4)
        if name in GATHERED:
            return  # states of other members are bytes, and there are no bytes
        state = strategy.state_dict()
        on_host = {key: tensor.cpu() for key, tensor in state.tensors.items()}
        strategy.load_state_dict(State(on_host, state.values))
        take_steps(parts, batches)


@pytest.mark.parametrize("parts_of_batch", [1, 4])
def test_a_step_waits_once_for_its_loss(gpus: FakeGpus, parts_of_batch: int) -> None:
    job = job_of({"name": "single"}, accumulate=parts_of_batch)
    with worker(gpus, job, 0) as (parts, batches):
        take_steps(parts, batches[:1])  # the optimizer makes its state
        gpus.answers.waits = 0
        take_steps(parts, batches[1:])
    assert gpus.answers.waits <= 2, "loss and accuracy of all parts are read at once"
