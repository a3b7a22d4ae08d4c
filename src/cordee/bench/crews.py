"""Pairs of processes that train on command: started once, told again and again to run some steps.

Each crew is two processes with a `torch.distributed` group of one backend, asleep while the others are measured.
One kernel thread each; every contestant gets whole batches from tensors.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cordee.assembly import assemble
from cordee.bench.overhead import whole_batches
from cordee.cluster import Team
from cordee.communication.shared_memory import register
from cordee.core import Job
from cordee.models import lenet, mlp, resnet
from cordee.monitoring import JsonlSink, Monitor
from cordee.trainer import Trainer

NUM_WORKERS = 2
BATCH_PER_WORKER = 32
SHAPES: dict[str, tuple[int, ...]] = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32), "mlp": (1024,)}
DATA_SIZE = 8192

Outcome = float  # samples per second of both workers together


class Crew:
    """Two processes of one kind ("cordee", "gloo", "accelerate", "lightning")."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(kind, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, what: str, model: str, num_steps: int) -> Outcome:
        """Train `num_steps` steps on both; the slower one counts."""
        for pipe in self._pipes:
            pipe.send((what, model, num_steps))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        seconds = [float(answer) for answer in answers]
        return NUM_WORKERS * BATCH_PER_WORKER * num_steps / max(seconds)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _serve(kind: str, rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(  # in the words of torchrun, which Accelerate and Lightning understand
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_WORKERS),
        LOCAL_WORLD_SIZE=str(NUM_WORKERS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="bench",
        OMP_NUM_THREADS="1",
    )
    register()
    if kind in ("cordee", "gloo"):
        dist.init_process_group(kind)
    worker = _Worker(rank)
    while (command := pipe.recv()) is not None:
        what, model, num_steps = command
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                pipe.send(getattr(worker, what)(model, num_steps))
        except Exception as error:  # noqa: BLE001 - reported to the one who measures
            pipe.send(f"{kind}/{what}/{model}: {type(error).__name__}: {error}")
    if dist.is_initialized():
        dist.destroy_process_group()


class _Worker:
    """What one process can be told to do; every method returns the seconds its steps took."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[tuple[str, str], Any] = {}

    def cordee(self, model: str, num_steps: int) -> float:
        """The strategy `data_parallel` under the trainer, with its events."""
        use = {"use": "resnet", "depth": 18} if model == "resnet18" else {"use": model}
        job = Job(
            model=use,  # type: ignore[arg-type]
            data={  # type: ignore[arg-type]
                "use": "synthetic",
                "shape": list(SHAPES[model]),
                "num_classes": 10,
                "size": DATA_SIZE,
                "test_size": 8,
            },
            optimizer={"use": "sgd", "lr": 0.01},  # type: ignore[arg-type]
            training={  # type: ignore[arg-type]
                "batch_size": BATCH_PER_WORKER * NUM_WORKERS,
                "steps": num_steps,
                "threads": 1,
            },
            strategy={"name": "data_parallel", "workers": NUM_WORKERS},  # type: ignore[arg-type]
            evaluation={"every_epochs": 0},  # type: ignore[arg-type]
        )
        parts = assemble(job, Team(self._rank, NUM_WORKERS, NUM_WORKERS, self._rank))
        parts.setup()
        with tempfile.TemporaryDirectory() as folder, Monitor([JsonlSink(Path(folder) / "events.jsonl")]) as monitor:
            outcome = Trainer(parts, monitor, Path(folder)).run()
        return NUM_WORKERS * BATCH_PER_WORKER * num_steps / outcome.samples_per_second

    def ddp(self, model: str, num_steps: int) -> float:
        """DistributedDataParallel as one writes it by hand."""
        network, optimizer = self._ready("ddp", model, lambda net: DistributedDataParallel(net))
        return _timed(network, optimizer, _tensors(model, self._rank), num_steps)

    def alone(self, model: str, num_steps: int) -> float:
        """No communication at all: what two processes reach side by side."""
        network, optimizer = self._ready("alone", model, lambda net: net)
        return _timed(network, optimizer, _tensors(model, self._rank), num_steps)

    def fsdp(self, model: str, num_steps: int) -> float:
        """FSDP2 on the crew's backend."""
        network, optimizer = self._ready("fsdp", model, _fully_shard)
        return _timed(network, optimizer, _tensors(model, self._rank), num_steps)

    def accelerate(self, model: str, num_steps: int) -> float:
        from accelerate import Accelerator

        if ("accelerate", model) not in self._made:
            accelerator = Accelerator(cpu=True)
            network = _network(model)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            loader = whole_batches(*_tensors(model, 0), BATCH_PER_WORKER)
            self._made["accelerate", model] = (accelerator, *accelerator.prepare(network, optimizer, loader))
        accelerator, network, optimizer, loader = self._made["accelerate", model]
        started = time.perf_counter()
        for step, (x, y) in enumerate(_endless(loader)):
            if step == num_steps:
                break
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(network(x), y))
            optimizer.step()
        return time.perf_counter() - started

    def lightning(self, model: str, num_steps: int) -> float:
        import lightning

        class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.network = _network(model)

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                return F.cross_entropy(self.network(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

            def on_train_start(self) -> None:
                self.started_s = time.perf_counter()

            def on_train_end(self) -> None:
                self.seconds = time.perf_counter() - self.started_s

        module = Module()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            lightning.Trainer(
                max_steps=num_steps,
                accelerator="cpu",
                devices=NUM_WORKERS,
                strategy="ddp",
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                default_root_dir=folder,
            ).fit(module, whole_batches(*_tensors(model, 0), BATCH_PER_WORKER))
        return float(module.seconds)

    def _ready(self, what: str, model: str, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Any]:
        if (what, model) not in self._made:
            network = wrap(_network(model))
            self._made[what, model] = (network, torch.optim.SGD(network.parameters(), lr=0.01))
        made: tuple[nn.Module, Any] = self._made[what, model]
        return made


def _timed(network: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor], num_steps: int) -> float:
    inputs, targets = data
    order = torch.randperm(len(targets))
    started = time.perf_counter()
    for step in range(num_steps):
        at = step * BATCH_PER_WORKER % (len(targets) - BATCH_PER_WORKER)
        chosen = order[at : at + BATCH_PER_WORKER]
        optimizer.zero_grad()
        F.cross_entropy(network(inputs[chosen]), targets[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.perf_counter() - started


def _network(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "lenet":
        return lenet(input_shape=SHAPES[model], num_classes=10)
    if model == "resnet18":
        return resnet(input_shape=SHAPES[model], num_classes=10, depth=18)
    return mlp(input_shape=SHAPES[model], num_classes=10, hidden=(4096, 4096, 4096))  # 37.8 million parameters


def _tensors(model: str, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    size = DATA_SIZE if model == "lenet" else 512
    inputs = torch.randn(size, *SHAPES[model], generator=generator)
    return inputs, torch.randint(0, 10, (size,), generator=generator)


def _fully_shard(network: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_WORKERS,))
    for layer in network.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def _endless(loader: Any) -> Any:
    while True:
        yield from loader
