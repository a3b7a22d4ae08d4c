"""What follows when a team loses a worker, and who is started, told to leave or taken, decided without a process."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cordee.cluster.control import NotYetError
from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import FailureReport, Restarts
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id
from cordee.core import Job
from cordee.core.errors import JobError, TrainingError
from cordee.monitoring import AnyEvent, events
from cordee.runs.team.losses import Losses
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.state import LossState, RecoveryState, WorkersState
from cordee.runs.team.workers import Workers


class Starter:
    """Notes whom it is asked to start."""

    run_dir = Path("run")
    data = ""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.started: list[int] = []
        self.room = 8

    def start(self, role: str, index: int) -> None:
        self.started.append(index)
        self._membership.expect(MemberRecord(index=index, number=len(self.started) + 10), math.inf)

    def admit(self, index: int, request: JoinRequest) -> str:
        return f"admitted as {index}"

    def check_room(self, num_workers: int) -> None:
        if num_workers > self.room:
            raise JobError("no room")

    def log_file(self, record: MemberRecord) -> Path:
        return Path(f"logs/{record.name}.log")


class Scene:
    """A team that trains, about to lose a worker."""

    def __init__(self, num: int = 3, *, is_elastic: bool = True, max_restarts: int = 1, **cluster: Any) -> None:
        strategy = {"name": "data_parallel" if is_elastic else "sharded", "workers": num}
        tables = {"model": {"use": "mlp"}, "data": {"use": "digits"}, "strategy": strategy}
        self.job = Job.from_dict({**tables, "cluster": {"max_restarts": max_restarts, **cluster}})
        self.membership = Membership(
            num_workers=num,
            min_workers=self.job.cluster.min_workers,
            failure_timeout_s=5.0,
            is_elastic=is_elastic,
        )
        self.events: list[AnyEvent] = []
        self.killed: list[int] = []
        self.should_stop = False
        launcher: Any = SimpleNamespace(
            emit=self.events.append,
            reports=list,
            should_stop=lambda: self.should_stop,
            signal=lambda number, action: self.killed.append(number),
        )
        self.starter = Starter(self.membership)
        channel: Any = SimpleNamespace(members=self.membership, fence=lambda record: None)
        self.state = LossState()
        self.workers_state = WorkersState()
        self.sizes: list[int] = []
        self.workers = Workers(
            self.job,
            launcher,
            channel,
            self.starter,  # type: ignore[arg-type]
            self.workers_state,
            self.sizes.append,
        )
        recoveries = Recoveries(RecoveryState(restarts=Restarts(max_restarts)))
        self.losses = Losses(self.job.cluster, launcher, self.membership, self.workers, recoveries, self.state)
        for index in range(num):
            self.join(MemberRecord(index=index, number=index))
        self.membership.form(list(range(num)))

    def join(self, record: MemberRecord) -> None:
        self.membership.join(self.membership.expect(record, 0.0), 1, math.inf)

    def kill(self, index: int) -> None:
        """Have a worker end by SIGKILL, and the coordinator find out."""
        self.membership.exit(index, "was killed by SIGKILL", 0.0, is_killed=True)
        self.losses.check_members()

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, events.Warned)]

    def of(self, kind: type[AnyEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def test_a_lost_worker_is_replaced_as_often_as_may_be() -> None:
    scene = Scene(max_restarts=1)
    scene.kill(1)
    assert scene.starter.started == [1] and scene.warnings[-1].endswith("; it is being replaced")
    scene.kill(2)
    assert scene.starter.started == [1]
    assert scene.warnings[-1].endswith("; no replacement is left (cluster.max_restarts = 1)")
    assert [event.worker for event in scene.of(events.WorkerLost)] == [1, 2]


def test_a_loss_is_told_with_the_step_that_the_team_is_in() -> None:
    scene = Scene()
    scene.membership.record_heartbeat(1, 0.0, step=0)
    scene.membership.record_heartbeat(0, 0.0, step=115)  # the others say what they have done after the loss
    scene.kill(1)
    (lost,) = scene.of(events.WorkerLost)
    assert lost.step == 115 and "worker 1 was killed by SIGKILL (in step 116);" in scene.warnings[-1]


def test_a_team_whose_model_is_split_starts_again_as_a_whole() -> None:
    scene = Scene(is_elastic=False)
    scene.kill(1)
    assert scene.killed == [0, 2] and sorted(scene.starter.started) == [0, 1, 2]
    assert scene.warnings[-1].endswith("; the team starts again from the last checkpoint")


def test_two_members_of_a_split_model_that_are_lost_at_once_cost_one_restart() -> None:
    scene = Scene(is_elastic=False, max_restarts=1)
    scene.membership.exit(0, "was killed by SIGKILL", 0.0, is_killed=True)
    scene.kill(1)
    assert sorted(scene.starter.started) == [0, 1, 2]
    assert scene.warnings[-1].endswith("; it starts again with the team")


def test_a_split_model_without_replacement_ends_the_run() -> None:
    scene = Scene(is_elastic=False, max_restarts=0)
    with pytest.raises(TrainingError, match=r"all 0 replacements are used up .* its log is logs/worker-1.log"):
        scene.kill(1)


def test_an_external_worker_is_not_replaced() -> None:
    scene = Scene(max_restarts=5)
    scene.join(MemberRecord(index=3))
    scene.kill(3)
    assert scene.starter.started == [] and scene.warnings[-1].endswith("; it had joined by itself and is not replaced")


def test_the_cause_of_a_failure_ends_the_run_with_its_log() -> None:
    scene = Scene()
    scene.membership.report(FailureReport(2, 7, "raised ValueError: bad", traceback="...", at_s=1.0))
    with pytest.raises(TrainingError, match=r"worker 2 raised ValueError: bad \(in step 8\).*logs/worker-2.log"):
        scene.losses.check_members()


def test_too_few_workers_wait_for_others_and_then_save_and_end() -> None:
    scene = Scene(2, max_restarts=0, min_workers=2, wait_for_workers="60s")
    scene.kill(1)
    assert "1 of at least 2 workers are left; waiting 60 s for others" in scene.warnings[-1]
    scene.losses.check_shortage()
    assert scene.losses.end_reason is None and scene.membership.min_workers == 2
    shortage = scene.state.shortage
    assert shortage is not None
    scene.state.shortage = type(shortage)(shortage.end_reason, 0.0)  # the time is over
    scene.losses.check_shortage()
    assert scene.losses.end_reason is not None and "worker 1 was killed by SIGKILL" in scene.losses.end_reason
    assert scene.membership.min_workers == 1, "those left may form a generation, to save"
    assert scene.warnings[-1].endswith("; saving and ending")


def test_a_shortage_is_over_when_somebody_comes() -> None:
    scene = Scene(2, max_restarts=0, min_workers=2, wait_for_workers="60s")
    scene.kill(1)
    scene.join(MemberRecord(index=2))
    scene.losses.check_shortage()
    assert scene.state.shortage is None and scene.losses.end_reason is None


def test_ctrl_c_ends_the_wait_for_others() -> None:
    scene = Scene(2, max_restarts=0, min_workers=2, wait_for_workers="60s")
    scene.kill(1)
    scene.should_stop = True
    scene.losses.check_shortage()
    assert scene.state.shortage is None and scene.membership.min_workers == 1


def test_nobody_waits_for_others_with_nothing_to_save() -> None:
    scene = Scene(1, max_restarts=0, min_workers=1, wait_for_workers="60s")
    with pytest.raises(TrainingError, match="0 of at least 1 workers are left"):
        scene.kill(0)


def test_more_workers_get_the_lowest_free_numbers() -> None:
    scene = Scene(3, max_restarts=0)
    scene.kill(1)
    assert scene.workers.scale(4) == "from 2 to 4 workers"
    assert scene.starter.started == [1, 3] and scene.membership.num_workers == 4
    (scaled,) = scene.of(events.Scale)
    assert (scaled.workers, scaled.before) == (4, 2)


def test_of_fewer_workers_the_last_ones_leave() -> None:
    scene = Scene(3)
    scene.workers.scale(2)
    assert scene.membership.active == [0, 1] and scene.membership.needs_pause
    assert scene.starter.started == [] and scene.killed == []


def test_other_numbers_of_threads_form_another_generation() -> None:
    scene = Scene(2)
    assert scene.workers.scale(2, threads=3) == "from 2 to 2 workers, 3 threads each"
    assert scene.workers.is_reform_wanted and scene.workers.threads == 3
    scene.workers.record_formed()
    assert not scene.workers.is_reform_wanted


def test_numbers_of_workers_that_cannot_be_are_refused() -> None:
    scene = Scene(2, min_workers=2)
    with pytest.raises(JobError, match=r"cluster.min_workers = 2 is more than 1"):
        scene.workers.scale(1)
    with pytest.raises(JobError, match="no room"):
        scene.workers.scale(9)
    with pytest.raises(JobError, match="'sharded' has a fixed number of workers"):
        Scene(2, is_elastic=False).workers.scale(3)
    assert scene.starter.started == [] and scene.of(events.Scale) == []


def test_who_may_join() -> None:
    scene = Scene(2)
    here = JoinRequest(1, "host", host_id(), "0.1.0", "2.13.0")
    assert scene.workers.admit(here, "") == "admitted as 2"
    assert scene.sizes == [3], "the strategy is asked whether it can have one more"
    with pytest.raises(JobError, match="nobody can join it"):
        Scene(2, is_elastic=False).workers.admit(here, "")


def test_a_worker_of_another_host_waits_until_the_data_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.runs.team.workers.check_join_request", lambda request, public: True)
    scene = Scene(2)
    there = JoinRequest(1, "b", "another", "0.1.0", "2.13.0")
    with pytest.raises(NotYetError, match="still starting"):
        scene.workers.admit(there, "tcp://10.0.0.1:1")
    scene.workers._state.data = "digits, 1,442 samples"
    assert scene.workers.admit(there, "tcp://10.0.0.1:1") == "admitted as 2"


def test_a_frozen_worker_that_nobody_replaces_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for look in ("is_alive", "is_stopped"):
        monkeypatch.setattr(f"cordee.runs.team.losses.{look}", lambda pid: False)
    monkeypatch.setattr("cordee.cluster.processes.ProcessorWatch.is_working", lambda self, pid: False)
    for max_restarts in (1, 0):
        scene = Scene(2, max_restarts=max_restarts)
        scene.membership.of(1).heard_s = -math.inf
        scene.losses.check_members()
        assert scene.killed == ([1] if max_restarts else [])
        assert scene.membership.of(1).is_away == (max_restarts == 0)
