"""How Cordée and its peers train, alone and in parallel: the loops that a benchmark's processes run, and their data.

Peers get their data as tensors and gather whole batches from them, as ours does, and are otherwise used as their
manuals say.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from cordee import checkpoint
from cordee.bench.harness import Clock, Place
from cordee.cluster import Team
from cordee.communication.shared_memory import BackendSettings, register
from cordee.core import Job
from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import load_data
from cordee.models import BUILTIN_MODELS
from cordee.monitoring import JsonlSink, Monitor, ProgressSink, Sink
from cordee.trainer import Trainer
from cordee.training.components import assemble

LEARNING_RATE = 0.001
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"use": "mlp"},
    "mlp of 4 M": {"use": "mlp", "hidden": [1024] * 4},
    "mlp of 40 M": {"use": "mlp", "hidden": [3072] * 5},
    "lenet": {"use": "lenet"},
    "resnet18": {"use": "resnet", "depth": 18},
    "resnet20": {"use": "resnet", "depth": 20},
}


def image_data() -> Data:
    """Return Fashion-MNIST where its files are on the machine, else made-up data of its shape."""
    data = Data("fashion-mnist")
    try:
        load_data(data, seed=0)
    except DataError:
        data = synthetic_images(1, 28, size=60_000)
    return data


def synthetic_images(channels: int, width: int, *, size: int = 8192, **args: Any) -> Data:
    """Return made-up images of 10 classes."""
    return Data("synthetic", args={"shape": [channels, width, width], "num_classes": 10, "size": size, **args})


def train_tensors(data: Data) -> tuple[Tensor, Tensor]:
    """Return the training set, normalised, as two tensors."""
    source = load_data(data, seed=0).train
    assert source.num_samples is not None
    batch = source.gather(torch.arange(source.num_samples))
    return batch.inputs, batch.targets


def build(name: str) -> nn.Module:
    """Return a model by name, with the same weights each time."""
    torch.manual_seed(0)
    arguments = dict(MODELS[name])
    use = arguments.pop("use")
    shape = (3, 32, 32) if use == "resnet" else (1, 28, 28)
    return BUILTIN_MODELS[use](input_shape=shape, num_classes=10, **arguments)


def endless_job(
    model: dict[str, Any],
    data: Data,
    batch_size: int,
    num_workers: int,
    *,
    strategy: Any = None,
    encrypt: bool = True,
    **training: Any,
) -> Job:
    """Return a job that trains for ever and does nothing else; `batch_size` is of all workers together."""
    name = "single" if num_workers == 1 else "data_parallel"
    tables: dict[str, Any] = {
        "model": model,
        "data": data,
        "optimizer": {"use": "adam", "lr": LEARNING_RATE},
        "training": {"batch_size": batch_size, "steps": 10**9, "threads": 1, **training},
        "strategy": {"name": name, "workers": num_workers, **(strategy or {})},
        "evaluation": {"every_epochs": 0},
        "checkpoint": {"every_steps": 0},
        "cluster": {"encrypt": encrypt},
    }
    return Job(**tables)


def train_for_ever(job: Job, place: Place, clock: Clock) -> None:
    """Train the job as one of its workers, in a group of all the contestant's processes, events included."""
    if place.size > 1:
        register()
        between_hosts = BackendSettings(encrypt=job.cluster.encrypts)
        dist.init_process_group(
            "cordee", init_method=place.rendezvous, rank=place.rank, world_size=place.size, pg_options=between_hosts
        )
    parts = assemble(job, Team(place.rank, place.size, num_local_workers=place.size, local_rank=place.rank))
    parts.setup()

    folder = Path(place.folder)
    sinks: list[Sink] = [JsonlSink(folder / "events.jsonl")] if place.rank == 0 else []
    if place.size == 1:  # of several workers the launcher shows the progress, beside the training
        sinks.append(ProgressSink(Console(file=io.StringIO())))
    with _TickingMonitor(sinks, clock) as monitor:
        Trainer(parts, monitor, checkpoint.Folder(folder)).run()


class _TickingMonitor(Monitor):
    """Tells the clock after every step, when nothing of the step is on its way to other workers any more."""

    def __init__(self, sinks: Sequence[Sink], clock: Clock) -> None:
        super().__init__(sinks)
        self._clock = clock

    def progress(self, step: int, loss: SupportsFloat | None = None) -> None:
        super().progress(step, loss)
        self._clock.tick()


def cordee_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int, encrypt: bool = True) -> None:
    """Cordée's trainer as a worker runs it; `batch_size` is a worker's, here and below."""
    job = endless_job(MODELS[model], data, batch_size * place.size, place.size, encrypt=encrypt)
    train_for_ever(job, place, clock)


def torch_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int, tuned: bool = False) -> None:
    """A hand-written loop, of several processes with DDP on gloo; `tuned` takes what torch offers to those who look."""
    network = build(model)
    if place.size > 1:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        network = DistributedDataParallel(network, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True if tuned else None)
    train_by_hand(place, clock, network, optimizer, data, batch_size)


def fsdp_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int, backend: str) -> None:
    """FSDP2, every layer a unit, as its manual says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    register()
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    mesh = init_device_mesh("cpu", (place.size,))
    network = build(model)
    for layer in network.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    train_by_hand(place, clock, network, optimizer, data, batch_size)


def train_by_hand(
    place: Place,
    clock: Clock,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    batch_size: int,
) -> None:
    for x, y in own_batches(place, *train_tensors(data), batch_size):
        clock.tick()
        optimizer.zero_grad()
        loss: Tensor = F.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def own_batches(place: Place, inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this process's share of global batches, in one shuffled order per epoch."""
    for epoch in itertools.count():
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
        for at in range(0, len(order) - batch_size * place.size + 1, batch_size * place.size):
            chosen = order[at + place.rank * batch_size : at + (place.rank + 1) * batch_size]
            yield inputs[chosen], targets[chosen]


def accelerate_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == place.size
    network: Any = build(model)
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    loader: Any = _whole_batches(*train_tensors(data), batch_size)
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

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no advice about its own defaults
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        lightning.Trainer(
            max_epochs=10**6,
            accelerator="cpu",
            strategy="ddp" if place.size > 1 else "auto",
            devices=place.size,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=place.folder,
        ).fit(Module(), _whole_batches(*train_tensors(data), batch_size))


def installed_peers(say: Callable[[str], None]) -> dict[str, Callable[..., None]]:
    """Return the loops of those other trainers that are installed."""
    peers = {"accelerate": accelerate_loop, "lightning": lightning_loop}
    missing = [name for name in peers if not importlib.util.find_spec(name)]
    if missing:
        say(f"not installed, so left out: {', '.join(missing)} (pip install 'cordee[bench]')")
    return {name: loop for name, loop in peers.items() if name not in missing}


class _WholeBatches(Dataset[Any]):
    """Gives a DataLoader a whole batch at once, gathered from tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._inputs[chosen], self._targets[chosen]


def _whole_batches(inputs: Tensor, targets: Tensor, batch_size: int) -> DataLoader[Any]:
    """Return a shuffled loader. The usual one, sample by sample, would be several times slower."""
    dataset = _WholeBatches(inputs, targets)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
