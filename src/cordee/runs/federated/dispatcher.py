"""Hears the workers of a federated run and hands out its tasks; decides when the run ends.

Workers ask for a task and wait for the answer, which comes when there is one. Nothing is sent before `flush`, so that
what it follows from can be written down first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from cordee.checkpoint.layout import decode_values, encode_values
from cordee.cluster.members import MemberRecord
from cordee.cluster.messages import CheckpointRequest
from cordee.communication.channel import Received
from cordee.communication.messages import Join, Refused
from cordee.compute import Metrics
from cordee.compute.schedules import constant
from cordee.core import Job
from cordee.core.errors import TrainingError
from cordee.core.stopping import StopPolicy
from cordee.monitoring import events
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.dispatched.messages import Leave
from cordee.runs.dispatched.on_demand_dispatcher import OnDemandDispatcher
from cordee.runs.federated.board import Board, TaskKey
from cordee.runs.federated.messages import Ping, RoundFileRequest, TakeTask, Task
from cordee.runs.federated.round_files import RoundFileServer
from cordee.runs.federated.state import FederatedState

# What the event of a round takes from the worker that finished it.
_TOLD = (
    "update_norm", "largest_update_norm", "step_norm", "bytes_sent", "bytes_received", "epsilon", "client_accuracy",
    "worst_decile_accuracy", "personal_gain",
)  # fmt: skip


@dataclass
class RoundDispatcher(OnDemandDispatcher):
    """Answers the workers of one run."""

    job: Job
    board: Board
    state: FederatedState
    policy: StopPolicy
    num_clients: int
    show: Callable[[int, float], None]  # round and loss for the progress bar
    elapsed_s: Callable[[], float]
    checkpoints: CheckpointReceiver  # of members that do not have the run directory
    files: RoundFileServer  # the same

    @property
    def step(self) -> int:
        return self.state.progress.step

    @property
    def min_workers(self) -> int:
        return self.job.cluster.min_workers

    @property
    def is_final(self) -> bool:
        return self.state.outcome.is_final

    @property
    def is_over(self) -> bool:
        return self.board.state.stage == "over"

    @property
    def is_ending(self) -> bool:
        """Whether the run ends with the round that is under way."""
        return self.is_final or self.is_over

    def serve(self, timeout_s: float) -> None:
        super().serve(timeout_s)
        if not self.is_over:
            self._release_leaving()
            self._hand_out()

    def stop(self, reason: str) -> None:
        """End the run after the round that is under way."""
        outcome = self.state.outcome
        if not outcome.is_final:
            outcome.is_final, outcome.stopped_by = True, reason

    def give_up(self, end_reason: str) -> None:
        self.state.outcome.end_reason = end_reason
        self.stop("interrupt")

    def lose(self, record: MemberRecord, *, is_away: bool = False) -> TaskKey | None:
        """Continue without a worker; return the task that it had in hand, which goes to another."""
        self.members.lose(record, is_away=is_away)
        self._waiting.pop(record.name, None)
        return self.board.requeue(record.name)

    def shut_down(self) -> None:
        """Tell whoever asks that there is nothing more to do."""
        self._release_waiting()

    def _handle_own(self, received: Received, record: MemberRecord) -> None:
        match received.message:
            case TakeTask() as report:
                if report.done:
                    self._take_report_of_task(record.name, report)
                self.board.requeue(record.name)  # who asks has nothing in hand: it did not hear the last answer
                record.is_leaving |= report.leaves
                self._waiting[record.name] = received
            case Ping():
                self._reply(received, Leave())
            case other:
                self._reply(received, Refused("unexpected", type(other).__name__))

    def _handle_unknown(self, received: Received) -> None:
        if isinstance(received.message, CheckpointRequest):
            self._reply_unwritten(received, self.checkpoints.handle(received.message))
        elif isinstance(received.message, RoundFileRequest):
            self._reply_unwritten(received, self.files.handle(received.message))
        else:
            super()._handle_unknown(received)

    def _take_join(self, record: MemberRecord, join: Join) -> None:
        pass

    def _hand_out(self) -> None:
        if self.has_too_few_workers:
            return  # others are waited for
        for name in list(self._waiting):
            key = self.board.take(name)
            if key is None:
                return
            self._reply(self._waiting.pop(name), self._make_task(key))

    def _make_task(self, key: TaskKey) -> Task:
        board, task = self.board, Task(what=key.kind, round=key.round, index=key.place)
        if self.state.begun_s is None and key.kind != "prepare":
            self.state.begun_s = self.state.round_begun_s = time.perf_counter()
        if key.kind == "prepare":
            return task
        assert board.round is not None
        task = msgspec.structs.replace(task, num_places=board.round.num_places)
        if key.kind == "client":
            client, base = board.task_of(key.place)
            return msgspec.structs.replace(task, client=client, base=base)
        if key.kind == "merge":
            return msgspec.structs.replace(task, places=board.places_of(key.place))
        number, is_last = key.round + 1, self._is_last(key.round + 1)
        is_again = self.state.outcome.is_counted
        progress = encode_values(msgspec.to_builtins(self._progress_before(is_again=is_again))).decode()
        return msgspec.structs.replace(
            task,
            places=board.took_part,
            oldest=board.round.needs_from,
            evaluate=self.state.progress.evaluated_at != number
            and (
                is_last
                or self._is_due(number, self.job.evaluation.every_epochs)
                or self._is_due(number, self.job.evaluation.every_steps)
            ),
            save=is_last or is_again or self._is_due(number, self.job.checkpoint.every_steps),
            progress=progress,
        )

    def _progress_before(self, *, is_again: bool) -> Any:
        """Return the progress before the round; a task that is done again adds the same to it."""
        self.state.progress.elapsed_s = self.elapsed_s()
        if not is_again:
            return self.state.progress
        trained = self.state.progress.samples - self.state.samples_at_round
        return msgspec.structs.replace(self.state.progress, samples=self.state.progress.samples - trained)

    def _is_last(self, number: int) -> bool:
        limit, rounds = self.job.stop.steps, self.state.num_rounds
        return self.state.outcome.is_final or number >= min(rounds, limit or rounds)

    def _is_due(self, number: int, every: int) -> bool:
        return bool(every) and number % every == 0

    def _take_report_of_task(self, worker: str, report: TakeTask) -> None:
        key = TaskKey(report.done or "prepare", report.round, report.index)
        if not self.board.finish(worker, key, is_refused=bool(report.refused)):
            return
        self.state.losses.num_lost_over.clear()
        if report.done == "prepare":
            self.state.outcome.epsilon = self._decoded(report).get("epsilon")
        elif report.done == "client" and report.refused:
            self.state.outcome.last_refusal = report.refused
            self.emit(events.Warned(message=f"round {report.round + 1}: {report.refused}; it does not count"))
        elif report.done == "finish":
            self._finish_round(self._decoded(report))

    def _decoded(self, report: TakeTask) -> dict[str, Any]:
        found: dict[str, Any] = decode_values(report.result.encode())
        return found

    def _finish_round(self, result: dict[str, Any]) -> None:
        state, outcome, board = self.state, self.state.outcome, self.board
        assert board.round is not None
        number = board.round.number + 1
        self._take_checkpoint(number, result)
        if not outcome.is_counted:
            self._count_round(number, result)
            outcome.is_counted = True
        if "metrics" in result and self.state.progress.evaluated_at != number:
            self._take_metrics(number, msgspec.convert(result["metrics"], Metrics))
        is_last = self._is_last(number)
        if is_last and outcome.saved_step != number and not outcome.problem:
            return  # asked to end while the round was finished: it is finished again, and saved
        if board.round.tasks and not result["num_clients"]:
            raise TrainingError(f"no client's update of round {number} counts; the last: {outcome.last_refusal}")
        outcome.is_counted = False
        board.advance()
        state.samples_at_round = state.progress.samples
        if is_last:
            if outcome.stopped_by is None and self.job.stop.steps is not None and number >= self.job.stop.steps:
                outcome.stopped_by = "steps"
            board.end()
            self.shut_down()

    def _take_checkpoint(self, number: int, result: dict[str, Any]) -> None:
        outcome = self.state.outcome
        outcome.problem = result.get("problem", "")
        if outcome.problem:
            message = f"checkpoint at step {number} was not saved: {outcome.problem}"
            self.emit(events.Warned(message=message))
        elif "path" in result:
            outcome.saved_step = number
            seconds = result["save_seconds"]
            self.emit(events.Checkpoint(step=number, path=result["path"], seconds=seconds, stall_s=seconds))

    def _count_round(self, number: int, result: dict[str, Any]) -> None:
        state, outcome, progress, board = self.state, self.state.outcome, self.state.progress, self.board
        progress.step, progress.epoch = number, number
        progress.samples += result["num_trained"]
        progress.loss_sum, progress.loss_count = result["loss_sum"], result["loss_count"]
        outcome.weights_sha256 = result["sha"]
        outcome.epsilon = result.get("epsilon")
        outcome.bytes_sent += result["bytes_sent"]
        one = board.round
        assert one is not None
        now_s = time.perf_counter()
        is_all = len(one.asked) == self.num_clients
        measured: dict[str, Any] = {key: result.get(key) for key in _TOLD}
        self.emit(
            events.Round(
                round=number,
                num_asked=len(one.asked),
                num_took_part=result["num_clients"],
                asked=None if is_all else list(one.asked),
                late=list(one.late),
                dropped=list(one.dropped),
                refused=list(board.refused),
                loss=progress.train_loss,
                clock_seconds=one.clock_s,
                seconds=now_s - state.round_begun_s,
                **measured,
            )
        )
        state.round_begun_s = now_s
        self.emit(
            events.Commit(step=number, epoch=number, batch=0, samples=progress.samples, weights_sha256=result["sha"])
        )
        if progress.train_loss is not None:
            self.show(number, progress.train_loss)
        if result.get("is_spent"):
            self.stop("epsilon")

    def _take_metrics(self, number: int, metrics: Metrics) -> None:
        outcome, progress = self.state.outcome, self.state.progress
        outcome.metrics = metrics
        self.emit(progress.describe_evaluation(metrics, number, number))
        reason = progress.take_evaluation(metrics, number, self.policy, constant())
        if reason is not None and outcome.stopped_by in (None, "epsilon"):
            outcome.is_final, outcome.stopped_by = True, reason
