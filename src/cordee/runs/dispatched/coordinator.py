"""The coordinator of a served run: leads it from its start, or from where another coordinator was, to its end.

A process of its own. Each turn it hears what has come in, decides, writes down what it knows and what it is about to
do, and does it; killed at any moment, another goes on from there (`cluster/journal.py`).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from cordee import checkpoint
from cordee.cluster.control import Control, write_control
from cordee.cluster.launcher_link import TICK_S, LauncherLink, lead_run, open_channel
from cordee.communication.channel import ServerChannel
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import JoinRequest, Scale
from cordee.communication.this_host import find_listening
from cordee.communication.wire import Codec
from cordee.compute import make_schedule
from cordee.core import Job
from cordee.core.errors import StorageError, TrainingError
from cordee.core.fault_points import identify, reach
from cordee.core.stopping import StopPolicy
from cordee.data import Ledger
from cordee.monitoring import Summary
from cordee.runs.dispatched.control_requests import ControlRequests
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.messages import LIMITS, SERVED
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.processes import RunState, StarterState
from cordee.runs.dispatched.server_calls import ServerCalls
from cordee.runs.dispatched.spec import DispatchedSpec
from cordee.runs.dispatched.step_metrics import MOST_REFUSALS
from cordee.runs.dispatched.summary import Summariser
from cordee.runs.dispatched.watch import Watch
from cordee.strategies.parameter_server.strategy import settings_of
from cordee.training.progress import Progress

log = logging.getLogger("cordee.served")


def main(argument: dict[str, Any]) -> int:
    """Lead the run to its end; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, DispatchedSpec)
    identify("coordinator")
    return lead_run(order, lambda launcher: DispatchedCoordinator(order, launcher).lead())


