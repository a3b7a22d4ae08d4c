"""The main function of a worker process of a federated run: trains clients, sums, finishes rounds."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.checkpoint import State, Store, model_state
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.compute import Metrics
from cordee.compute.devices import MemoryWatch
from cordee.core.errors import CheckpointError, DataError, StorageError, TrainingError
from cordee.core.fault_points import identify
from cordee.data.source import check_same
from cordee.monitoring import events
from cordee.monitoring.timeline import Phase, Timeline
from cordee.runs.checkpoints import open_store
from cordee.runs.dispatched.messages import Leave
from cordee.runs.dispatched.on_demand_worker import Attempt, work_until_ended
from cordee.runs.federated.board import BLOCK_PLACES
from cordee.runs.federated.facts import num_threads, partition_of
from cordee.runs.federated.link import FederatedLink
from cordee.runs.federated.messages import TakeTask, Task
from cordee.runs.federated.picture import draw_partition
from cordee.runs.federated.round_files import RoundFiles, open_round_files
from cordee.runs.federated.spool import RoundNumbers, Spool
from cordee.strategies.federated.aggregation import SumTree, blocks_of, check_update, contribute
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import ClientTrainer, Sent
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.privacy import Accountant
from cordee.strategies.federated.robust import aggregate
from cordee.strategies.federated.server import FederatedServer
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import Components, assemble
from cordee.training.measuring import make_policy, measure
from cordee.training.progress import Progress

log = logging.getLogger("cordee.worker")
PART = "rounds"  # of a checkpoint


def main(argument: dict[str, Any]) -> int:
    """Work until the run ends; return the exit code. Called in a fresh fork of the fork server."""
    spec = msgspec.convert(argument, MemberSpec)
    identify(spec.name)
    return 0 if work(spec) is None else 1


def work(spec: MemberSpec) -> Exception | None:
    """Work until the run ends; return why this worker could not continue, if it could not."""
    memory = MemoryWatch()

    def work_once(attempt: Attempt[FederatedLink]) -> None:
        job = spec.load_job()
        parts = assemble(job, Team(num_local_workers=spec.num_local, threads=num_threads(job)))
        attempt.stack.callback(parts.train.close)
        files = attempt.stack.enter_context(open_round_files(spec, attempt.link))
        store = attempt.stack.enter_context(open_store(spec, attempt.link))
        worker = FederatedWorker(parts, files, store)
        attempt.join()  # a failure before is not heard
        if spec.data:
            check_same(spec.data, parts.splits)
        _take_tasks(worker, attempt.link, spec, attempt.leave_asked, memory, attempt.timeline)

    return work_until_ended(spec, FederatedLink, work_once)


def _take_tasks(
    worker: FederatedWorker,
    link: FederatedLink,
    spec: MemberSpec,
    leave_asked: threading.Event,
    memory: MemoryWatch,
    timeline: Timeline,
) -> None:
    """Take tasks until there are no more."""
    done, num_tasks, waited_s = TakeTask(), 0, 0.0
    began_s = time.perf_counter()
    timeline.enter("training")
    while True:
        asked_s = time.perf_counter()
        timeline.switch(Phase.WAIT)
        reply = link.ask(done)
        waited_s += time.perf_counter() - asked_s
        if isinstance(reply, Leave):
            break
        assert isinstance(reply, Task)
        link.step = reply.round
        timeline.switch(Phase.COMPUTE)
        done = msgspec.structs.replace(worker.do(reply), leaves=leave_asked.is_set())
        num_tasks += 1
        timeline.end_step(reply.round + 1)
    link.emit(
        events.WorkerEnded(
            worker=spec.index,
            units=num_tasks,
            seconds=time.perf_counter() - began_s,
            waited_seconds=waited_s,
            peak_memory_bytes=memory.peak_bytes() or None,
        )
    )


class FederatedWorker:
    """One model, in place, that trains any client of the run. What it writes follows from what it reads."""

    def __init__(self, parts: Components, files: RoundFiles, store: Store) -> None:
        job = parts.job
        self._parts = parts
        self._files = files
        self._store = store
        self._spool = Spool(files)
        self._settings = settings_of(job)
        self._tables = self._settings.parts
        self._algorithm = make_algorithm(self._settings.use, job.python_path)
        self._partition = partition_of(parts)
        self._flat = FlatModel(parts.model, self._settings.is_personal)
        self._first = self._flat.shared.clone()
        self._first_buffers = self._flat.read_buffers()
        self._first_personal = self._flat.personal.clone()
        self._first_personal_buffers = self._flat.read_buffers(personal=True)
        self._trainer = ClientTrainer(job, self._settings, self._algorithm, self._flat, parts.computation, parts.recipe)
        self._codec = self._tables.compress.feedback(self._flat.shapes, self._first.dtype).codec
        self._sent: Sent | None = None  # that was read last
        self._accountant: Accountant | None = None
        if self._tables.privacy is not None:
            self._accountant = Accountant(self._settings, self._tables.privacy, self._partition.num_clients)

    def do(self, task: Task) -> TakeTask:
        """Carry out a task; return the report."""
        self._files.forget()
        done = TakeTask(done=task.what, round=task.round, index=task.index)
        match task.what:
            case "prepare":
                return msgspec.structs.replace(done, result=self._prepare(task))
            case "client":
                return msgspec.structs.replace(done, refused=self._train(task))
            case "merge":
                self._merge(task)
                return done
            case "finish":
                return msgspec.structs.replace(done, result=self._finish(task))

    def _new_server(self) -> FederatedServer:
        job = self._parts.job
        return FederatedServer(
            self._settings,
            self._algorithm,
            self._first,
            self._first_buffers,
            num_clients=self._partition.num_clients,
            noise_key=job.seed,
            python_path=job.python_path,
        )

    def _prepare(self, task: Task) -> str:
        """Have the files of the first round, or of the round after the checkpoint, ready."""
        server = self._new_server()
        self._spool.clear()
        if task.round:
            loaded = self._store.load_newest()
            assert loaded is not None
            self._load(loaded.state, server, task.round)
        else:
            splits = self._parts.splits
            self._files.keep_picture(
                lambda path: draw_partition(path, self._partition, splits.train, splits.num_classes)
            )
        self._spool.write_server(task.round, server.state_dict())
        self._spool.write_sent(server.sent())
        epsilon = self._accountant.epsilon(task.round) if self._accountant is not None else None
        return _encoded({"epsilon": epsilon})

    def _load(self, state: State, server: FederatedServer, number: int) -> None:
        part = state.part(PART)
        if "rounds" not in part.values.get("server", {}):
            raise CheckpointError(
                "the checkpoint is not that of a federated run: it has no server and no clients to continue with"
            )
        assert part.values["server"]["rounds"] == number, (part.values, number)
        self._check_fits(part.values.get("kept", {}), server)
        checkpoint.load_model_state(self._parts.model, state.part("model").tensors)
        server.load_state_dict(part.part("server"), self._flat.shared, part.tensors["buffers"])
        for client, vectors in _by_number(part.part("clients").tensors).items():
            self._spool.write_state(client, number - 1, vectors)
        for earlier, vectors in _by_number(part.part("sent").tensors).items():
            self._spool.write_sent(Sent.of(earlier, vectors))

    def _check_fits(self, kept: dict[str, str], server: FederatedServer) -> None:
        """Raise CheckpointError where what the server and the clients kept is not of these parameters and clients."""
        for key, now in self._describe_kept(server).items():
            if kept.get(key, now) != now:
                raise CheckpointError(
                    f"the checkpoint has what was kept of other {key}: strategy.personal, training.freeze, the model, "
                    "strategy.partition, the seed and the data must be as they were. Set them so, or start a new run"
                )

    def _describe_kept(self, server: FederatedServer) -> dict[str, str]:
        """Return what vectors that are kept belong to, as digests by a word for it; empty where none are kept."""
        found: dict[str, str] = {}
        if server.state_dict().tensors or self._trainer.is_stateful:
            found["parameters"] = self._flat.layout
        if self._trainer.is_stateful:
            order, starts = (tensor.numpy().tobytes() for tensor in (self._partition.order, self._partition.starts))
            found["clients"] = hashlib.sha256(order + starts).hexdigest()
        return found

    def _read_sent(self, number: int) -> Sent:
        if self._sent is None or self._sent.round != number:
            if not self._spool.has_sent(number):
                raise CheckpointError(
                    f"a client began with the parameters after round {number}, which the checkpoint does not have: "
                    "strategy.algorithm, clients_per_round and clock must be as they were in the run that made it"
                )
            self._sent = self._spool.read_sent(number)
        return self._sent

    def _train(self, task: Task) -> str:
        """Train a client; return why its update does not count, if it does not."""
        sent, partition = self._read_sent(task.base), self._partition
        name = partition.name(task.client)
        state = self._spool.read_state(task.client, task.round) if self._trainer.is_stateful else {}
        try:
            update = self._trainer.train(sent, state, self._parts.splits.train, partition.of(task.client), client=name)
            difference = self._codec.decode(update.payload)
            check_update(update, difference, sent.parameters, sent.buffers, name)
        except (DataError, TrainingError) as error:
            return str(error)
        discount = self._algorithm.discount
        factor = 1.0 if discount is None else discount(task.round - task.base)
        contribution, norm = contribute(self._settings, update, difference, factor)
        tests: list[tuple[int, int, int]] = [update.test] if update.test is not None else []
        numbers = RoundNumbers(
            update.loss_sum, update.loss_count, norm, norm, update.num_bytes, update.num_trained, tests
        )
        if update.state:
            self._spool.write_state(task.client, task.round, update.state)
        self._spool.write_leaf(task.round, task.index, contribution, numbers)
        return ""

    def _merge(self, task: Task) -> None:
        """Sum the places of a block. Done before by another, its leaves may be gone: then the sum is there."""
        number = task.round
        if self._spool.has_block(number, task.index):
            return
        block = blocks_of(task.num_places, BLOCK_PLACES)[task.index]
        tree = SumTree(task.num_places)
        numbers = RoundNumbers()
        places = set(task.places)
        for place in range(block.first, block.stop):
            if place not in places:
                tree.take(place, None)
                continue
            leaf, own = self._spool.read_leaf(number, place)
            tree.take(place, leaf)
            numbers = numbers.add(own)
        self._spool.write_block(number, task.index, tree.block(block), numbers)
        self._spool.remove_leaves(number, task.places)

    def _sum(self, task: Task) -> tuple[Any, RoundNumbers, torch.Tensor | None]:
        """Return the sum of a round, its numbers, and what a robust rule makes of it."""
        tree, numbers = SumTree(task.num_places), RoundNumbers()
        if not task.num_places:
            return None, numbers, None
        if self._tables.robust is None:
            for index, block in enumerate(blocks_of(task.num_places, BLOCK_PLACES)):
                total, own = self._spool.read_block(task.round, index)
                tree.take_block(block, total)
                numbers = numbers.add(own)
            return tree.result(), numbers, None
        places = set(task.places)
        for place in range(task.num_places):
            leaf = None
            if place in places:
                leaf, own = self._spool.read_leaf(task.round, place)
                numbers = numbers.add(own)
            tree.take(place, leaf)
        if not places:
            return None, numbers, None

        def read(start: int, stop: int) -> torch.Tensor:
            return self._spool.read_columns(task.round, task.places, start, stop)

        return tree.result(), numbers, aggregate(self._tables.robust, read, len(places), len(self._first))

    def _finish(self, task: Task) -> str:
        """Sum a round, take the outer step, evaluate and save; return what came of it."""
        started_s = time.perf_counter()
        server, sent = self._new_server(), self._read_sent(task.round)
        server.load_state_dict(self._spool.read_server(task.round), sent.parameters, sent.buffers)
        total, numbers, robust = self._sum(task)
        outcome = server.finish_round(total, robust)
        if not bool(torch.isfinite(server.parameters).all()):
            raise TrainingError(
                f"the parameters are not finite after round {task.round + 1}: lower optimizer.lr, or bound updates "
                "(strategy.max_norm)"
            )
        number = task.round + 1
        self._spool.write_server(number, server.state_dict())
        self._spool.write_sent(server.sent())
        self._spool.remove_before(task.round, min(task.oldest, task.round))
        self._show(server)
        result = self._describe(outcome.num_clients, outcome.step_norm, numbers, sent)
        progress = msgspec.convert(decode_values(task.progress.encode()), Progress)
        progress.step, progress.epoch, progress.samples = number, number, progress.samples + numbers.num_trained
        progress.loss_sum, progress.loss_count = numbers.loss_sum, numbers.loss_count
        stop = False
        if self._accountant is not None:
            result["epsilon"] = self._accountant.epsilon(number)
            result["is_spent"] = stop = not self._accountant.allows(number + 1)
        metrics: Metrics | None = None
        # A spent budget makes this the last round, which is always measured.
        if (task.evaluate or stop) and progress.evaluated_at != number and self._parts.test is not None:
            metrics = measure(self._parts, self._parts.model, self._parts.test)
            assert metrics is not None
            result["metrics"] = msgspec.to_builtins(metrics)
            policy = make_policy(self._parts)
            policy.patience = progress.patience
            stop |= progress.take_evaluation(metrics, number, policy, self._parts.recipe.schedule) is not None
        is_best = metrics is not None and self._parts.job.checkpoint.keep_best and progress.best_step == number
        result["sha"] = checkpoint.weights_sha256(self._parts.model.state_dict())
        if task.save or stop or is_best:
            result |= self._save(server, progress, result.get("epsilon"), task.oldest)
        result["seconds"] = time.perf_counter() - started_s
        return _encoded(result)

    @torch.no_grad()
    def _show(self, server: FederatedServer) -> None:
        """Make the worker's model that of the server; personal layers are those that every client begins with."""
        flat = self._flat
        flat.shared.copy_(server.parameters)
        flat.write_buffers(server.buffers)
        flat.personal.copy_(self._first_personal)
        flat.write_buffers(self._first_personal_buffers, personal=True)

    def _describe(self, num_clients: int, step_norm: float, numbers: RoundNumbers, sent: Sent) -> dict[str, Any]:
        vectors = [sent.parameters, sent.buffers, *sent.own.values()]
        return {
            "num_clients": num_clients,
            "step_norm": step_norm,
            "loss_sum": numbers.loss_sum,
            "loss_count": numbers.loss_count,
            "update_norm": numbers.norm_sum / num_clients if num_clients else None,
            "largest_update_norm": numbers.norm_max if num_clients else None,
            "bytes_sent": numbers.num_bytes,
            "bytes_received": num_clients * sum(vector.numel() * vector.itemsize for vector in vectors),
            "num_trained": numbers.num_trained,
            **describe_tests(numbers.tests),
        }

    def _save(self, server: FederatedServer, progress: Progress, epsilon: float | None, oldest: int) -> dict[str, Any]:
        """Save; return what came of it. Clients under way began no earlier than in round `oldest`."""
        began_s = time.perf_counter()
        settings = self._parts.job.checkpoint
        clients: dict[str, torch.Tensor] = {}
        if self._trainer.is_stateful:
            for client in self._spool.clients():
                kept = self._spool.read_state(client, server.num_rounds)
                clients |= {f"{client}.{name}": vector for name, vector in kept.items()}
        own = server.state_dict()
        sent = {
            f"{base}.{name}": vector
            for base in range(oldest, server.num_rounds)
            for name, vector in self._spool.read_sent(base).vectors.items()
        }
        federated = State.join(server=own, clients=State(clients, {}), sent=State(sent, {}))
        values = {"server": own.values, "epsilon": epsilon, "kept": self._describe_kept(server)}
        federated = State({**federated.tensors, "buffers": server.buffers}, values)
        state = State.join(model=State(model_state(self._parts.model), {}), **{PART: federated})
        progressed = {**state.values, "progress": msgspec.to_builtins(progress)}
        protected = (progress.best_step,) if settings.keep_best else ()
        try:
            path = self._store.save(
                progress.step, State(state.tensors, progressed), keep=settings.keep, protected=protected
            )
        except StorageError as error:
            return {"problem": str(error)}
        return {"path": str(path), "save_seconds": time.perf_counter() - began_s}


def _by_number(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Return tensors with names such as "3.control" by their numbers: of clients, or of rounds. Pure."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        found.setdefault(int(number), {})[key] = tensor
    return found


def describe_tests(tests: list[tuple[int, int, int]]) -> dict[str, float]:
    """Return what clients measured on the samples that they had set aside; empty where they had none. Pure."""
    if not tests:
        return {}
    before = sorted(right / count for count, right, _ in tests)
    after = [right / count for count, _, right in tests]
    num_worst = math.ceil(len(before) / 10)
    mean = sum(before) / len(before)
    return {
        "client_accuracy": mean,
        "worst_decile_accuracy": sum(before[:num_worst]) / num_worst,
        "personal_gain": sum(after) / len(after) - mean,
    }


def _encoded(values: dict[str, Any]) -> str:
    return encode_values(values).decode()
