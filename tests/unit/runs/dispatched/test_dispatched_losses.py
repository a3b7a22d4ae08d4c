"""What follows when a dispatched run loses a process, against the real dispatcher and a launcher that takes notes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from test_dispatcher import Play, work_of

from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.engine import Exited, ProcessSpec, Started
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S, LauncherSpec
from cordee.cluster.members import MemberRecord
from cordee.communication.messages import Join
from cordee.communication.this_host import host_id
from cordee.core.errors import TrainingError
from cordee.core.settings import Cluster
from cordee.monitoring.events import AnyEvent, Warned, WorkerLeft
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.messages import AskEvaluatorTask, EvaluatorTask, HandOver, Leave, TakeWork
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.state import LossState

SPEC = CoordinatorSpec(
    kind="dispatched",
    run_dir="run",
    run_id="id",
    server_keys="",
    client_keys="",
    control_keys="",
    resume=False,
    launcher_pid=1,
    num_slots=2,
    launcher=LauncherSpec(folder="", run_dir="run", run_id="id", alive_every_s=1.0),
    facts={},
)

TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's own processes, which may have the numbers that the tests use, and be busy."""
    for look in ("is_alive", "is_stopped"):
        monkeypatch.setattr(f"cordee.runs.dispatched.on_demand_losses.{look}", lambda pid: False)
    monkeypatch.setattr("cordee.cluster.processes.ProcessorWatch.is_working", lambda self, pid: False)


