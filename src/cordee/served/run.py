"""A served run, seen from the launcher: starts its processes, replaces those that are lost, sums up."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.assembly import Assembly
from cordee.cluster.fork_server import Exited
from cordee.cluster.local import LocalEngine, describe_exit
from cordee.cluster.restarts import MOST_LOSSES_IN_ONE_STEP
from cordee.communication.calls import Connection
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError, JobError, StorageError, TrainingError
from cordee.core.stopping import StopPolicy
from cordee.data import Ledger, Unit
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.monitoring.summary import Status
from cordee.progress import Progress
from cordee.served.dispatcher import Dispatcher, Outcome
from cordee.served.link import ProcessOrder
from cordee.served.messages import LIMITS, SERVED
from cordee.served.plan import RunPlan
from cordee.strategies.parameter_server.messages import LIMITS as PARAMETER_LIMITS
from cordee.strategies.parameter_server.messages import PARAMETERS, Adopt, Fence
from cordee.strategies.parameter_server.strategy import settings_of
from cordee.version import __version__

log = logging.getLogger("cordee.served")

STARTUP_TIMEOUT_S = 120.0  # importing torch on a busy machine, and loading the data
TICK_S = 0.02
_TARGETS = {role: f"cordee.served.{role}:main" for role in ("worker", "server", "evaluator")}


def check_served(parts: Assembly) -> None:
    """Raise JobError for a job that cannot be served, before anything is started."""
    if parts.splits.train.num_samples is None:
        raise JobError(
            "strategy 'parameter_server' hands out samples by their number, and a stream has none: "
            "use a Dataset with a length, or strategy 'data_parallel'"
        )


class ServedRun:
    """One run with local workers and servers. `lead` takes it from start to end."""

    def __init__(
        self,
        parts: Assembly,
        directory: RunDirectory,
        monitor: Monitor,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._job = parts.job
        self._settings = settings_of(parts.job)
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop
        self._started = time.time()
        self._processes: dict[int, ProcessOrder] = {}  # by its number at the engine
        self._num_replicas: dict[int, int] = {}  # the newest replica of each server
        self._numbers = 0
        self._num_replaced = 0
        self._num_lost_over: Counter[int] = Counter()  # workers lost over each unit of work
        self._recoveries = 0
        self._recovering: list[tuple[str, str, float, int]] = []  # role, name, when and at which step it was lost
        self._next_worker = self._job.strategy.workers
        self._run_id = secrets.token_hex(8)
        self._server_keys, (self._client_keys,) = make_keys()
        self._progress = Progress()
        self._peak_memory_bytes = 0  # of the worker that took most
        self._begun_s = time.perf_counter()

    def lead(self, engine: LocalEngine, *, resume: bool) -> Summary:
        """Train, and return the summary. Raises TrainingError that names the process that failed, and why."""
        samples_before = self._load_progress(resume)
        plan = self._plan()
        first = plan.first_step(self._progress.epoch, self._progress.batch)
        if resume and (over := self._summarise_ended(plan, first)) is not None:
            return over
        num_shares = self._job.training.num_shards or self._job.strategy.workers
        ledger = Ledger(plan.num_samples, plan.batch_size, num_shares, plan.num_steps, first)
        speaker = Speaker(run=self._run_id, name="dispatcher", incarnation=time.time_ns())
        base_s = self._progress.elapsed_s
        with ServerChannel("tcp://127.0.0.1:*", speaker, Codec(SERVED, LIMITS), self._server_keys) as channel:
            dispatcher = Dispatcher(
                channel,
                plan,
                ledger,
                self._progress,
                emit=self._take_event,
                show=lambda step, loss: self._monitor.progress(step=step, loss=loss),
                failure_timeout_s=self._job.cluster.failure_timeout_s,
                num_servers=self._settings.servers,
                wants_followers=self._settings.replicas > 1,
                elapsed_s=lambda: base_s + time.perf_counter() - self._begun_s,
                rate=self._rate,
            )
            self._announce()
            for index in range(self._settings.servers):
                for _ in range(self._settings.replicas):
                    self._start_server(engine, channel.address, index, resume=resume)
            self._start(engine, channel.address, "evaluator", 0)
            for index in range(self._job.strategy.workers):
                self._start(engine, channel.address, "worker", index)
            self._attend(engine, dispatcher)
            self._dismiss(engine, dispatcher)
        self._progress.elapsed_s = base_s + time.perf_counter() - self._begun_s
        if dispatcher.outcome.problem:
            raise StorageError(
                f"step {self._progress.step} was reached, but its weights could not be saved: "
                f"{dispatcher.outcome.problem}"
            )
        return self._summarise(dispatcher, plan, samples_before)

    def _take_event(self, kind: str, **fields: Any) -> None:
        if kind == "worker_ended":
            self._peak_memory_bytes = max(self._peak_memory_bytes, fields.get("peak_memory_bytes") or 0)
        self._monitor.emit(kind, **fields)

    def _plan(self) -> RunPlan:
        parts = self._parts
        num_samples = parts.splits.train.num_samples
        assert num_samples is not None and parts.total_steps is not None
        policy = StopPolicy(self._job.stop)
        policy.patience = self._progress.patience
        return RunPlan(
            self._job, self._settings, num_samples, parts.total_steps, policy, parts.splits.num_classes is not None
        )

    def _load_progress(self, resume: bool) -> int:
        loaded = checkpoint.load_newest(self._directory.checkpoints) if resume else None
        if loaded is not None:
            for path, reason in loaded.damaged:
                self._monitor.emit(
                    "warning", message=f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}"
                )
            self._progress = msgspec.convert(loaded.state.values["progress"], Progress)
        elif resume:
            self._monitor.emit("warning", message="the run has no checkpoint yet: starting from the beginning")
        return self._progress.samples

    def _start(
        self, engine: LocalEngine, dispatcher: str, role: str, index: int, *, replica: int = 0, resume: bool = False
    ) -> str:
        order = ProcessOrder(
            role=role,
            index=index,
            replica=replica,
            run_dir=str(self._directory.path.absolute()),
            run_id=self._run_id,
            dispatcher=dispatcher,
            client_keys=self._client_keys.to_text(),
            server_keys=self._server_keys.to_text() if role == "server" else "",
            failure_timeout_s=self._job.cluster.failure_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            resume=resume,
            num_local=self._job.strategy.workers,
        )
        self._numbers += 1
        self._processes[self._numbers] = order
        engine.start(self._numbers, _TARGETS[role], msgspec.to_builtins(order), {}, self._log_file(order.name))
        return order.name

    def _start_server(self, engine: LocalEngine, dispatcher: str, index: int, *, resume: bool) -> str:
        self._num_replicas[index] = self._num_replicas.get(index, -1) + 1
        return self._start(engine, dispatcher, "server", index, replica=self._num_replicas[index], resume=resume)

    def _log_file(self, name: str) -> Path:
        return self._directory.path / "logs" / f"{name.removesuffix('-0') if name == 'evaluator-0' else name}.log"

    def _attend(self, engine: LocalEngine, dispatcher: Dispatcher) -> None:
        """Look after the processes until the run is over."""
        stop_s = self._job.stop.time_s
        started_s = time.monotonic()
        while not dispatcher.is_over:
            dispatcher.serve(TICK_S)
            self._take_reports(engine, dispatcher)
            self._check_silence(engine, dispatcher, started_s)
            self._check_failures(dispatcher)
            self._pair_servers(dispatcher)
            self._note_recoveries()
            if self._should_stop():
                dispatcher.stop("interrupt")
            elif stop_s is not None and dispatcher.elapsed_s() >= stop_s:
                dispatcher.stop("time")
            if dispatcher.has_only_refusals:
                raise TrainingError(
                    f"the servers refused 100 gradients in a row at step {self._progress.step + 1}: none was finite. "
                    "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set strategy.clip_norm = 1.0"
                )

    def _take_reports(self, engine: LocalEngine, dispatcher: Dispatcher) -> None:
        for report in engine.reports():
            if isinstance(report, Exited):
                order = self._processes.pop(report.index)
                if not self._has_left(dispatcher, order, report.status):
                    self._replace(engine, dispatcher, order, describe_exit(report), report.status)

    def _has_left(self, dispatcher: Dispatcher, order: ProcessOrder, status: int) -> bool:
        """Whether a process ended in order. Its goodbye may come after the news of its end."""
        deadline = time.monotonic() + (1.0 if status == 0 else 0.0)
        while True:
            hearing = dispatcher.hearings.get(order.name)
            if hearing is not None and hearing.is_done:
                return True
            if dispatcher.is_over or time.monotonic() >= deadline:
                return dispatcher.is_over
            dispatcher.serve(TICK_S)

    def _replace(self, engine: LocalEngine, dispatcher: Dispatcher, order: ProcessOrder, how: str, status: int) -> None:
        """A process was lost: say so, and start another in its place."""
        dispatcher.serve(0.0)  # its own account may have come in just before
        self._check_failures(dispatcher)
        name, role, index = order.name, order.role, order.index
        hearing = dispatcher.hearings.get(name)
        step, incarnation = (hearing.step, hearing.incarnation) if hearing else (0, 0)
        units = dispatcher.lose(name)
        self._monitor.emit("worker_lost", worker=index, role=role, step=step, reason=how)
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            raise TrainingError(f"{name} {how} (in step {step + 1}); its log is {self._log_file(name)}")
        self._refuse_deadly(units, f"{name} {how}")
        limit = self._job.cluster.max_restarts
        if self._num_replaced >= limit:
            raise TrainingError(
                f"{name} {how} (in step {step + 1}), and {limit} processes were replaced already "
                f"(cluster.max_restarts); its log is {self._log_file(name)}"
            )
        self._num_replaced += 1
        self._recoveries += 1
        self._recovering.append((role, name, time.perf_counter(), self._progress.step))
        address = dispatcher.channel.address
        if role == "worker":
            successor = self._start(engine, address, role, self._next_worker)
            self._next_worker += 1
            self._fence(dispatcher, name, incarnation)
            given = "1 unit of its work goes" if len(units) == 1 else f"{len(units)} units of its work go"
            message = f"{given} to others, {successor} takes its place"
        elif role == "server":
            message = self._replace_server(engine, dispatcher, index)
        else:
            self._start(engine, address, role, 0)
            message = "another takes its place"
        self._monitor.emit("warning", message=f"{name} {how}: {message}")

    def _refuse_deadly(self, units: Sequence[Unit], last: str) -> None:
        """Raise TrainingError for work that every worker is lost over: the next one would be, too."""
        for unit in units:
            self._num_lost_over[unit.number] += 1
            if self._num_lost_over[unit.number] >= MOST_LOSSES_IN_ONE_STEP:
                raise TrainingError(
                    f"a worker was lost in each of {MOST_LOSSES_IN_ONE_STEP} attempts at samples {unit.start} to "
                    f"{unit.stop - 1} of epoch {unit.epoch + 1} (step {unit.step + 1}); last {last}"
                )

    def _replace_server(self, engine: LocalEngine, dispatcher: Dispatcher, index: int) -> str:
        is_served = dispatcher.is_served(index)
        successor = self._start_server(engine, dispatcher.channel.address, index, resume=not is_served)
        if is_served:
            return f"no update is lost, {successor} will be the second server"
        saved = checkpoint.list_checkpoints(self._directory.checkpoints)
        kept = f"its parameters go on from {saved[-1].name}" if saved else "its parameters start from the beginning"
        return f"{kept}, its updates since then (the run is at step {self._progress.step}) are lost"

    def _note_recoveries(self) -> None:
        """Tell how long it took from a loss to the next step that was committed."""
        for entry in [entry for entry in self._recovering if self._progress.step > entry[3]]:
            self._recovering.remove(entry)
            role, name, lost_s, _ = entry
            self._monitor.emit("recovery", role=role, lost=name, seconds=time.perf_counter() - lost_s)

    def _pair_servers(self, dispatcher: Dispatcher) -> None:
        """Have servers give their seconds everything, where that is still to be done."""
        for index, serving, follower in dispatcher.unfollowed():
            with contextlib.suppress(CommunicationError):  # one of them is gone, which its exit will tell
                with self._connect(serving) as connection:
                    connection.call(Adopt(follower), timeout_s=STARTUP_TIMEOUT_S)
                dispatcher.note_following(index)

    def _connect(self, address: str) -> Connection:
        speaker = Speaker(run=self._run_id, name="launcher", incarnation=time.time_ns())
        return Connection(
            address, speaker, PARAMETERS, self._client_keys, failure_timeout_s=2.0, limits=PARAMETER_LIMITS
        )

    def _fence(self, dispatcher: Dispatcher, worker: str, incarnation: int) -> None:
        """Tell the servers that nothing the worker says counts any more."""
        for address in dispatcher.addresses:
            # One that is gone has nothing to refuse.
            with contextlib.suppress(CommunicationError), self._connect(address) as connection:
                connection.call(Fence(worker, incarnation), timeout_s=1.0)

    def _check_silence(self, engine: LocalEngine, dispatcher: Dispatcher, started_s: float) -> None:
        """Kill what has frozen: its exit then tells the rest."""
        now_s = time.monotonic()
        for number, order in list(self._processes.items()):
            name = order.name
            hearing = dispatcher.hearings.get(name)
            if hearing is None:
                if now_s - started_s > STARTUP_TIMEOUT_S and self._num_replaced == 0:
                    raise TrainingError(f"{name} did not start within {STARTUP_TIMEOUT_S:g} s")
                continue
            if not hearing.is_done and now_s - hearing.heard_s > self._job.cluster.failure_timeout_s:
                if engine.is_working(number):
                    hearing.heard_s = now_s
                    continue
                self._monitor.emit(
                    "warning", message=f"{name} is frozen: no sign of life for {now_s - hearing.heard_s:.1f} s"
                )
                hearing.heard_s = now_s
                engine.signal(number, signal.SIGKILL)

    def _check_failures(self, dispatcher: Dispatcher) -> None:
        causes = [entry for entry in dispatcher.failures if not entry[1].is_consequence]
        for name, failure in causes or dispatcher.failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            where = f"(in step {failure.step + 1}); its log is {self._log_file(name)}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def _dismiss(self, engine: LocalEngine, dispatcher: Dispatcher) -> None:
        """Let everybody end in order; what is still there is ended by the engine."""
        deadline = time.monotonic() + self._job.cluster.failure_timeout_s
        while time.monotonic() < deadline and any(
            not hearing.is_done for hearing in dispatcher.hearings.values() if hearing.role != "server"
        ):
            dispatcher.dismiss()
            dispatcher.serve(TICK_S)
        for number, order in self._processes.items():
            if order.role == "server":
                engine.signal(number, signal.SIGTERM)

    def _rate(self, step: int) -> float | None:
        lr = self._job.optimizer.args.get("lr")
        recipe = self._parts.recipe
        return None if lr is None else float(lr) * recipe.schedule(step) * recipe.lr_factor

    def _announce(self) -> None:
        self._monitor.emit(
            "run_started",
            run_dir=str(self._directory.path),
            start_step=self._progress.step,
            servers=self._settings.servers,
            **self._parts.describe(),
        )

    def _summarise_ended(self, plan: RunPlan, first: int) -> Summary | None:
        """Return the summary of a resumed run that had ended already: going on would give other weights."""
        progress = self._progress
        reason = None
        is_measured = progress.metrics is not None and progress.evaluated_at == progress.step
        if progress.metrics is not None and is_measured:
            reason = plan.policy.verdict(progress.metrics.loss, progress.metrics.accuracy)
        if progress.step and plan.policy.is_time_up(progress.elapsed_s):
            reason = reason or "time"
        is_done = first >= plan.num_steps and (is_measured or self._parts.test is None)
        if reason is None and not is_done:
            return None
        loaded = checkpoint.load_newest(self._directory.checkpoints)
        assert loaded is not None
        outcome = Outcome(stopped_by=reason, metrics=progress.metrics)
        outcome.weights_sha256 = checkpoint.weights_sha256(loaded.state.part("model").tensors)
        self._announce()
        return self._summary(outcome, plan, None)

    def _summarise(self, dispatcher: Dispatcher, plan: RunPlan, samples_before: int) -> Summary:
        training_s = time.perf_counter() - (dispatcher.first_work_s or self._begun_s)
        trained = self._progress.samples - samples_before
        return self._summary(dispatcher.outcome, plan, trained / training_s if trained else None)

    def _summary(self, outcome: Outcome, plan: RunPlan, samples_per_second: float | None) -> Summary:
        progress, parts = self._progress, self._parts
        metrics = outcome.metrics if outcome.metrics and progress.evaluated_at == progress.step else None
        stopped_by = outcome.stopped_by or ("steps" if plan.is_cut_short else None)
        status: Status = "interrupted" if stopped_by == "interrupt" else "stopped" if stopped_by else "completed"
        ages = {str(age): count for age, count in enumerate(outcome.ages) if count}
        if ages:
            self._monitor.emit("staleness", ages=ages)
        return Summary(
            status=status,
            name=parts.job.name,
            strategy=parts.job.strategy.name,
            workers=parts.job.strategy.workers,
            device=str(parts.computation.device),
            parameters=parts.num_parameters,
            steps=progress.step,
            epochs=progress.epoch,
            samples=progress.samples,
            wall_seconds=progress.elapsed_s,
            samples_per_second=samples_per_second,
            checkpoint_stall_seconds=outcome.stall_s,
            best_step=progress.best_step if progress.best_step >= 0 else None,
            step_seconds=progress.samples / progress.step / samples_per_second if samples_per_second else None,
            peak_memory_bytes=self._peak_memory_bytes or None,
            train_loss=progress.loss_sum / progress.loss_count if progress.loss_count else None,
            test_loss=metrics.loss if metrics else None,
            test_accuracy=metrics.accuracy if metrics else None,
            test_top5_accuracy=metrics.top5_accuracy if metrics else None,
            weights_sha256=outcome.weights_sha256 or None,
            recoveries=self._recoveries,
            staleness=ages or None,
            stopped_by=stopped_by,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
            started=self._started,
            ended=time.time(),
        )
