"""Leading a federation, and taking part in one."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from cordee.cluster import Team
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys, make_keys
from cordee.communication.this_host import Listening, find_listening
from cordee.communication.wire import Codec
from cordee.compute import make_loss
from cordee.core import Job
from cordee.core.env import runs_folder
from cordee.core.errors import DataError, JobError, RunDirectoryError
from cordee.core.fault_points import identify
from cordee.core.interrupts import InterruptFlag
from cordee.core.job import apply_override, changed_keys
from cordee.core.references import LIVE_PREFIX
from cordee.core.settings import Data
from cordee.data import load_data
from cordee.launch import close_run
from cordee.monitoring import (
    JsonlSink,
    Monitor,
    ProgressSink,
    RunDirectory,
    Sink,
    Summary,
    events,
    read_events,
    setup_logging,
)
from cordee.monitoring.run_directory import JOB_FILE
from cordee.runs.federation.client import PATIENCE_S, ClientFolder, FederationClient
from cordee.runs.federation.invitations import ADDRESS, KEYS_FILE, RUN
from cordee.runs.federation.learning import FederationLearning
from cordee.runs.federation.messages import FEDERATION, Invitation, limits_for
from cordee.runs.federation.server import FederationServer
from cordee.runs.federation.store import STORE_FILE, FederationStore
from cordee.strategies.choice import entry_of
from cordee.strategies.federated.client import Update
from cordee.strategies.federated.settings import FederatedSettings
from cordee.training.components import Components, assemble
from cordee.training.progress import Outcome, summarise

NOISE, POPULATION = "noise_seed", "population"


def serve(
    job_file: Path,
    listen: str,
    *,
    num_clients: int,
    run_dir: Path | None = None,
    resume: bool = False,
    overrides: Iterable[str] = (),
    quiet: bool = False,
    say: Callable[[str], None],
) -> Summary:
    """Lead a federation until its rounds are done; return the summary. Raises CordeeError.

    Ctrl-C or SIGTERM ends it; `resume` continues with the very round, as after `kill -9`.
    """
    identify("federation-server")
    job = _federated_job(Job.load(job_file, overrides))
    listening = _find_listening(listen)
    parts = assemble(job, Team())
    if resume:
        if run_dir is None:
            raise JobError("--resume needs --run-dir: the run directory of the federation that continues")
        refuse_changes(run_dir / JOB_FILE, job)
        directory = RunDirectory.open_existing(run_dir)
    elif run_dir is not None:
        directory = RunDirectory.create(run_dir, job.to_toml())
    else:
        directory = RunDirectory.create_in(runs_folder(), job.name, job.to_toml())
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory)
        stack.enter_context(setup_logging(directory.launcher_log, is_required=True))
        store = FederationStore(directory.path / STORE_FILE, create=True)
        stack.callback(store.close)
        keys = _own_keys(directory.path / KEYS_FILE)
        place = _set_up(store, num_clients)
        if resume:
            directory.summary_file.unlink(missing_ok=True)
        sinks: list[Sink] = [JsonlSink(directory.events_file)]
        if not quiet:
            sinks.append(ProgressSink(Console(highlight=False)))
        monitor = stack.enter_context(Monitor(sinks, member="server"))
        flag = stack.enter_context(InterruptFlag(lambda: say("ending; --resume continues with this round")))
        learning = FederationLearning(
            parts,
            directory.checkpoints,
            monitor,
            run=place.run,
            noise_seed=place.noise_seed,
            num_clients=place.population,
        )
        is_stateful = learning.is_population_fixed
        vectors = 4 + 3 * len(list(parts.model.parameters()))
        limits = limits_for(learning.num_values, learning.num_buffer_values, vectors)
        speaker = Speaker(run=place.run, name="server", incarnation=time.time_ns())
        channel = stack.enter_context(
            ServerChannel(listening.address, speaker, Codec(FEDERATION, limits), keys, admits_every_key=True)
        )
        address = channel.address.removeprefix("tcp://")
        store.set_fact(ADDRESS, address)
        last = learning.load()
        description = parts.describe(directory.path, learning.num_rounds)
        sites = {"workers": place.population, "clients": place.population, "epochs": None, "threads": None}
        monitor.emit(msgspec.structs.replace(description, **sites))
        if last is not None and not _has_round(directory.events_file, last.round):
            monitor.emit(last)  # the server was killed between saving the round and reporting it
        if learning.settings.weights == "samples" and not (is_stateful or learning.settings.most_samples):
            learning.warn(
                "a client weighs as many samples as it says that it has: strategy.most_samples bounds what is believed"
            )
        say(f"listening at {address}")
        say(f"invite a client: cordee federation invite NAME --run-dir {directory.path}")
        server = FederationServer(
            channel,
            store,
            learning,
            job_toml=_job_for_clients(job).to_toml(),
            num_classes=parts.splits.num_classes or 0,
            num_clients=num_clients,
            failure_timeout_s=job.cluster.failure_timeout_s,
            should_stop=flag,
            say=say,
        )
        return _lead(server, learning, description, directory, monitor)


def _find_listening(listen: str) -> Listening:
    try:
        return find_listening(listen)
    except JobError as error:
        raise JobError(str(error).replace("cluster.address =", "--listen")) from None


def _lead(
    server: FederationServer,
    learning: FederationLearning,
    description: events.RunStarted,
    directory: RunDirectory,
    monitor: Monitor,
) -> Summary:
    started = time.time()
    error: BaseException | None = None
    outcome: Outcome | None = None
    try:
        stopped_by = server.run()
        outcome = Outcome(stopped_by, learning.metrics, None, 0.0)
    except BaseException as problem:
        error = problem
        raise
    finally:
        summary = summarise(description, learning.progress, outcome, started=started, error=error)
        summary = msgspec.structs.replace(
            summary, weights_sha256=learning.weights_sha256 or None, epsilon=learning.epsilon
        )
        summary = close_run(directory, monitor, summary, None, error)
    return summary


class _Place(NamedTuple):
    run: str
    noise_seed: int
    population: int


def _set_up(store: FederationStore, num_clients: int) -> _Place:
    """Return what this federation was begun with; written down the first time."""
    if store.fact(RUN) is None:
        store.set_fact(NOISE, str(secrets.randbits(128)))
        store.set_fact(POPULATION, str(num_clients))
        store.set_fact(RUN, secrets.token_hex(8))
    population = int(store.fact(POPULATION) or 0)
    return _Place(store.fact(RUN) or "", int(store.fact(NOISE) or 0), population)


def _own_keys(path: Path) -> ServerKeys:
    if path.is_file():
        return ServerKeys.load(path)
    keys = make_keys(0)[0]
    keys.save(path)
    return keys


def _has_round(events_file: Path, number: int) -> bool:
    with contextlib.suppress(OSError, RunDirectoryError):
        return any(event["type"] == "round" and event.get("round") == number for event in read_events(events_file))
    return False


def _federated_job(job: Job) -> Job:
    if entry_of(job).settings is not FederatedSettings:
        raise JobError(
            f"strategy.name = '{job.strategy.name}' is not led in rounds of clients: a federation needs a job whose "
            "strategy is (docs/how-to/federation.md)"
        )
    return msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, workers=1))


def refuse_changes(job_file: Path, job: Job) -> None:
    """Raise JobError if a federation would continue with another job than it began with. More rounds are fine."""
    if not job_file.is_file():  # opening the run directory says what is wrong
        return
    before, now = tomllib.loads(job_file.read_text()), tomllib.loads(job.to_toml())
    old, new = before.get("strategy", {}), now.get("strategy", {})
    changes = changed_keys(before, now) + [
        f"strategy.{key} was {old.get(key, 'not set')!r}, is {new.get(key, 'not set')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in ("rounds", "deadline")
    ]
    if changes:
        raise JobError(
            f"the job has changed since the federation in {job_file.parent} began: {'; '.join(changes)}. Put it back "
            "to resume, or start a new federation"
        )


def _job_for_clients(job: Job) -> Job:
    """Return the job as clients get it: without the folders and files of this host."""
    data = msgspec.structs.replace(job.data, args={k: v for k, v in job.data.args.items() if k != "root"})
    return msgspec.structs.replace(job, python_path=(), data=data)


# Clients.


class JoinOptions(NamedTuple):
    """How a client takes part."""

    folder: Path
    data: str = ""  # instead of the job's data.use
    overrides: tuple[str, ...] = ()  # of [data]
    allows_code: bool = False  # "module:callable" that the server's job names
    patience_s: float = PATIENCE_S  # that the client looks for a server that is gone


def join(invitation: Invitation | None, options: JoinOptions, *, dry_run: bool, say: Callable[[str], None]) -> str:
    """Take part in a federation until it ends; return why it ended. With `dry_run` nothing but the token is sent."""
    folder = ClientFolder(options.folder)
    invited, keys = folder.enter(invitation)
    identify("federation-client")
    client = FederationClient(folder, invited, keys, say, patience_s=options.patience_s)
    try:
        enrolled = client.enrol()
        parts = client_parts(enrolled.job, options, enrolled.num_classes)
        client.prepare(parts)
        if dry_run:
            say(describe_update(client.try_out(), parts))
            return "nothing was sent"
        say(f"client {invited.name}: {parts.splits.train.num_samples:,} samples, {parts.num_parameters:,} parameters")
        with InterruptFlag(lambda: say("leaving after this task")) as flag:
            return client.run(flag)
    finally:
        client.close()


def client_parts(job_toml: str, options: JoinOptions, num_classes: int, team: Team | None = None) -> Components:
    """Return what a client trains with: the server's job, and its own data. Raises CordeeError.

    The server's job can name what is built in. A job that names code is refused unless the client allows it.
    """
    table = tomllib.loads(job_toml)
    if not options.allows_code and (named := sorted(set(_named_code(table)))):
        raise JobError(
            f"the server's job names code: {', '.join(named)}. It would run here, as you. Read it, then allow it with "
            "--allow-code"
        )
    if options.data:
        table["data"] = {"use": options.data}
    for override in options.overrides:
        if not override.startswith("data."):
            raise JobError(f"--set {override!r}: a client sets keys of [data] only; the rest is the server's job")
        apply_override(table, override)
    job = Job.from_dict(table, python_path=(str(Path.cwd()),))
    job = msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, workers=1))
    return assemble(_with_own_data(job, num_classes), team or Team())


def _with_own_data(job: Job, num_classes: int) -> Job:
    """Return the job with this client's data, loaded. A client need not have samples of every class."""
    loss = make_loss(job.loss, job.python_path)
    splits = load_data(job.data, seed=job.seed, python_path=job.python_path, ignored=loss.ignored, counts_classes=True)
    num_samples = splits.train.num_samples or 0
    if not num_samples:
        raise DataError(f"data {splits.name!r} has no samples to train on")
    if num_classes and splits.num_classes is not None:
        if splits.num_classes > num_classes:
            raise DataError(
                f"data {splits.name!r} has labels up to {splits.num_classes - 1}, and the federation's model has "
                f"{num_classes} classes: labels are from 0 to {num_classes - 1}"
            )
        splits = dataclasses.replace(splits, num_classes=num_classes)
    own = Data(use=splits, augment=job.data.augment, prefetch=job.data.prefetch)
    # Batches of fewer samples than the job says are all that a small client has, as in a simulation.
    batch_size = min(job.training.batch_size, num_samples)
    return msgspec.structs.replace(job, data=own, training=msgspec.structs.replace(job.training, batch_size=batch_size))


