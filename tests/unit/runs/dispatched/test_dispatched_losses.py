"""What follows when a served run loses a process, against the real dispatcher and a launcher that takes notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from test_dispatcher import Play, work_of

from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.engine import ProcessSpec
from cordee.cluster.launcher_link import LauncherSpec
from cordee.core.settings import Cluster
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.messages import AskOrder, HandOver, Join, Leave, Order, TakeWork
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.processes import LossState, Process, StarterState

ORDER = CoordinatorSpec(
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


class Launcher:
    """Takes note of what is asked of it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.warnings: list[str] = []

    def start(self, spec: ProcessSpec) -> None:
        self.started.append(f"{spec.argument['role']}-{spec.argument['index']}")

    def emit(self, kind: str, **fields: Any) -> None:
        if kind == "warning":
            self.warnings.append(fields["message"])


class Servers:
    """Takes note of who is not to be listened to any more."""

    def __init__(self) -> None:
        self.fenced: list[str] = []

    def fence(self, addresses: Iterable[str], worker: str, incarnation: int) -> None:
        self.fenced.append(worker)


class Scene:
    """A run of one worker, about to lose it."""

    def __init__(self) -> None:
        self.play = Play()
        self.launcher, self.servers = Launcher(), Servers()
        memory = StarterState(next_worker=1, newest_replica={0: 0})
        starter = ProcessStarter(ORDER, self.play.dispatcher.plan.job, self.launcher, memory, Addresses("address"))  # type: ignore[arg-type]
        self.losses = Losses(
            Cluster(max_restarts=1),
            self.launcher,  # type: ignore[arg-type]
            self.play.dispatcher,
            starter,
            self.servers,  # type: ignore[arg-type]
            LossState(),
        )

    def kill(self, index: int) -> None:
        self.losses.replace(Process("worker", index, 0), "was killed by SIGKILL", -9)


def test_a_server_told_to_leave_stays_until_another_has_everything() -> None:
    scene = Scene()
    play, servers = scene.play, scene.play.dispatcher.servers
    scene.losses.start_seconds()
    assert scene.launcher.started == []
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False))
    for _ in range(2):  # the second time one is on its way
        scene.losses.start_seconds()
        assert scene.launcher.started == ["server-0"]
    play.say("server-0.1", Join("server", 0, 2, "host", "elsewhere", has_state=False))
    assert servers.unfollowed() == [(0, "server-0", "server-0.1")]
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False)), (
        "not before it has everything"
    )
    servers.note_following(0, "server-0", "server-0.1")
    assert ("server-0", Leave()) not in play.say("server-0", HandOver(has_retired=False)), "it may have lost its second"
    for _ in range(2):  # the answer was lost
        assert ("server-0", Leave()) in play.say("server-0", HandOver(has_retired=True))
        assert servers.addresses == ["elsewhere"]
    assert [fields for kind, fields in play.events if kind == "worker_left"] == [
        {"worker": 0, "role": "server", "step": 0}
    ]
    scene.losses.start_seconds()
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
    play.say("evaluator-0", AskOrder())
    unit = work_of(play.say("worker-0", TakeWork())).unit
    play.dispatcher.stop("interrupt")
    assert not play.dispatcher.has_done_all, "a unit is in somebody's hands"
    answers = play.say("worker-0", TakeWork(done=unit, num_samples=4))
    assert any(isinstance(message, Order) for _, message in answers) and ("worker-0", Leave()) in answers
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
