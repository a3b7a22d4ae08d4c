"""The coordinator of a served run: starts its processes, dispatches work, replaces what is lost, sums up.

A process of its own. Each turn it hears what has come in, decides, writes down what it knows and what it is about to
do, and does it; killed at any moment, another goes on from there (`cluster/journal.py`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee import checkpoint
from cordee.cluster.control import Control, check_far, write_control
from cordee.cluster.fork_server import Exited
from cordee.cluster.launcher_link import LauncherLink, lead_run, open_channel
from cordee.cluster.local import describe_exit, is_alive, is_stopped
from cordee.cluster.restarts import MOST_LOSSES_IN_ONE_STEP, Shortage, describe_wait
from cordee.communication.calls import Connection
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys, ServerKeys
from cordee.communication.messages import Enlist, Scale
from cordee.communication.this_host import find_listening, host_id, own_address
from cordee.communication.wire import Codec
from cordee.compute import make_schedule
from cordee.core import Job
from cordee.core.errors import CommunicationError, JobError, StorageError, TrainingError
from cordee.core.stopping import StopPolicy
from cordee.data import Ledger, Unit
from cordee.monitoring import Summary
from cordee.progress import Progress
from cordee.served.accounts import MOST_REFUSALS
from cordee.served.dispatcher import Dispatcher
from cordee.served.link import ProcessOrder
from cordee.served.memory import Outcome
from cordee.served.messages import LIMITS, SERVED
from cordee.served.orders import ServedOrder
from cordee.served.plan import RunPlan
from cordee.served.processes import Loss, Process, RunMemory
from cordee.served.summing import sum_up
from cordee.strategies.parameter_server.messages import LIMITS as PARAMETER_LIMITS
from cordee.strategies.parameter_server.messages import PARAMETERS, Adopt, Fence
from cordee.strategies.parameter_server.strategy import settings_of

log = logging.getLogger("cordee.served")

STARTUP_TIMEOUT_S = 120.0  # importing torch on a busy machine, and loading the data
TICK_S = 0.02
_TARGETS = {role: f"cordee.served.{role}:main" for role in ("worker", "server", "evaluator")}


def main(argument: dict[str, Any]) -> int:
    """Lead the run to its end; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, ServedOrder)
    return lead_run(order, lambda launcher: ServedCoordinator(order, launcher).lead())