class DispatchedCoordinator:
    """One run with local workers and servers. `lead` takes it from where it is to its end."""

    _dispatcher: Dispatcher
    _starter: ProcessStarter
    _wishes: ControlRequests

    def __init__(self, order: DispatchedSpec, launcher: LauncherLink) -> None:
        self._order = order
        self._launcher = launcher
        self._run_dir = Path(order.run_dir)
        job = self._job = Job.load(self._run_dir / "job.toml")
        self._settings = settings_of(job)
        self._schedule = make_schedule(job.schedule, order.facts.total_steps, job.python_path)
        if launcher.restored is not None:
            self._memory = msgspec.msgpack.decode(launcher.restored, type=RunState)
            assert self._memory.dispatcher is not None
            self._progress = self._memory.dispatcher.progress
        else:
            progress = self._progress = self._load_progress(order.resume)
            self._memory = RunState(
                address="tcp://127.0.0.1:*",
                public=find_listening(job.cluster.address).address if job.cluster.address else "",
                started=time.time(),
                begun_s=time.perf_counter(),
                base_s=progress.elapsed_s,
                samples_before=progress.samples,
                starter=StarterState(next_worker=job.strategy.workers),
            )

    def lead(self) -> Summary:
        """Train, and return the summary. Raises TrainingError that names the process that failed, and why."""
        memory, order = self._memory, self._order
        plan = self._plan()
        summariser = Summariser(self._run_dir, plan, order.facts, self._progress, memory, self._launcher.emit)
        is_new = memory.dispatcher is None
        if is_new and order.resume and (over := summariser.summarise_ended()) is not None:
            return over
        keys = ServerKeys.from_text(order.server_keys)
        with open_channel(memory.address, order.run_id, Codec(SERVED, LIMITS), keys, memory.public) as channel:
            memory.address, memory.public = channel.address, channel.public
            dispatcher = self._dispatcher = self._make_dispatcher(channel, plan)
            starter = ProcessStarter(order, self._job, self._launcher, memory.starter, channel.address, channel.public)
            self._starter = starter
            self._wishes = ControlRequests(self._job, self._launcher, dispatcher, starter, order.facts.data)
            if is_new:
                summariser.announce()
                self._begin()
            else:
                log.warning("taking up at step %d", self._progress.step)
            self._commit()
            control = Control.of(channel.address, order.run_id, order.control_keys, channel.public)
            if problem := write_control(self._run_dir, control):
                self._launcher.emit("warning", message=problem)
            self._attend()
            self._dismiss()
        self._progress.elapsed_s = self._elapsed_s()
        if dispatcher.outcome.problem:
            raise StorageError(
                f"step {self._progress.step} was reached, but its weights could not be saved: "
                f"{dispatcher.outcome.problem}"
            )
        if dispatcher.outcome.verdict:
            saved = f"Step {self._progress.step} is saved: --resume goes on from it"
            raise TrainingError(f"{dispatcher.outcome.verdict}. {saved}")
        return summariser.summarise(dispatcher.outcome, dispatcher.accounts.training_s)

    def _make_dispatcher(self, channel: ServerChannel, plan: RunPlan) -> Dispatcher:
        num_shares = self._job.training.num_shards or self._job.strategy.workers
        return Dispatcher(
            channel,
            plan,
            Ledger(plan.exchanges, num_shares),
            self._progress,
            emit=self._take_event,
            show=self._launcher.progress,
            elapsed_s=self._elapsed_s,
            rate=self._rate,
            handle_request=self._handle_request,
            memory=self._memory.dispatcher,
        )

    def _begin(self) -> None:
        for index in range(self._settings.servers):
            for _ in range(self._settings.replicas):
                self._starter.start_server(index, resume=self._order.resume)
        self._starter.start("evaluator", 0)
        for index in range(self._job.strategy.workers):
            self._starter.start("worker", index)

    def _commit(self, *, has_changed: bool = False) -> None:
        """Write down what is known and what follows, then do it."""
        if has_changed or self._launcher.has_pending or self._dispatcher.has_pending:
            self._memory.dispatcher = self._dispatcher.recall()
            reach("dispatch.decided")
            self._launcher.commit(msgspec.msgpack.encode(self._memory))
            reach("dispatch.written")
            self._dispatcher.flush()

    def _attend(self) -> None:
        """Look after the processes until the run is over."""
        dispatcher, starter, cluster = self._dispatcher, self._starter, self._job.cluster
        servers = ServerCalls(self._order.run_id, self._order.client_keys)
        losses = Losses(cluster, self._launcher, dispatcher, starter, servers, self._memory.losses)
        watch = Watch(cluster.failure_timeout_s, self._launcher, dispatcher, starter, losses)
        stop_s = self._job.stop.time_s
        while not dispatcher.is_over:
            self._commit()
            dispatcher.serve(TICK_S)
            self._commit()  # workers wait for their answers; nobody waits for what follows
            watch.look()
            losses.check_failures()
            losses.start_seconds()
            if servers.pair(dispatcher.servers):
                self._commit(has_changed=True)  # a second that is not known to follow would not take over
            losses.note_recoveries()
            losses.check_shortage()
            if self._launcher.should_stop():
                dispatcher.stop("interrupt")
            elif stop_s is not None and self._elapsed_s() >= stop_s:
                dispatcher.stop("time")
            if dispatcher.accounts.has_only_refusals:
                step = self._progress.step + 1
                raise TrainingError(
                    f"the servers refused {MOST_REFUSALS} gradients in a row at step {step}: none was finite. "
                    "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set strategy.clip_norm = 1.0"
                )

    def _dismiss(self) -> None:
        """Let everybody end in order; what is still there is ended by the engine."""
        reach("dispatch.dismiss")
        dispatcher = self._dispatcher
        deadline = time.monotonic() + self._job.cluster.failure_timeout_s
        while time.monotonic() < deadline and any(
            not record.is_done for record in dispatcher.process_records.values() if record.role != "server"
        ):
            dispatcher.dismiss()
            self._commit()
            dispatcher.serve(TICK_S)
        self._commit()
        for number, process in self._starter.processes.items():
            if process.role == "server":
                self._launcher.signal(number, "end")
        reach("dispatch.dismissed")

    def _plan(self) -> RunPlan:
        facts = self._order.facts
        policy = StopPolicy(self._job.stop)
        policy.patience = self._progress.patience
        return RunPlan(
            self._job,
            self._settings,
            facts.num_samples,
            facts.total_steps,
            policy,
            facts.counts_classes,
            start=self._progress.step,
            dtype=facts.dtype,
        )

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

    def _handle_request(self, wish: Scale | JoinRequest) -> str:
        return self._wishes.handle_request(wish)

    def _take_event(self, kind: str, **fields: Any) -> None:
        if kind == "worker_ended":
            peak = fields.get("peak_memory_bytes") or 0
            self._memory.peak_memory_bytes = max(self._memory.peak_memory_bytes, peak)
        self._launcher.emit(kind, **fields)

    def _elapsed_s(self) -> float:
        return self._memory.base_s + time.perf_counter() - self._memory.begun_s

    def _rate(self, step: int) -> float:
        facts = self._order.facts
        return facts.lr * self._schedule(step) * facts.lr_factor
