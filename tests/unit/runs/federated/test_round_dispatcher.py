"""The dispatcher of rounds as a state machine: each task counts once, whoever is lost, and every stop is saved."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_channel import ScriptedChannel

from cordee.checkpoint.layout import encode_values
from cordee.cluster.coordinator import Addresses
from cordee.cluster.members import MemberRecord, Members
from cordee.communication.messages import Join, Message
from cordee.communication.this_host import host_id
from cordee.core import Job
from cordee.core.errors import TrainingError
from cordee.core.stopping import StopPolicy
from cordee.monitoring import AnyEvent, events
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.dispatched.messages import Leave
from cordee.runs.federated.board import Board, BoardState
from cordee.runs.federated.coordinator import FederatedLeader
from cordee.runs.federated.dispatcher import RoundDispatcher
from cordee.runs.federated.messages import TakeTask, Task
from cordee.runs.federated.round_files import RoundFileServer
from cordee.runs.federated.state import FederatedState
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.strategy import settings_of
from cordee.training.progress import Progress

SIZES = (7, 20, 33)


class Play:
    """Three clients, workers that simulate them, and the dispatcher between the workers."""

    def __init__(self, num_workers: int = 2, *, rounds: int = 2, **tables: Any) -> None:
        job = Job.from_dict({
            "model": {"use": "mlp"},
            "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": sum(SIZES)},
            "training": {"batch_size": 4},
            "strategy": {"name": "federated", "rounds": rounds, "partition": {"clients": len(SIZES)}},
            **tables,
        })  # fmt: skip
        self.job = job
        self.channel = ScriptedChannel()
        self.events: list[AnyEvent] = []
        self.state = FederatedState(
            addresses=Addresses("address"),
            started=0.0,
            base_s=0.0,
            samples_before=0,
            num_rounds=rounds,
            members=Members(failure_timeout_s=5.0),
            progress=Progress(),
            board=BoardState(),
        )
        self.dispatcher = RoundDispatcher(
            self.channel,  # type: ignore[arg-type]
            self.state.members,
            self.events.append,
            lambda request: "",
            job=job,
            board=Board(self.make_schedule(), self.state.board, merges=True),
            state=self.state,
            policy=StopPolicy(job.stop),
            num_clients=len(SIZES),
            show=lambda number, loss: None,
            elapsed_s=lambda: 0.0,
            checkpoints=CheckpointReceiver(Path("checkpoints"), self.state.members),
            files=RoundFileServer(Path(), self.state.members),
        )
        for index in range(num_workers):
            record = self.state.members.expect(MemberRecord(index=index, number=index), 0.0)
            self.say(index, Join(1, "host", host_id()))
            record.heard_s = math.inf

    def make_schedule(self) -> Schedule:
        settings = settings_of(self.job)
        algorithm = make_algorithm(settings.use, self.job.python_path)
        return Schedule(settings, algorithm, self.job.seed, SIZES, self.job.training.batch_size)

    def say(self, index: int, message: Message) -> list[tuple[str, Message]]:
        return self.channel.say(self.dispatcher, f"worker-{index}", message)

    def ask(self, index: int, done: Task | None = None, **report: Any) -> Task | Leave | None:
        """Have a worker report a task, if one is given, and ask for the next; return what it is told, if anything."""
        if done is not None:
            report = {"done": done.what, "round": done.round, "index": done.index, **report}
            values = RESULT | report.pop("values", {})
            if done.what in ("prepare", "finish"):
                report["result"] = encode_values(values).decode()
        told = [message for name, message in self.say(index, TakeTask(**report)) if name == f"worker-{index}"]
        assert len(told) <= 1 and all(isinstance(message, Task | Leave) for message in told)
        return told[0] if told else None  # type: ignore[return-value]

    def task(self, index: int, done: Task | None = None, **report: Any) -> Task:
        told = self.ask(index, done, **report)
        assert isinstance(told, Task), told
        return told

    def train(self) -> list[Task]:
        """Have worker 0 do everything there is; return its tasks."""
        told, done = self.ask(0), []
        while isinstance(told, Task):
            done.append(told)
            told = self.ask(0, told, values=SAVED if told.save else {})
        return done

    def of(self, kind: type[AnyEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


METRICS = {"loss": 1.0, "accuracy": 0.5, "top5_accuracy": None, "num_samples": 4, "seconds": 0.0}
SAVED = {"path": "a checkpoint", "save_seconds": 0.0}
RESULT = {
    "num_clients": 3,
    "num_trained": 60,
    "loss_sum": 30.0,
    "loss_count": 60.0,
    "bytes_sent": 10,
    "sha": "the weights",
}


def test_a_round_is_clients_then_their_sum_then_its_end() -> None:
    play = Play(num_workers=1)
    a_round = "client client client merge finish"
    told = play.train()
    assert " ".join(task.what for task in told) == f"prepare {a_round} {a_round}"
    assert play.dispatcher.is_over
    play.dispatcher.shut_down()
    play.dispatcher.flush()
    assert play.channel.answers == [("worker-0", Leave())]
    assert [event.num_took_part for event in play.of(events.Round)] == [3, 3]
    assert (play.state.progress.step, play.state.progress.samples) == (2, 120)


def test_nobody_trains_before_the_files_are_prepared() -> None:
    play = Play()
    prepare = play.task(0)
    assert prepare.what == "prepare"
    assert play.ask(1) is None
    assert play.task(0, prepare).what == "client"


def test_the_task_of_a_lost_worker_goes_to_another_and_its_late_report_counts_once() -> None:
    play = Play()
    first = play.task(0, play.task(0))
    lost = play.dispatcher.lose(play.state.members.records["worker-0"])
    assert lost is not None and (lost.kind, lost.place) == ("client", first.index)
    again = play.task(1)
    assert again == first
    play.task(1, again)
    assert play.state.board.done.count(1) == 1
    play.task(1, again)
    assert play.state.board.done.count(1) == 1, "a report that is repeated"


def test_a_worker_that_asks_again_has_not_heard_and_gets_its_task_again() -> None:
    play = Play()
    first = play.task(0, play.task(0))
    assert play.task(0) == first


def test_a_refused_update_is_said_and_does_not_count() -> None:
    play = Play(num_workers=1)
    client = play.task(0, play.task(0))
    play.task(0, client, refused="its update is not finite")
    assert play.dispatcher.board.took_part == ()
    assert play.dispatcher.board.refused == (client.client,)
    assert "its update is not finite" in play.of(events.Warned)[0].message


def test_a_round_in_which_no_update_counts_ends_the_run() -> None:
    play = Play(num_workers=1)
    task = play.task(0)
    while task.what != "finish":
        task = play.task(0, task, **({"refused": "its update is not finite"} if task.what == "client" else {}))
    with pytest.raises(TrainingError, match="no client's update of round 1 counts; the last: its update is not finite"):
        play.ask(0, task, values={"num_clients": 0})


def test_a_stop_ends_the_run_with_the_round_under_way_and_it_is_saved() -> None:
    play = Play(num_workers=1, rounds=5)
    client = play.task(0, play.task(0))
    play.dispatcher.stop("interrupt")
    play.dispatcher.stop("time")
    task = play.task(0, client)
    while task.what != "finish":
        task = play.task(0, task)
    assert task.save
    assert play.ask(0, task, values=SAVED) is None and play.dispatcher.is_over
    assert play.state.outcome.stopped_by == "interrupt", "the first reason counts"


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_round_that_was_finished_when_the_stop_came_is_finished_again_and_saved(is_measured: bool) -> None:
    evaluation = {"every_epochs": int(is_measured)}
    play = Play(num_workers=1, rounds=5, checkpoint={"every_steps": 0}, evaluation=evaluation)
    task = play.task(0)
    while task.what != "finish":
        task = play.task(0, task)
    assert not task.save
    play.dispatcher.stop("interrupt")
    again = play.task(0, task, values={"metrics": METRICS} if is_measured else {})
    assert (again.what, again.round, again.save, again.evaluate) == ("finish", 0, True, not is_measured)
    values = SAVED if is_measured else {**SAVED, "metrics": METRICS}
    assert play.ask(0, again, values=values) is None and play.dispatcher.is_over
    assert len(play.of(events.Round)) == 1 and play.state.progress.samples == 60, "the round counts once"
    assert len(play.of(events.Evaluation)) == 1, "the end of a run is measured, once"


def test_steps_and_a_spent_budget_end_the_run() -> None:
    play = Play(num_workers=1, rounds=5, stop={"steps": 1})
    play.train()
    assert play.state.outcome.stopped_by == "steps" and play.state.progress.step == 1
    play = Play(num_workers=1, rounds=5)
    task = play.task(0)
    while task.what != "finish":
        task = play.task(0, task)
    again = play.task(0, task, values={"is_spent": True})
    assert again.save and play.state.outcome.stopped_by == "epsilon"


def test_a_worker_that_has_to_leave_leaves_where_enough_are_left() -> None:
    play = Play()
    client = play.task(0, play.task(0))
    assert isinstance(play.ask(0, client, leaves=True), Leave)
    assert [event.worker for event in play.of(events.WorkerLeft)] == [0]
    assert play.dispatcher.active_workers == ["worker-1"] and not play.dispatcher.is_ending


def test_the_last_worker_that_has_to_leave_finishes_the_round() -> None:
    play = Play(num_workers=1, rounds=5)
    client = play.task(0, play.task(0))
    assert play.task(0, client, leaves=True).what == "client", "it stays for as long as the round takes"
    assert play.dispatcher.is_ending and "worker-0 had to leave" in play.state.outcome.end_reason


def test_nothing_is_handed_out_while_too_few_workers_are_there() -> None:
    play = Play(num_workers=2, cluster={"min_workers": 2})
    client = play.task(0, play.task(0))
    play.dispatcher.lose(play.state.members.records["worker-1"])
    assert play.ask(0, client) is None
    play.dispatcher.stop("interrupt")
    assert play.task(0).what == "client", "a run that ends needs nobody else"


def test_a_coordinator_that_comes_back_continues_with_the_same_tasks() -> None:
    play = Play()
    first = play.task(0, play.task(0))
    play.task(0, first)
    before = play.dispatcher.board
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(before.state), type=BoardState)
    after = Board(play.make_schedule(), state, merges=True)
    assert after.round == before.round and after.took_part == before.took_part == (first.index,)
    assert after.take("worker-1") == before.take("worker-1")


def test_time_is_counted_from_the_first_client_on() -> None:
    """The start of processes is no training: speed and time of a summary are of the same seconds."""
    play = Play(num_workers=1)
    leader = object.__new__(FederatedLeader)
    leader._state = play.state
    play.state.base_s = 5.0
    prepare = play.task(0)
    assert leader._elapsed_s() == 5.0
    play.task(0, prepare)
    begun_s = play.state.begun_s
    assert begun_s is not None and 5.0 <= leader._elapsed_s() <= 5.0 + time.perf_counter() - begun_s