class ServedCoordinator:
    """One run with local workers and servers. `lead` takes it from where it is to its end."""

    _dispatcher: Dispatcher

    def __init__(self, order: ServedOrder, launcher: LauncherLink) -> None:
        self._order = order
        self._launcher = launcher
        self._facts = order.facts
        self._run_dir = Path(order.run_dir)
        job = self._job = Job.load(self._run_dir / "job.toml")
        self._settings = settings_of(job)
        self._client_keys = ClientKeys.from_text(order.client_keys)
        self._schedule = make_schedule(job.schedule, order.facts.total_steps, job.python_path)
        if launcher.restored is not None:
            self._memory = msgspec.msgpack.decode(launcher.restored, type=RunMemory)
            assert self._memory.dispatcher is not None
            self._progress = self._memory.dispatcher.progress
        else:
            progress = self._progress = self._load_progress(order.resume)
            self._memory = RunMemory(
                address="tcp://127.0.0.1:*",
                public=find_listening(job.cluster.address).address if job.cluster.address else "",
                next_worker=job.strategy.workers,
                started=time.time(),
                begun_s=time.perf_counter(),
                base_s=progress.elapsed_s,
                samples_before=progress.samples,
            )

    def lead(self) -> Summary:
        """Train, and return the summary. Raises TrainingError that names the process that failed, and why."""
        memory, job = self._memory, self._job
        plan = self._plan()
        first = plan.first_step(self._progress.epoch, self._progress.batch)
        is_new = memory.dispatcher is None
        if is_new and self._order.resume and (over := self._summarise_ended(plan, first)) is not None:
            return over
        num_shares = job.training.num_shards or job.strategy.workers
        ledger = Ledger(plan.num_samples, plan.batch_size, num_shares, plan.num_steps, first)
        keys = ServerKeys.from_text(self._order.server_keys)
        codec = Codec(SERVED, LIMITS)
        with open_channel(memory.address, self._order.run_id, codec, keys, memory.public) as channel:
            memory.address, memory.public = channel.address, channel.public
            dispatcher = self._dispatcher = Dispatcher(
                channel,
                plan,
                ledger,
                self._progress,
                emit=self._take_event,
                show=self._launcher.progress,
                elapsed_s=self._elapsed_s,
                rate=self._rate,
                obey=self._obey,
                memory=memory.dispatcher,
            )
            if is_new:
                self._begin()
            else:
                log.warning("taking up at step %d", self._progress.step)
            self._commit()
            run_id, control_keys = self._order.run_id, self._order.control_keys
            write_control(self._run_dir, Control.of(channel.address, run_id, control_keys, channel.public))
            self._attend(dispatcher)
            self._dismiss(dispatcher)
        self._progress.elapsed_s = self._elapsed_s()
        if dispatcher.outcome.problem:
            raise StorageError(
                f"step {self._progress.step} was reached, but its weights could not be saved: "
                f"{dispatcher.outcome.problem}"
            )
        if dispatcher.outcome.verdict:
            saved = f"Step {self._progress.step} is saved: --resume goes on from it"
            raise TrainingError(f"{dispatcher.outcome.verdict}. {saved}")
        return self._summarise(dispatcher, plan)

    def _begin(self) -> None:
        self._announce()
        for index in range(self._settings.servers):
            for _ in range(self._settings.replicas):
                self._start_server(index, resume=self._order.resume)
        self._start("evaluator", 0)
        for index in range(self._job.strategy.workers):
            self._start("worker", index)

    def _commit(self) -> None:
        """Write down what is known and what follows, then do it."""
        if self._launcher.has_pending or self._dispatcher.has_pending:
            self._memory.dispatcher = self._dispatcher.recall()
            self._launcher.commit(msgspec.msgpack.encode(self._memory))
            self._dispatcher.flush()

    def _elapsed_s(self) -> float:
        return self._memory.base_s + time.perf_counter() - self._memory.begun_s

    def _take_event(self, kind: str, **fields: Any) -> None:
        if kind == "worker_ended":
            peak = fields.get("peak_memory_bytes") or 0
            self._memory.peak_memory_bytes = max(self._memory.peak_memory_bytes, peak)
        self._launcher.emit(kind, **fields)

    def _plan(self) -> RunPlan:
        facts = self._facts
        policy = StopPolicy(self._job.stop)
        policy.patience = self._progress.patience
        return RunPlan(self._job, self._settings, facts.num_samples, facts.total_steps, policy, facts.counts_classes)

    def _load_progress(self, resume: bool) -> Progress:
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints") if resume else None
        if loaded is not None:
            for path, reason in loaded.damaged:
                self._launcher.emit(
                    "warning", message=f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}"
                )
            return msgspec.convert(loaded.state.values["progress"], Progress)
        if resume:
            self._launcher.emit("warning", message="the run has no checkpoint yet: starting from the beginning")
        return Progress()

    def _obey(self, wish: Scale | Enlist) -> str:
        """Do what somebody with the control file wants; return what is said to it. Raises JobError."""
        if isinstance(wish, Scale) and wish.threads:
            raise JobError("workers of parameter servers keep their threads: leave --threads out")
        if isinstance(wish, Scale):
            return self._scale(wish.num_workers)
        is_far = wish.host_id != host_id()
        if is_far:
            check_far(wish, self._memory.public)
        index = self._take_number()
        self._memory.guests[index] = wish.pid
        order = self._order_for(Process("worker", index, 0), resume=False)
        if not is_far:
            return msgspec.json.encode(msgspec.structs.replace(order, launcher_pid=self._order.launcher_pid)).decode()
        self._memory.far[index] = time.monotonic()
        order = msgspec.structs.replace(
            order,
            dispatcher=self._memory.public,
            job=(self._run_dir / "job.toml").read_text(encoding="utf-8"),
            data=self._facts.data,
            num_local=1,
        )
        return msgspec.json.encode(order).decode()

    def _scale(self, num_workers: int) -> str:
        """Start workers, or have the last ones leave. Returns at once what will happen."""
        if num_workers < self._job.cluster.min_workers:
            raise JobError(f"cluster.min_workers = {self._job.cluster.min_workers} is more than {num_workers}")
        before = self._workers()
        for name in before[num_workers:]:
            if name not in self._dispatcher.hearings:
                raise JobError(f"{name} is still starting: try again in a moment")
            self._dispatcher.hearings[name].is_leaving = True
        for _ in range(num_workers - len(before)):
            self._start("worker", self._take_number())
        self._launcher.emit("scale", workers=num_workers, before=len(before), step=self._progress.step)
        return f"from {len(before)} to {num_workers} workers"

    def _workers(self) -> list[str]:
        """Return the workers that are there to stay, or on their way, the oldest first."""
        hearings = self._dispatcher.hearings
        started = [process.index for process in self._memory.processes.values() if process.role == "worker"]
        names = [f"worker-{index}" for index in sorted({*started, *self._memory.guests})]
        return [name for name in names if name not in hearings or name in self._dispatcher.active_workers]

    def _take_number(self) -> int:
        self._memory.next_worker += 1
        return self._memory.next_worker - 1

    def _start(self, role: str, index: int, *, replica: int = 0, resume: bool = False) -> str:
        process = Process(role, index, replica)
        self._memory.numbers += 1
        number = self._memory.numbers
        self._memory.processes[number] = process
        order = msgspec.to_builtins(self._order_for(process, resume=resume))
        self._launcher.start(number, _TARGETS[role], order, {}, self._log_file(process.name))
        return process.name

    def _order_for(self, process: Process, *, resume: bool) -> ProcessOrder:
        return ProcessOrder(
            role=process.role,
            index=process.index,
            replica=process.replica,
            run_dir=self._order.run_dir,
            run_id=self._order.run_id,
            dispatcher=self._memory.address,
            client_keys=self._order.client_keys,
            server_keys=self._order.server_keys if process.role == "server" else "",
            failure_timeout_s=self._job.cluster.failure_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            resume=resume,
            host_address=own_address(self._memory.public) if self._memory.public else "",
            num_local=self._job.strategy.workers,
        )

    def _start_server(self, index: int, *, resume: bool) -> str:
        replicas = self._memory.num_replicas
        replicas[index] = replicas.get(index, -1) + 1
        return self._start("server", index, replica=replicas[index], resume=resume)

    def _log_file(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name.removesuffix('-0') if name == 'evaluator-0' else name}.log"

    def _attend(self, dispatcher: Dispatcher) -> None:
        """Look after the processes until the run is over."""
        stop_s = self._job.stop.time_s
        started_s = time.monotonic()
        while not dispatcher.is_over:
            self._commit()
            dispatcher.serve(TICK_S)
            self._commit()  # workers wait for their answers; nobody waits for what follows
            self._take_reports(dispatcher)
            self._check_silence(dispatcher, started_s)
            self._check_guests(dispatcher)
            self._check_failures(dispatcher)
            self._pair_servers(dispatcher)
            self._note_recoveries()
            self._check_shortage(dispatcher)
            if self._launcher.should_stop():
                dispatcher.stop("interrupt")
            elif stop_s is not None and dispatcher.elapsed_s() >= stop_s:
                dispatcher.stop("time")
            if dispatcher.accounts.has_only_refusals:
                step = self._progress.step + 1
                raise TrainingError(
                    f"the servers refused {MOST_REFUSALS} gradients in a row at step {step}: none was finite. "
                    "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set strategy.clip_norm = 1.0"
                )

    def _take_reports(self, dispatcher: Dispatcher) -> None:
        for report in self._launcher.reports():
            if isinstance(report, Exited):
                process = self._memory.processes.pop(report.index, None)
                if process is not None and not self._has_left(dispatcher, process):
                    self._replace(dispatcher, process, describe_exit(report), report.status)

    def _has_left(self, dispatcher: Dispatcher, process: Process) -> bool:
        """Whether a process ended in order: it said goodbye, and was heard, before."""
        hearing = dispatcher.hearings.get(process.name)
        if hearing is None and process.name in self._memory.away:
            return True
        return dispatcher.is_over or (hearing is not None and hearing.is_done)

    def _replace(self, dispatcher: Dispatcher, process: Process, how: str, status: int) -> None:
        """A process was lost: say so, and start another in its place."""
        dispatcher.serve(0.0)  # its own account may have come in just before
        self._check_failures(dispatcher)
        name, role, index = process.name, process.role, process.index
        hearing = dispatcher.hearings.get(name)
        step, incarnation = (hearing.step, hearing.incarnation) if hearing else (0, 0)
        units = dispatcher.lose(name)
        self._launcher.emit("worker_lost", worker=index, role=role, step=step, reason=how)
        if status >= 0:  # it ended by itself, which it may not: the next would do the same
            raise TrainingError(f"{name} {how} (in step {step + 1}); its log is {self._log_file(name)}")
        self._refuse_deadly(units, f"{name} {how}")
        limit = self._job.cluster.max_restarts
        self._memory.last_loss = f"{name} {how} (in step {step + 1})" if role == "worker" else self._memory.last_loss
        if self._memory.num_replaced >= limit and role == "worker":
            self._fence(dispatcher, name, incarnation)
            note = f"no replacement is left (cluster.max_restarts = {limit}), {_given(units)} to others"
            self._launcher.emit("warning", message=f"{name} {how}: {note}")
            return
        if self._memory.num_replaced >= limit:
            raise TrainingError(
                f"{name} {how} (in step {step + 1}), and {limit} processes were replaced already "
                f"(cluster.max_restarts); its log is {self._log_file(name)}"
            )
        self._memory.num_replaced += 1
        self._memory.recoveries += 1
        self._memory.recovering.append(Loss(role, name, time.perf_counter(), self._progress.step))
        if role == "worker":
            successor = self._start(role, self._take_number())
            self._fence(dispatcher, name, incarnation)
            message = f"{_given(units)} to others, {successor} takes its place"
        elif role == "server":
            message = self._replace_server(dispatcher, index)
        else:
            self._start(role, 0)
            message = "another takes its place"
        self._launcher.emit("warning", message=f"{name} {how}: {message}")

    def _refuse_deadly(self, units: Sequence[Unit], last: str) -> None:
        """Raise TrainingError for work that every worker is lost over: the next one would be, too."""
        lost_over = self._memory.num_lost_over
        for unit in units:
            lost_over[unit.number] = lost_over.get(unit.number, 0) + 1
            if lost_over[unit.number] >= MOST_LOSSES_IN_ONE_STEP:
                raise TrainingError(
                    f"a worker was lost in each of {MOST_LOSSES_IN_ONE_STEP} attempts at samples {unit.start} to "
                    f"{unit.stop - 1} of epoch {unit.epoch + 1} (step {unit.step + 1}); last {last}"
                )

    def _replace_server(self, dispatcher: Dispatcher, index: int) -> str:
        is_served = dispatcher.servers.is_served(index)
        successor = self._start_server(index, resume=not is_served)
        if is_served:
            return f"no update is lost, {successor} will be the second server"
        saved = checkpoint.list_checkpoints(self._run_dir / "checkpoints")
        kept = f"its parameters go on from {saved[-1].name}" if saved else "its parameters start from the beginning"
        return f"{kept}, its updates since then (the run is at step {self._progress.step}) are lost"

    def _note_recoveries(self) -> None:
        """Tell how long it took from a loss to the next step that was committed."""
        for loss in [loss for loss in self._memory.recovering if self._progress.step > loss.step]:
            self._memory.recovering.remove(loss)
            seconds = time.perf_counter() - loss.at_s
            self._launcher.emit("recovery", role=loss.role, lost=loss.name, seconds=seconds)

    def _pair_servers(self, dispatcher: Dispatcher) -> None:
        """Have servers give their seconds everything, where that is still to be done."""
        for index, serving, follower in dispatcher.servers.unfollowed():
            with contextlib.suppress(CommunicationError):  # one of them is gone, which its exit will tell
                with self._connect(serving) as connection:
                    connection.call(Adopt(follower), timeout_s=STARTUP_TIMEOUT_S)
                dispatcher.servers.note_following(index)

    def _connect(self, address: str) -> Connection:
        speaker = Speaker(run=self._order.run_id, name="launcher", incarnation=time.time_ns())
        return Connection(
            address, speaker, PARAMETERS, self._client_keys, failure_timeout_s=2.0, limits=PARAMETER_LIMITS
        )

    def _fence(self, dispatcher: Dispatcher, worker: str, incarnation: int) -> None:
        """Tell the servers that nothing the worker says counts any more."""
        for address in dispatcher.servers.addresses:
            # One that is gone has nothing to refuse.
            with contextlib.suppress(CommunicationError), self._connect(address) as connection:
                connection.call(Fence(worker, incarnation), timeout_s=1.0)

    def _check_silence(self, dispatcher: Dispatcher, started_s: float) -> None:
        """Kill what has frozen: its exit then tells the rest."""
        now_s = time.monotonic()
        for number, process in list(self._memory.processes.items()):
            name = process.name
            hearing = dispatcher.hearings.get(name)
            if hearing is None and name in self._memory.away:
                continue
            if hearing is None:
                if now_s - started_s > STARTUP_TIMEOUT_S and self._memory.num_replaced == 0:
                    raise TrainingError(f"{name} did not start within {STARTUP_TIMEOUT_S:g} s")
                continue
            if not hearing.is_done and now_s - hearing.heard_s > self._job.cluster.failure_timeout_s:
                if self._launcher.is_working(number):
                    hearing.heard_s = now_s
                    continue
                self._launcher.emit(
                    "warning", message=f"{name} is frozen: no sign of life for {now_s - hearing.heard_s:.1f} s"
                )
                hearing.heard_s = now_s
                is_replaced = self._memory.num_replaced < self._job.cluster.max_restarts
                if is_replaced or process.role != "worker":
                    self._launcher.signal(number, signal.SIGKILL)
                else:
                    self._memory.away.append(name)
                    self._give_up(dispatcher, process.index, "is frozen; if it wakes up it joins again")

    def _check_shortage(self, dispatcher: Dispatcher) -> None:
        """Wait while fewer workers are left than can go on; when nobody comes in time, have what is there saved."""
        memory, cluster = self._memory, self._job.cluster
        left, needed = len(self._workers()), max(1, cluster.min_workers)
        if left >= needed or dispatcher.is_ending:
            memory.shortage = None
        elif memory.shortage is None:
            lack = f"{memory.last_loss}; {left} of at least {needed} workers are left"
            verdict = f"{lack}, and all {cluster.max_restarts} replacements are used up (cluster.max_restarts)"
            memory.shortage = Shortage(verdict, time.monotonic() + cluster.wait_for_workers_s)
            if cluster.wait_for_workers_s:
                wait = describe_wait(self._run_dir, cluster.wait_for_workers_s, needed)
                self._launcher.emit("warning", message=f"{lack}; {wait}")
        elif time.monotonic() >= memory.shortage.until_s:
            if not dispatcher.active_workers:
                raise TrainingError(memory.shortage.verdict)
            dispatcher.give_up(memory.shortage.verdict)

    def _check_guests(self, dispatcher: Dispatcher) -> None:
        """Go on without guests that ended or froze. Nobody takes their place."""
        self._check_far_guests(dispatcher)
        for index, pid in list(self._memory.guests.items()):
            if index in self._memory.far:
                continue
            hearing = dispatcher.hearings.get(f"worker-{index}")
            if not is_alive(pid):
                del self._memory.guests[index]
                if hearing is not None and not hearing.is_done:
                    self._give_up(dispatcher, index, "ended without a word")
                continue
            limit_s = self._job.cluster.failure_timeout_s
            is_silent = hearing is not None and not hearing.is_done and time.monotonic() - hearing.heard_s > limit_s
            if is_silent and is_stopped(pid):
                self._give_up(dispatcher, index, "is frozen; if it wakes up it joins again")

    def _check_far_guests(self, dispatcher: Dispatcher) -> None:
        """Go on without guests of other hosts that are not heard of; all that is known of them is what they say."""
        now_s, guests = time.monotonic(), self._memory.guests
        for index, since_s in self._memory.far.items():
            hearing = dispatcher.hearings.get(f"worker-{index}")
            if hearing is None:
                if now_s - since_s > STARTUP_TIMEOUT_S:
                    guests.pop(index, None)
                continue
            guests[index] = hearing.pid  # also one that is back
            if hearing.is_done:
                del guests[index]
            elif now_s - hearing.heard_s > self._job.cluster.failure_timeout_s:
                del guests[index]
                self._give_up(dispatcher, index, "is out of reach; if it can be heard again it joins again")

    def _give_up(self, dispatcher: Dispatcher, index: int, why: str) -> None:
        """Go on without a worker that is not replaced."""
        name = f"worker-{index}"
        hearing = dispatcher.hearings[name]
        units = dispatcher.lose(name)
        dispatcher.channel.fence(name, hearing.incarnation)
        self._fence(dispatcher, name, hearing.incarnation)
        self._memory.recoveries += 1
        self._memory.last_loss = f"{name} {why} (in step {hearing.step + 1})"
        self._memory.recovering.append(Loss("worker", name, time.perf_counter(), self._progress.step))
        self._launcher.emit("worker_lost", worker=index, role="worker", step=hearing.step, reason=why)
        self._launcher.emit("warning", message=f"{name} {why}: {_given(units)} to others")

    def _check_failures(self, dispatcher: Dispatcher) -> None:
        for name, failure in list(dispatcher.failures):
            index = int(name.removeprefix("worker-")) if name.startswith("worker-") else -1
            if index in self._memory.guests or index in self._memory.far:  # its troubles are its own
                dispatcher.failures.remove((name, failure))
                self._memory.guests.pop(index, None)
                self._memory.far.pop(index, None)
                self._give_up(dispatcher, index, failure.error)
        causes = [entry for entry in dispatcher.failures if not entry[1].is_consequence]
        for name, failure in causes or dispatcher.failures:
            log.error("%s failed:\n%s", name, failure.traceback)
            where = f"(in step {failure.step + 1}); its log is {self._log_file(name)}"
            raise TrainingError(f"{name} {failure.error} {where}")

    def _dismiss(self, dispatcher: Dispatcher) -> None:
        """Let everybody end in order; what is still there is ended by the engine."""
        deadline = time.monotonic() + self._job.cluster.failure_timeout_s
        while time.monotonic() < deadline and any(
            not hearing.is_done for hearing in dispatcher.hearings.values() if hearing.role != "server"
        ):
            dispatcher.dismiss()
            self._commit()
            dispatcher.serve(TICK_S)
        self._commit()
        for number, process in self._memory.processes.items():
            if process.role == "server":
                self._launcher.signal(number, signal.SIGTERM)

    def _rate(self, step: int) -> float | None:
        lr = self._job.optimizer.args.get("lr")
        return None if lr is None else float(lr) * self._schedule(step) * self._facts.lr_factor

    def _announce(self) -> None:
        self._launcher.emit(
            "run_started",
            run_dir=str(self._run_dir),
            start_step=self._progress.step,
            servers=self._settings.servers,
            **self._facts.description,
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
        is_done = first >= plan.num_steps and (is_measured or not self._facts.has_test)
        if reason is None and not is_done:
            return None
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints")
        assert loaded is not None
        outcome = Outcome(stopped_by=reason, metrics=progress.metrics)
        outcome.weights_sha256 = checkpoint.weights_sha256(loaded.state.part("model").tensors)
        self._announce()
        return self._sum_up(outcome, plan, None)

    def _summarise(self, dispatcher: Dispatcher, plan: RunPlan) -> Summary:
        trained = self._progress.samples - self._memory.samples_before
        training_s = dispatcher.accounts.training_s
        return self._sum_up(dispatcher.outcome, plan, trained / training_s if trained and training_s else None)

    def _sum_up(self, outcome: Outcome, plan: RunPlan, samples_per_second: float | None) -> Summary:
        summary = sum_up(
            self._job,
            self._facts.description,
            self._progress,
            outcome,
            self._memory,
            is_cut_short=plan.is_cut_short,
            samples_per_second=samples_per_second,
        )
        if summary.staleness:
            self._launcher.emit("staleness", ages=summary.staleness)
        return summary


def _given(units: Sequence[Unit]) -> str:
    return "1 unit of its work goes" if len(units) == 1 else f"{len(units)} units of its work go"
