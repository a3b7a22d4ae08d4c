"""How Cordée and its peers train in parallel: the loops that the benchmark's processes run.

Peers get their data as tensors and gather whole batches from them, and are otherwise used as their manuals say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cordee.bench.contest import Clock, Place
from cordee.bench.materials import build, silent, train_tensors, whole_batches
from cordee.cluster import Team
from cordee.communication.shared_memory import register
from cordee.core import Job
from cordee.core.settings import Data
from cordee.monitoring import JsonlSink, Monitor
from cordee.trainer import Trainer
from cordee.training.components import assemble

LEARNING_RATE = 0.001


def cordee_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    """Cordée's trainer as a worker runs it, events included; `batch_size` is a worker's."""
    uses: dict[str, Any] = {"lenet": {"use": "lenet"}, "resnet18": {"use": "resnet", "depth": 18}}
    job = Job(
        model=uses[model],
        data=data,
        optimizer={"use": "adam", "lr": LEARNING_RATE},  # type: ignore[arg-type]
        training={"batch_size": batch_size * place.size, "steps": 10**9, "threads": 1},  # type: ignore[arg-type]
        strategy={  # type: ignore[arg-type]
            "name": "single" if place.size == 1 else "data_parallel",
            "workers": place.size,
        },
        evaluation={"every_epochs": 0},  # type: ignore[arg-type]
        checkpoint={"every_steps": 0},  # type: ignore[arg-type]
    )
    train_for_ever(job, place, clock)


def train_for_ever(job: Job, place: Place, clock: Clock) -> None:
    """Train the job as one of its workers, in a group of all the contestant's processes."""
    if place.size > 1:
        register()
        dist.init_process_group("cordee", init_method=place.meeting, rank=place.rank, world_size=place.size)
    parts = assemble(job, Team(place.rank, place.size, num_local_workers=place.size, local_rank=place.rank))
    parts.setup()

    def at_each_step() -> bool:
        clock.tick()
        return False

    folder = Path(place.folder)
    sinks = [JsonlSink(folder / f"events-{place.rank}.jsonl")] if place.rank == 0 else []
    with Monitor(sinks) as monitor:
        Trainer(parts, monitor, folder, should_stop=at_each_step).run()


def ddp_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int, tuned: bool = False) -> None:
    """A hand-written loop with DDP on gloo; `tuned` takes what its manuals offer to those who look."""
    dist.init_process_group("gloo", init_method=place.meeting, rank=place.rank, world_size=place.size)
    wrapped = DistributedDataParallel(build(model), gradient_as_bucket_view=tuned)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=LEARNING_RATE, fused=True if tuned else None)
    for x, y in _own_batches(place, *train_tensors(data), batch_size):
        clock.tick()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def accelerate_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == place.size
    network: Any = build(model)
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    loader: Any = whole_batches(*train_tensors(data), batch_size)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    while True:
        for x, y in loader:
            assert len(y) <= batch_size
            clock.tick()
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(network(x), y))
            optimizer.step()


def lightning_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = build(model)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            clock.tick()
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    with silent():
        lightning.Trainer(
            max_epochs=10**6,
            accelerator="cpu",
            strategy="ddp",
            devices=place.size,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=place.folder,
        ).fit(Module(), whole_batches(*train_tensors(data), batch_size))


def fsdp_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int, backend: str) -> None:
    """FSDP2, every layer a unit, as its manual says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    register()
    dist.init_process_group(backend, init_method=place.meeting, rank=place.rank, world_size=place.size)
    mesh = init_device_mesh("cpu", (place.size,))
    network = build(model)
    for layer in network.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    inputs, targets = train_tensors(data)
    if model == "mlp":
        inputs = inputs.flatten(1)
    for x, y in _own_batches(place, inputs, targets, batch_size):
        clock.tick()
        optimizer.zero_grad()
        F.cross_entropy(_call(network, x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _call(network: nn.Module, x: Tensor) -> Tensor:
    outputs: Tensor = network(x)
    return outputs


def _own_batches(place: Place, inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this process's half of global batches, in one shuffled order per epoch."""
    for epoch in itertools.count():
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
        for at in range(0, len(order) - batch_size * place.size + 1, batch_size * place.size):
            chosen = order[at + place.rank * batch_size : at + (place.rank + 1) * batch_size]
            yield inputs[chosen], targets[chosen]