def _named_code(value: Any, key: str = "") -> Iterator[str]:
    """Yield texts of a job that name code: "module:callable"."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _named_code(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _named_code(inner, key)
    elif isinstance(value, str) and (":" in value or value.startswith(LIVE_PREFIX)) and key != "name":
        yield value


def describe_update(update: Update, parts: Components) -> str:
    """Return what a client would send in a round, line by line."""
    lines = ["in each round this client would send, and nothing else:"]
    for number, tensor in enumerate(update.payload):
        lines.append(f"  update {number}: {tensor.numel():,} numbers of {str(tensor.dtype).removeprefix('torch.')}")
    if update.buffers.numel():
        lines.append(f"  buffers: {update.buffers.numel():,} numbers")
    for name, vector in update.summed.items():
        lines.append(f"  {name}: {vector.numel():,} numbers")
    lines.append(f"  {update.num_bytes:,} bytes in all; the number of samples, {update.num_samples:,}; of steps, ")
    lines[-1] += f"{update.num_steps:,}; the loss, {update.loss_sum / max(update.loss_count, 1):.4f}"
    if update.test is not None:
        lines.append(f"  its accuracy on {update.test.num_samples} samples that it sets aside")
    lines.append(f"samples of {parts.splits.name} stay here")
    return "\n".join(lines)