class Launcher:
    """Takes note of what is asked of it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.warnings: list[str] = []
        self.killed: list[int] = []
        self.news: list[Started | Exited] = []

    def reports(self) -> list[Started | Exited]:
        news, self.news = self.news, []
        return news

    def signal(self, index: int, action: str) -> None:
        assert action == "kill"
        self.killed.append(index)

    def start(self, spec: ProcessSpec) -> None:
        self.started.append(f"{spec.argument['role']}-{spec.argument['index']}")

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event.message)


class Servers:
    """Takes note of who is not to be listened to any more."""

    def __init__(self) -> None:
        self.fenced: list[str] = []

    def fence(self, addresses: Iterable[str], worker: str, incarnation: int) -> None:
        self.fenced.append(worker)


class Scene:
    """A run of one worker, about to lose it."""

    def __init__(self, max_restarts: int = 1) -> None:
        self.play = Play()
        self.launcher, self.servers = Launcher(), Servers()
        self.members = self.play.members
        for name in ("server-0", "evaluator-0"):
            self.members.records[name].heard_s = math.inf  # nothing is wrong with the others
        starter = ProcessStarter(
            SPEC,
            self.play.dispatcher.plan.job,
            self.launcher,  # type: ignore[arg-type]
            self.members,
            Addresses("address"),
            lambda name, incarnation: None,
            "cordee.runs.dispatched",
        )
        self.losses = Losses(
            Cluster(max_restarts=max_restarts),
            self.launcher,  # type: ignore[arg-type]
            self.play.dispatcher,
            starter,
            self.servers,  # type: ignore[arg-type]
            LossState(),
        )

    def take(self, number: int = -1, pid: int = 0, *, is_remote: bool = False) -> MemberRecord:
        """Have worker 0 be a process that was started with this number, or one that joined by itself."""
        record = self.members.records["worker-0"]
        record.number, record.started = number, int(number >= 0)
        record.pid, record.is_remote = pid, is_remote
        return record

    @property
    def workers(self) -> list[str]:
        return [record.name for record in self.members.staying_workers]

    @property
    def now_s(self) -> float:
        """When worker 0 was heard of."""
        return self.members.records["worker-0"].heard_s

    def kill(self, index: int) -> None:
        self.losses.replace(self.members.records[f"worker-{index}"], "was killed by SIGKILL", -9)


def test_a_server_told_to_leave_stays_until_another_has_everything() -> None:
    scene = Scene()
    play, servers = scene.play, scene.play.dispatcher.servers
    scene.losses.start_followers()
    assert scene.launcher.started == []
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False))
    for _ in range(2):  # the second time one is on its way
        scene.losses.start_followers()
        assert scene.launcher.started == ["server-0"]
    play.say("server-0.1", Join(2, "host", host_id(), address="elsewhere", has_state=False))
    assert servers.unfollowed() == [(0, "server-0", "server-0.1")]
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False)), (
        "not before it has everything"
    )
    servers.record_following(0, "server-0", "server-0.1")
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False)), (
        "it may have lost its follower"
    )
    for _ in range(2):  # the answer was lost
        assert ("server-0", Leave()) in play.say("server-0", HandOver(has_retired=True))
        assert servers.addresses == ["elsewhere"]
    assert [event for event in play.events if isinstance(event, WorkerLeft)] == [
        WorkerLeft(worker=0, role="server", step=0)
    ]
    scene.losses.start_followers()
    assert scene.launcher.started == ["server-0"], "one replica is what the job asks for"


def test_a_worker_that_has_work_in_hand_is_replaced_as_often_as_may_be() -> None:
    scene = Scene()
    work_of(scene.play.say("worker-0", TakeWork()))
    scene.kill(0)
    assert scene.launcher.started == ["worker-1"]
    scene.kill(1)
    assert scene.launcher.started == ["worker-1"]
    assert scene.servers.fenced == ["worker-0", "worker-1"]
    assert scene.launcher.warnings == [
        "worker-0 was killed by SIGKILL: 1 unit of its work goes to others, worker-1 takes its place",
        "worker-1 was killed by SIGKILL: no replacement is left (cluster.max_restarts = 1), "
        "0 units of its work go to others",
    ]


def test_a_worker_is_not_replaced_when_all_work_is_done() -> None:
    scene = Scene()
    play = scene.play
    play.say("evaluator-0", AskEvaluatorTask())
    unit = work_of(play.say("worker-0", TakeWork())).unit
    play.dispatcher.stop("interrupt")
    assert not play.dispatcher.has_done_all, "a unit is in somebody's hands"
    answers = play.say("worker-0", TakeWork(done=unit, num_samples=4))
    assert any(isinstance(message, EvaluatorTask) for _, message in answers) and ("worker-0", Leave()) in answers
    scene.kill(0)
    assert scene.launcher.started == []
    assert scene.launcher.warnings == ["worker-0 was killed by SIGKILL: all work is done, nobody takes its place"]


def test_a_replacement_lost_before_it_has_begun_is_replaced_although_the_run_ends() -> None:
    scene = Scene()
    work_of(scene.play.say("worker-0", TakeWork()))
    scene.play.dispatcher.stop("interrupt")
    scene.kill(0)
    assert scene.launcher.started == ["worker-1"]
    scene.kill(1)
    assert "no replacement is left" in scene.launcher.warnings[-1], "the unit is still to be done"


def test_a_worker_that_is_silent_and_idle_is_killed_and_then_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.take(number=9)
    scene.losses.check_members(scene.now_s + TIMEOUT_S)
    assert scene.launcher.killed == []
    monkeypatch.setattr("cordee.cluster.processes.ProcessorWatch.is_working", lambda self, pid: True)
    scene.losses.check_members(scene.now_s + 1.1 * TIMEOUT_S)
    assert scene.launcher.killed == [], "it is busy"
    monkeypatch.setattr("cordee.cluster.processes.ProcessorWatch.is_working", lambda self, pid: False)
    scene.losses.check_members(scene.now_s + 1.1 * TIMEOUT_S)
    assert scene.launcher.killed == [9]
    assert scene.launcher.warnings == ["worker-0 is frozen: no sign of life for 5.5 s"]
    scene.launcher.news = [Exited(9, 1, 77, -9)]
    scene.losses.check_members(scene.now_s)
    assert scene.launcher.started == ["worker-1"]


def lose_two(scene: Scene, *lost_with: str) -> None:
    """Lose the worker, then the evaluator."""
    scene.take(number=9)
    evaluator = scene.members.records["evaluator-0"]
    evaluator.number, evaluator.started = 10, 1
    scene.launcher.news = [
        Exited(number, 1, 77, -9, "was lost with its agent", what)
        for number, what in zip((9, 10), lost_with, strict=True)
    ]
    scene.losses.check_members(scene.now_s)


def test_what_is_lost_with_one_agent_takes_one_replacement() -> None:
    scene = Scene(max_restarts=1)
    lose_two(scene, "agent 0", "agent 0")
    assert scene.launcher.started == ["worker-1", "evaluator-0"]
    with pytest.raises(TrainingError, match="1 processes were replaced already"):
        lose_two(scene := Scene(max_restarts=1), "agent 0", "agent 1")
    assert scene.launcher.started == ["worker-1"]
    with pytest.raises(TrainingError, match="were replaced already"):
        lose_two(scene := Scene(max_restarts=0), "agent 0", "agent 0")
    assert scene.launcher.started == [], "nothing of it was counted"


def test_who_freezes_after_an_agent_was_lost_was_not_lost_with_it() -> None:
    scene = Scene(max_restarts=1)
    process = scene.take(number=9)
    evaluator = scene.members.records["evaluator-0"]
    evaluator.number, evaluator.started = 10, 1
    scene.launcher.news = [Exited(10, 1, 77, -9, "was lost with its agent", "agent 0")]
    scene.losses.check_members(scene.now_s)
    assert scene.launcher.started == ["evaluator-0"] and not scene.losses.can_replace
    scene.losses.check_members(scene.now_s + 2 * TIMEOUT_S)
    assert process.is_away and scene.launcher.killed == [], "nobody is left to take its place"


def test_a_frozen_worker_without_replacement_may_come_back_and_its_end_is_no_loss() -> None:
    scene = Scene(max_restarts=0)
    process = scene.take(number=9)
    scene.losses.check_members(scene.now_s + 2 * TIMEOUT_S)
    assert process.is_away and scene.launcher.killed == [] and scene.workers == []
    assert not process.may_send
    scene.launcher.news = [Exited(9, 1, 77, -9)]
    scene.losses.check_members(0.0)
    assert scene.launcher.started == [] and scene.members.started == [] and not process.may_join


def test_one_that_never_joins_ends_the_run_and_one_that_is_stopped_before_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    for index, number in ((5, 3), (6, 4)):
        scene.members.expect(MemberRecord(index=index, number=number, started=1), 100.0)
    scene.members.records["worker-0"].heard_s = math.inf
    stopped = {11}
    monkeypatch.setattr("cordee.runs.dispatched.on_demand_losses.is_stopped", lambda pid: pid in stopped)
    scene.launcher.news = [Started(3, 1, 11)]
    scene.losses.check_members(100.0)
    scene.losses.check_members(100.0 + TIMEOUT_S)
    assert scene.launcher.killed == []
    scene.losses.check_members(100.1 + TIMEOUT_S)
    assert scene.launcher.killed == [3]
    with pytest.raises(TrainingError, match="worker-6 did not start within 120 s"):
        scene.losses.check_members(100.1 + STARTUP_TIMEOUT_S)


def test_external_workers_are_given_up_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, stopped = {11}, {11}
    monkeypatch.setattr("cordee.runs.dispatched.on_demand_losses.is_alive", lambda pid: pid in alive)
    monkeypatch.setattr("cordee.runs.dispatched.on_demand_losses.is_stopped", lambda pid: pid in stopped)
    for is_remote, why in ((False, "is frozen; if it is heard again"), (True, "is out of reach; if it is heard again")):
        scene = Scene()
        process = scene.take(pid=11, is_remote=is_remote)
        scene.losses.check_members(scene.now_s + TIMEOUT_S)
        assert scene.launcher.warnings == []
        scene.losses.check_members(scene.now_s + 2 * TIMEOUT_S)
        assert why in scene.launcher.warnings[0] and scene.launcher.started == scene.launcher.killed == []
        assert process.is_away and scene.workers == []
        scene.play.say("worker-0", Join(1, "host"))  # it is back
        scene.losses.check_members(scene.now_s)
        assert not process.is_away and scene.workers == ["worker-0"]
    scene = Scene()
    scene.take(pid=12)
    scene.losses.check_members(scene.now_s)
    assert "ended without notice" in scene.launcher.warnings[0] and scene.workers == []
