"""A federation of real processes for tests: a server, sites that join it, and the truth that they are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cordee.checkpoint import load_newest, weights_sha256
from cordee.cluster import Team
from cordee.communication.compression import make_codec
from cordee.core import Job
from cordee.data.load import digits
from cordee.data.source import ArraySource, Splits
from cordee.monitoring import read_events
from cordee.runs.federation.invitations import invite
from cordee.runs.federation.messages import Invitation
from cordee.runs.federation.rounds import plan_secure
from cordee.strategies.federated.aggregation import SumTree, contribute
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import ClientTrainer
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.partition import divide
from cordee.strategies.federated.robust import aggregate
from cordee.strategies.federated.server import FederatedServer
from cordee.strategies.federated.settings import PartitionSettings
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import assemble

HERE = Path(__file__).parent
SEED = 3
JOB = """
name = "sites"
seed = 3
[model]
use = "mlp"
hidden = [16]
[data]
use = "digits"
[optimizer]
use = "sgd"
lr = 0.1
[training]
batch_size = 16
threads = 1
[strategy]
name = "federated"
rounds = {rounds}
local_steps = 4
partition = {{ clients = 3 }}
{settings}
[cluster]
failure_timeout = "{timeout}"
"""


def part(number: int, of: int = 3, first_label: int = 0) -> Splits:
    """Return the samples of digits that client `number` of a simulation has; labels are moved up by `first_label`."""
    whole = digits()
    assert isinstance(whole.train, ArraySource)
    partition = divide(PartitionSettings(clients=of), whole.train, 10, SEED)
    rows = partition.of(number) if number < of else torch.arange(0)
    inputs, targets = whole.train.gather(rows)
    classes = 10 + first_label
    return Splits(ArraySource(inputs, targets + first_label), None, whole.input_shape, classes, f"part {number}")


class Federation:
    """A server process and client processes in a folder. `close` kills what is left, by process number."""

    def __init__(self, folder: Path, settings: str = "", rounds: int = 3, timeout: str = "5s") -> None:
        self.folder = folder
        self.run_dir = folder / "fed"
        self.job_file = folder / "job.toml"
        self.job_file.write_text(JOB.format(settings=settings, rounds=rounds, timeout=timeout))
        self.processes: list[subprocess.Popen[bytes]] = []

    def serve(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the server and wait until it listens."""
        log = self.folder / "server.log"
        before = log.read_text().count("listening at") if log.exists() else 0
        command = ["federation", "serve", str(self.job_file), "--run-dir", str(self.run_dir), *arguments]
        process = self._start(command, log, environment)
        wait_for(lambda: log.read_text().count("listening at") > before, process, log)
        return process

    def join(
        self,
        name: str,
        number: int,
        *,
        of: int = 3,
        token: str = "",
        environment: dict[str, str] | None = None,
        workers: int = 1,
    ) -> subprocess.Popen[bytes]:
        invitation = Invitation.from_text(token) if token else None
        address = invitation.address if invitation else self.address
        command = ["federation", "join", address, "--folder", str(self.folder / f"client-{name}")]
        command += ["--token", token] if token else []
        command += ["--data", "federation_sites:part", "--set", f"data.number={number}", "--set", f"data.of={of}"]
        command += ["--workers", str(workers)] if workers > 1 else []
        return self._start(command, self.folder / f"{name}.log", environment)

    def invite(self, name: str) -> str:
        return invite(self.run_dir, name).to_text()

    @property
    def address(self) -> str:
        line = next(line for line in reversed(self.log("server").splitlines()) if line.startswith("listening at"))
        return line.removeprefix("listening at ").strip()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run_dir / "events.jsonl") if event["type"] == kind]

    def weights(self) -> str:
        loaded = load_newest(self.run_dir / "checkpoints")
        assert loaded is not None
        return weights_sha256(loaded.state.part("model").tensors)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)

    def _start(self, command: Sequence[str], log: Path, environment: dict[str, str] | None) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "cordee", *command],
                cwd=HERE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self.processes.append(process)
        return process


def wait_for(is_there: Any, process: subprocess.Popen[bytes] | None, log: Path, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_there():
        assert time.monotonic() < deadline, log.read_text()
        assert process is None or process.poll() is None, log.read_text()
        time.sleep(0.05)


def reference(job_file: Path, sites: Sequence[str], lost: dict[int, set[str]] | None = None) -> tuple[str, Any]:
    """Return the weights after all rounds, computed in this process by the functions that a simulation uses."""
    job = Job.load(job_file)
    parts = assemble(job, Team())
    settings = settings_of(job)
    algorithm = make_algorithm(settings.use)
    flat = FlatModel(parts.model, settings.is_personal)
    server = FederatedServer(settings, algorithm, flat.shared, flat.read_buffers(), num_clients=len(sites), noise_key=0)
    first_personal = flat.personal.clone()
    trainer = ClientTrainer(job, settings, algorithm, flat, parts.computation, parts.recipe)
    compress = settings.parts.compress
    codec = make_codec(compress.use, compress.share, flat.num_shared, flat.values.dtype, flat.shapes, compress.rank)
    states: dict[str, Any] = {name: {} for name in sites}
    sources = {name: part(number, len(sites)).train for number, name in enumerate(sites)}
    for number in range(settings.rounds):
        gone = (lost or {}).get(number, set())
        sent = server.sent()
        sent = sent._replace(parameters=sent.parameters.clone(), own={k: v.clone() for k, v in sent.own.items()})
        tree, words, plan = SumTree(len(sites)), None, None
        rows: list[torch.Tensor] = []
        if settings.parts.secure is not None:
            plan = plan_secure(settings, settings.parts.secure, flat.num_shared, len(sites))
        for place, name in enumerate(sites):
            if name in gone:
                tree.take(place, None)
                continue
            source = sources[name]
            indices = torch.arange(source.num_samples or 0)
            update = trainer.train(sent, states[name], source, indices, client=name)
            states[name] = update.state
            if plan is not None:
                own = plan.encode(update.payload[0], settings.weight_of(update.num_samples), name)
                words = own if words is None else words + own
                continue
            difference = codec.decode(update.payload).clone()
            tree.take(place, contribute(settings, update, difference)[0])
            rows.append(difference)
        if plan is not None:
            assert words is not None
            server.finish_round(plan.decode(words, len(sites) - len(gone), server.buffers))
        elif settings.parts.robust is not None:
            stacked = torch.stack(rows)
            robust = aggregate(settings.parts.robust, lambda a, b, kept=stacked: kept[:, a:b], *stacked.shape)
            server.finish_round(tree.result(), robust)
        else:
            server.finish_round(tree.result())
    with torch.no_grad():
        flat.shared.copy_(server.parameters)
        flat.personal.copy_(first_personal)  # those of a client stay with it
        flat.write_buffers(server.buffers)
    return weights_sha256(parts.model.state_dict()), server
