"""The dispatcher as a state machine: whenever a stop comes, the run ends, saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from scripted_channel import ScriptedChannel

from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.messages import AskCheckpoints, CheckpointNames, Event, TimelineReport
from cordee.communication.messages import Acknowledged, Heartbeat, Join, Joined, Message, Refused
from cordee.communication.this_host import host_id
from cordee.core import Job
from cordee.core.errors import StorageError
from cordee.core.stopping import StopPolicy
from cordee.data import Ledger
from cordee.monitoring import AnyEvent, events
from cordee.monitoring.timeline import Line
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.messages import (
    AskEvaluatorTask,
    EvaluatorTask,
    EvaluatorTaskDone,
    Leave,
    SaveResiduals,
    SnapshotTaken,
    TakeWork,
    Work,
)
from cordee.runs.dispatched.plan import RunPlan
from cordee.strategies.parameter_server import ParameterServerSettings
from cordee.training.progress import Progress


class Play:
    """One server, one evaluator, one worker, and the dispatcher between them."""

    def __init__(self, num_workers: int = 1, stop: dict[str, Any] | None = None, **strategy: Any) -> None:
        job = Job.from_dict({
            "model": {"use": "mlp"},
            "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": 8},
            "training": {"batch_size": 4, "epochs": 3},
            "strategy": {"name": "parameter_server"},
            "stop": stop or {},
        })  # fmt: skip
        plan = RunPlan(job, ParameterServerSettings(**strategy), 8, 6, StopPolicy(job.stop), counts_classes=True)
        self.channel = ScriptedChannel()
        self.events: list[AnyEvent] = []
        self.members = Members(failure_timeout_s=5.0)
        self.dispatcher = Dispatcher(
            self.channel,  # type: ignore[arg-type]
            self.members,
            self.events.append,
            lambda request: "",
            plan=plan,
            ledger=Ledger(plan.exchanges, num_workers),
            progress=Progress(),
            show=lambda step, loss: None,
            elapsed_s=lambda: 0.0,
            rate=lambda step: 0.1,
            checkpoints=CheckpointReceiver(Path("not there"), self.members),
        )
        for role in ("server", "evaluator"):
            self.join(MemberRecord(role=role, index=0, number=0), "address")
        for index in range(num_workers):
            self.join(MemberRecord(index=index, number=0))

    def join(self, record: MemberRecord, address: str = "", **more: Any) -> list[tuple[str, Message]]:
        """Have a process that was asked for say that it is there."""
        self.members.expect(record, 0.0)
        return self.say(record.name, Join(1, "host", host_id(), address=address, **more))

    def say(self, sender: str, message: Message) -> list[tuple[str, Message]]:
        """Let a process speak; return what the dispatcher says to anybody after it."""
        return self.channel.say(self.dispatcher, sender, message)

    def task_of(self, answers: list[tuple[str, Message]]) -> EvaluatorTask:
        (task,) = [message for _, message in answers if isinstance(message, EvaluatorTask)]
        return task

    def carry_out(self, task: EvaluatorTask) -> list[tuple[str, Message]]:
        self.say("evaluator-0", SnapshotTaken(()))
        metrics = '{"loss": 1.0, "accuracy": 0.5, "top5_accuracy": null, "num_samples": 1, "seconds": 0.1}'
        path = "step" if task.save else ""
        self.say(
            "evaluator-0",
            EvaluatorTaskDone(task.step, metrics if task.evaluate else "", "sha", path, number=task.number),
        )
        return self.say("evaluator-0", AskEvaluatorTask())


def work_of(answers: list[tuple[str, Message]]) -> Work:
    (work,) = [message for _, message in answers if isinstance(message, Work)]
    return work


def test_a_timeline_of_another_host_is_kept_under_the_name_of_the_member_and_not_answered() -> None:
    play, kept = Play(), []
    play.dispatcher.keep_timeline = lambda member, line: kept.append((member, line))
    line = Line(member="../../worker-1", pid=1, host="h", origin_us=5, step=[1], steps=[1], at=[0])
    assert play.say("worker-0", TimelineReport(line)) == []
    assert kept == [("worker-0", line)]

    def refuse(member: str, line: Line) -> None:
        raise StorageError("no space left on device")

    play.dispatcher.keep_timeline = refuse
    assert play.say("worker-0", TimelineReport(line)) == [], "a full disk does not end the run"


def test_only_processes_that_are_expected_join_and_each_message_counts_once() -> None:
    play = Play()
    assert play.say("worker-7", Join(1, "host")) == [("worker-7", Refused("unknown-member", "worker-7"))]
    ((name, joined),) = play.say("worker-0", Join(1, "host"))
    assert name == "worker-0" and isinstance(joined, Joined), "it had not heard"
    assert (joined.failure_timeout_s, joined.heartbeat_s) == (5.0, 1.0)
    assert abs(joined.time_s - time.time()) < 60
    worker = play.members.records["worker-0"]
    told = Event(events.Warned(message="once"), 1)
    for _ in range(2):
        assert play.say("worker-0", told) == [("worker-0", Acknowledged(1))]
    assert [event for event in play.events if isinstance(event, events.Warned)] == [events.Warned(message="once")]
    assert play.say("worker-0", Event(events.Warned(message="later"), 3)) == [("worker-0", Acknowledged(1))], (
        "2 is missing"
    )
    assert play.say("worker-0", Heartbeat(4)) == [("worker-0", Acknowledged(1))] and worker.step == 4
    play.dispatcher.lose(worker)
    (answer,) = play.say("worker-0", Heartbeat(5))
    assert answer == ("worker-0", Refused("not-joined", "Heartbeat before Join"))
    (answer,) = play.say("worker-0", Join(1, "host"))
    assert answer == ("worker-0", Refused("replaced", "another process is worker-0 now"))


@pytest.mark.parametrize("reason", ["interrupt", "time"])
def test_a_stop_before_the_first_unit_ends_the_run(reason: str) -> None:
    play = Play()
    play.dispatcher.stop(reason)
    task = play.task_of(play.say("evaluator-0", AskEvaluatorTask()))
    assert task.save and task.step == 0
    play.carry_out(task)
    assert play.dispatcher.is_over


@pytest.mark.parametrize("reason", ["interrupt", "time"])
def test_a_stop_while_a_snapshot_is_measured_ends_the_run_saved(reason: str) -> None:
    play = Play()
    play.say("evaluator-0", AskEvaluatorTask())
    done, task = TakeWork(), None
    while task is None:  # the end of the first epoch
        answers = play.say("worker-0", done)
        tasks = [message for _, message in answers if isinstance(message, EvaluatorTask)]
        if tasks:
            task = tasks[0]
        else:
            done = TakeWork(done=work_of(answers).unit, num_samples=4)
    assert task.evaluate and not task.save
    play.dispatcher.stop(reason)
    last = play.task_of(play.carry_out(task))
    assert last.save and not last.evaluate and last.step == 2
    play.carry_out(last)
    assert play.dispatcher.is_over
    assert play.dispatcher.outcome.stopped_by == reason


@pytest.mark.parametrize(("stop", "reason"), [({"accuracy": 0.5}, "accuracy"), ({"accuracy": 0.9}, None)])
def test_a_rule_that_the_last_evaluation_meets_is_named(stop: dict[str, Any], reason: str | None) -> None:
    play = Play(stop={**stop, "steps": 2})
    play.say("evaluator-0", AskEvaluatorTask())
    answers = play.say("worker-0", TakeWork())
    for _ in range(2):
        answers = play.say("worker-0", TakeWork(done=work_of(answers).unit, num_samples=4))
    task = play.task_of(answers)
    assert task.evaluate and task.save
    play.carry_out(task)
    assert play.dispatcher.is_over
    assert play.dispatcher.outcome.stopped_by == reason
    assert play.dispatcher.plan.is_ended_by_steps, "which the summary names where no other rule is met"


def test_a_stop_in_the_middle_of_a_step_waits_for_it_and_sends_everybody_home() -> None:
    play = Play()
    play.say("evaluator-0", AskEvaluatorTask())
    work = work_of(play.say("worker-0", TakeWork()))
    play.dispatcher.stop("interrupt")
    answers = play.say("worker-0", TakeWork(done=work.unit, num_samples=4))
    task = play.task_of(answers)
    assert (task.step, task.save, task.evaluate) == (1, True, False)
    assert ("worker-0", Leave()) in answers, "there is no more work for it, whatever the evaluator still does"
    play.carry_out(task)
    assert play.dispatcher.is_over


def test_a_refused_gradient_is_told_once_and_the_run_goes_on() -> None:
    play = Play()
    work = work_of(play.say("worker-0", TakeWork()))
    answers = play.say("worker-0", TakeWork(done=work.unit, refused="the gradient of worker-0 is not finite"))
    assert work_of(answers).unit == work.unit + 1
    (warning,) = [event.message for event in play.events if isinstance(event, events.Warned)]
    assert warning == "the gradient of worker-0 is not finite: it is refused, and the step continues without it"


def test_a_run_without_more_work_does_not_lack_workers() -> None:
    play = Play()
    play.say("evaluator-0", AskEvaluatorTask())
    answers = play.say("worker-0", TakeWork())
    while not play.dispatcher.ledger.is_complete:
        assert not play.dispatcher.is_ending
        tasks = [message for _, message in answers if isinstance(message, EvaluatorTask)]
        if tasks:
            answers = play.say("evaluator-0", SnapshotTaken(()))
            metrics = '{"loss": 1.0, "accuracy": 0.5, "top5_accuracy": null, "num_samples": 1, "seconds": 0.1}'
            play.say("evaluator-0", EvaluatorTaskDone(tasks[0].step, metrics, "sha", number=tasks[0].number))
            play.say("evaluator-0", AskEvaluatorTask())
        answers = play.say("worker-0", TakeWork(done=work_of(answers).unit, num_samples=4))
    assert ("worker-0", Leave()) in answers
    assert play.dispatcher.is_ending and not play.dispatcher.is_over


def test_an_evaluation_tells_of_the_steps_it_measured() -> None:
    play = Play()
    play.say("evaluator-0", AskEvaluatorTask())
    answers = play.say("worker-0", TakeWork())
    for loss in (3.0, 5.0):  # the two steps of the first epoch
        unit = work_of(answers).unit
        answers = play.say("worker-0", TakeWork(done=unit, loss_sum=4 * loss, count=4, num_samples=4))
    task = play.task_of(answers)
    (work,) = [message for _, message in play.say("evaluator-0", SnapshotTaken(())) if isinstance(message, Work)]
    play.say("worker-0", TakeWork(done=work.unit, loss_sum=4.0, count=4, num_samples=4))  # while it is measured
    play.carry_out(task)
    (told,) = [event for event in play.events if isinstance(event, events.Evaluation)]
    assert (told.step, told.epoch, told.train_loss) == (2, 1, 4.0)


def test_a_server_that_nobody_followed_costs_whole_steps_and_says_how_many() -> None:
    """What went to it of the step under way is done again, also by a worker that reports it only now."""
    play = Play(num_workers=2, staleness=1)
    first = work_of(play.say("worker-0", TakeWork()))
    second = work_of(play.say("worker-1", TakeWork()))
    ahead = work_of(play.say("worker-0", TakeWork(done=first.unit, loss_sum=2.0, count=2, num_samples=2)))
    play.say("worker-1", TakeWork(done=second.unit, loss_sum=2.0, count=2, num_samples=2))
    assert play.dispatcher.progress.step == 1
    play.dispatcher.lose(play.members.records["server-0"])
    play.join(MemberRecord(role="server", index=0, replica=1, number=0), "elsewhere", step=0)
    (lost,) = [event for event in play.events if isinstance(event, events.UpdatesLost)]
    assert lost == events.UpdatesLost(server=0, updates=1, step=1, from_step=0)
    assert play.dispatcher.progress.updates_lost == 1
    again = work_of(play.say("worker-0", TakeWork(done=ahead.unit, loss_sum=99.0, count=2, num_samples=2)))
    assert (again.unit, again.attempt) != (ahead.unit, ahead.attempt) and again.step == ahead.step
    assert not play.dispatcher.ledger.state.committed, "what the lost server had of it does not count"


def test_a_unit_that_is_late_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("cordee.runs.dispatched.dispatcher.time.monotonic", lambda: now_s[0])
    play = Play(num_workers=2, drop_late=5.0)
    late = work_of(play.say("worker-0", TakeWork()))
    other = work_of(play.say("worker-1", TakeWork()))
    now_s[0] += 4.0
    answers = play.say("worker-1", TakeWork(done=other.unit, num_samples=2))
    assert not [message for _, message in answers if isinstance(message, Work)], "nothing is late yet"
    now_s[0] += 2.0
    assert work_of(play.say("evaluator-0", AskEvaluatorTask())).unit == late.unit
    (warning,) = [event.message for event in play.events if isinstance(event, events.Warned)]
    assert warning == "worker-0 is late with its part of step 1 (6.0 s): another does it"


def test_servers_have_what_compression_left_out_before_a_checkpoint_is_read() -> None:
    play = Play(num_workers=2, stop={"steps": 1}, compression="int4")
    play.say("evaluator-0", AskEvaluatorTask())
    assert play.say("worker-1", TakeWork()) == [], "the other is to have the first share"
    answers = play.say("worker-0", TakeWork())
    units = {name: message for name, message in answers if isinstance(message, Work)}
    assert {name: work.share for name, work in units.items()} == {"worker-0": 0, "worker-1": 1}
    assert play.say("worker-1", TakeWork(done=units["worker-1"].unit, num_samples=2)) == []
    answers = play.say("worker-0", TakeWork(done=units["worker-0"].unit, num_samples=2))
    assert sorted(answers) == [("worker-0", SaveResiduals(1)), ("worker-1", SaveResiduals(1))]
    assert play.say("worker-0", TakeWork(kept=1)) == []
    assert play.say("worker-1", TakeWork()) == [("worker-1", SaveResiduals(1))], "it had not heard"
    answers = play.say("worker-1", TakeWork(kept=1))
    task = play.task_of(answers)
    assert task.save and task.residuals
    assert [name for name, message in answers if isinstance(message, Leave)] == ["worker-0", "worker-1"]


def test_a_worker_that_is_lost_or_leaves_with_what_it_left_out_is_counted() -> None:
    play = Play(num_workers=3, staleness="unbounded", compression="int4")
    for name in ("worker-0", "worker-1"):
        work = work_of(play.say(name, TakeWork()))
        play.say(name, TakeWork(done=work.unit, num_samples=1))
    play.dispatcher.lose(play.members.records["worker-0"])
    work = work_of(play.say("worker-2", TakeWork()))
    play.say("worker-1", TakeWork(leaves=True))
    play.say("worker-2", TakeWork(done=work.unit, num_samples=1))
    assert play.dispatcher.progress.residuals_lost == 2
    warnings = [event.message for event in play.events if isinstance(event, events.Warned)]
    assert warnings == [
        f"what compression has left out of the gradients of {name} is lost with it" for name in ("worker-0", "worker-1")
    ]


def test_members_without_the_run_directory_ask_for_checkpoints_on_a_channel_of_their_own() -> None:
    play = Play()
    (answer,) = play.say("checkpoints-server-0", AskCheckpoints())
    assert answer == ("checkpoints-server-0", CheckpointNames(()))
    (answer,) = play.say("stranger", TakeWork())
    assert isinstance(answer[1], Refused)
