"""The main function of the evaluator of a dispatched run: reads snapshots from the servers, measures and saves them.

While it reads, the dispatcher hands out no work; while it measures and writes, training continues.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.checkpoint import State, Store, model_state
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.checkpoint.optimizer import find_in_state
from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.compute import Metrics, averaging, number_groups
from cordee.core import env
from cordee.core.errors import StorageError, TrainingError
from cordee.core.fault_points import identify, reach
from cordee.data.source import check_same
from cordee.monitoring import events, setup_logging
from cordee.parameters.calls import ServerCalls
from cordee.parameters.placement import make_layout
from cordee.runs.checkpoints import open_store
from cordee.runs.dispatched.link import DispatchLink
from cordee.runs.dispatched.messages import AskEvaluatorTask, EvaluatorTask, EvaluatorTaskDone, Leave, SnapshotTaken
from cordee.strategies.parameter_server.client import ParameterClient
from cordee.strategies.parameter_server.messages import PullResiduals, Snapshot, SnapshotExtras
from cordee.strategies.parameter_server.state import adopt_flat, flatten_parameters, join_pieces, join_residuals
from cordee.strategies.parameter_server.strategy import can_split, settings_of
from cordee.training.callbacks import Callbacks, Context
from cordee.training.components import Components, assemble
from cordee.training.measuring import make_policy, measure
from cordee.training.progress import Outcome, Progress

log = logging.getLogger("cordee.evaluator")


def main(argument: dict[str, Any]) -> int:
    """Carry out tasks until there are no more; return the exit code."""
    spec = msgspec.convert(argument, MemberSpec)
    identify("evaluator")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_dir = Path(spec.run_dir)
    log_file = env.log_file() or run_dir / "logs" / "evaluator.log"
    with setup_logging(log_file), DispatchLink(spec) as link, open_store(spec, link) as store:
        try:
            parts = assemble(spec.load_job(), Team(num_workers=1, num_local_workers=spec.num_local))
            evaluator = Evaluator(parts, link, store, patience_s=6 * spec.failure_timeout_s)
            link.join()  # a failure before is not heard
            if spec.data:
                check_same(spec.data, parts.splits)
            evaluator.notify("on_start", parts.describe(run_dir), 0)
            while not isinstance(reply := link.ask(AskEvaluatorTask()), Leave):
                assert isinstance(reply, EvaluatorTask)
                link.step = reply.step
                done = evaluator.carry_out(reply)
                evaluator.raise_problem()
                link.ask(done)
            evaluator.end()
            evaluator.close()
            link.leave()
        except Exception as error:
            log.exception("the evaluator cannot continue")
            link.fail(error)
            return 1
    return 0


class Evaluator:
    """Reads snapshots, measures them, saves them."""

    def __init__(self, parts: Components, link: DispatchLink, store: Store, patience_s: float) -> None:
        self._parts = parts
        self._link = link
        self._store = store
        settings = self._settings = settings_of(parts.job)
        self._layout = make_layout(parts.model, settings.servers, can_split=can_split(parts.job))
        self._client = ParameterClient(self._layout, settings, ServerCalls(link.connect, patience_s))
        self._flat = flatten_parameters(parts.model, self._layout)
        adopt_flat(parts.model, self._layout, self._flat, torch.zeros_like(self._flat))
        self._buffers = dict(parts.model.named_buffers())
        self._callbacks = Callbacks(parts.callbacks)
        self._problem = ""  # what a callback raised
        self._has_ended = False
        self._last = (0, Outcome(None, None, None, 0.0))  # step, and what callbacks are told at the end
        self._group_of = number_groups(parts.recipe.make(parts.model.named_parameters()), parts.model)

    def carry_out(self, task: EvaluatorTask) -> EvaluatorTaskDone:
        started = time.perf_counter()
        optimizer, residual = self._read(task)
        reach("evaluator.read")
        model = State(model_state(self._parts.model), {})
        state = State.join(model=model, optimizer=optimizer, residual=residual)
        metrics = self._measure(optimizer) if task.evaluate else None
        progress = msgspec.convert(decode_values(task.progress.encode()), Progress)
        is_best = metrics is not None and self._record_evaluation(progress, metrics)
        reach("evaluator.measured")
        if metrics is not None:
            self._last = (task.step, Outcome(None, metrics, None, 0.0))
            self._call("on_evaluation", progress.describe_evaluation(metrics, task.step, progress.epoch), task.step)
        path, problem = "", ""
        if task.save or is_best or self._problem:
            values = {**state.values, "progress": msgspec.to_builtins(progress)}
            try:
                path = self._save(progress, State(state.tensors, values))
            except StorageError as error:
                problem = str(error)
        reach("evaluator.saved")
        seconds = time.perf_counter() - started
        if path:
            event = events.Checkpoint(step=task.step, path=path, seconds=seconds, stall_s=0.0)
            self._call("on_checkpoint", event, task.step)
        if task.is_last:
            self._end()
        sha = checkpoint.weights_sha256(self._parts.model.state_dict())
        found = encode_values(msgspec.to_builtins(metrics)).decode() if metrics else ""
        return EvaluatorTaskDone(task.step, found, sha, path, time.perf_counter() - started, problem, task.number)

    def notify(self, method: str, event: Any, step: int) -> None:
        """Call a method of the job's callbacks. Raises TrainingError if one raises."""
        self._call(method, event, step)
        self.raise_problem()

    def end(self) -> None:
        """Tell the callbacks that the run is over, if they do not know. Raises TrainingError if one raises."""
        self._end()
        self.raise_problem()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            step, outcome = self._last
            self._call("on_end", outcome, step)

    def raise_problem(self) -> None:
        """Raise TrainingError for what a callback raised: by now, the state is saved."""
        if self._problem:
            raise TrainingError(self._problem)

    def _call(self, method: str, event: Any, step: int) -> None:
        if self._callbacks.has(method) and not self._problem:
            parts = self._parts
            context = Context(parts.job, parts.team, step, None, lambda: parts.model, self._link.emit)
            self._problem = self._callbacks.call(method, event, context)

    def close(self) -> None:
        self._client.close()

    def _record_evaluation(self, progress: Progress, metrics: Metrics) -> bool:
        """Record in the progress that is saved what was measured; return whether the model is to be kept for it."""
        policy = make_policy(self._parts)
        policy.patience = progress.patience
        progress.take_evaluation(metrics, progress.step, policy, self._parts.recipe.schedule)
        return bool(self._parts.job.checkpoint.keep_best) and progress.best_step == progress.step

    def _save(self, progress: Progress, state: State) -> str:
        settings = self._parts.job.checkpoint
        protected = (progress.best_step,) if settings.keep_best else ()
        return str(self._store.save(progress.step, state, keep=settings.keep, protected=protected))

    def _read(self, task: EvaluatorTask) -> tuple[State, State]:
        """Bring the model to the servers' state; return that of their optimizers, and what compression left out."""
        states = [
            self._client.snapshot(piece, self._flat, Snapshot(piece.index, task.apply_step, task.scale))
            for piece in self._layout.pieces
        ]
        left = []
        if task.residuals:
            left = [
                self._client.residuals(piece, PullResiduals(piece.index, task.step)) for piece in self._layout.pieces
            ]
        self._link.ask(SnapshotTaken(self._client.pull_extras(self._buffers, SnapshotExtras(task.apply_step))))
        weight = self._settings.gradient_weight(self._parts.job.strategy.workers)
        return join_pieces(self._layout, states, self._group_of), join_residuals(self._layout, left, weight)

    def _measure(self, optimizer: State) -> Metrics | None:
        parts = self._parts
        if parts.test is None:
            return None
        trained = self._flat.clone()
        with torch.no_grad():  # with training.ema, the moving average is what is measured
            parameters = dict(parts.model.named_parameters())
            for name, average in find_in_state(optimizer, averaging.KEY).items():
                parameters[name].copy_(average)
            metrics = measure(parts, parts.model, parts.test)
            self._flat.copy_(trained)
        assert metrics is not None
        return metrics
