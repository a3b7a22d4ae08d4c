"""The engine `env` without processes: how a launch meets, and what rank 0 has its slots do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cordee.cluster.engines import environment
from cordee.cluster.engines.agent_messages import AgentOrder, Versions
from cordee.cluster.engines.environment import (
    LEAVE_AFTER_S,
    MISSING_S,
    SILENT_S,
    Slots,
    place_run,
    slots_by_host,
)
from cordee.cluster.engines.environment_link import (
    Connection,
    Rendezvous,
    SlotState,
    SlotTask,
    candidate_ports,
    close_server,
    find_rendezvous,
    open_server,
    own_ip,
)
from cordee.communication.keys import derive_keys
from cordee.communication.messages import Refused
from cordee.core import Job
from cordee.core.errors import CommunicationError, JobError
from cordee.core.launchers import LaunchedTask

SECRET = "a secret of enough characters"
ONE_HOST = LaunchedTask(
    launcher="torchrun",
    rank=0,
    world_size=2,
    local_rank=0,
    num_hosts=1,
    tasks_per_host=2,
    host="here",
    launch_id="launch/1",
)
TWO_HOSTS = msgspec.structs.replace(ONE_HOST, num_hosts=2, tasks_per_host=1, first_host="127.0.0.1")


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, and nothing of a launch in the environment."""
    for name in ("CORDEE_SECRET", "CORDEE_SECRET_FILE", "CORDEE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    yield tmp_path


def order(number: int) -> AgentOrder:
    return AgentOrder(number=number, run="r", address="tcp://h:1", server_key="", ticket="t", failure_timeout_s=5.0)


def state(rank: int, **more: object) -> SlotState:
    return SlotState(**{"rank": rank, "host": f"h{rank}", "versions": Versions.here(), **more})  # type: ignore[arg-type]


class Trial:
    """Slots, and a clock."""

    def __init__(self, world_size: int = 2) -> None:
        self.slots = Slots(world_size)
        self.now_s = 100.0
        self.is_stopping = False

    def says(self, rank: int, incarnation: int = 1, **more: object) -> SlotTask:
        told = self.slots.handle(state(rank, **more), incarnation, self.now_s, is_stopping=self.is_stopping)
        assert isinstance(told, SlotTask), told
        return told

    def ended(self) -> dict[int, str]:
        return {ended.number: ended.how for ended in self.slots.take_ended(self.now_s)}


def test_agents_go_to_slots_that_have_none() -> None:
    trial = Trial()
    assert trial.says(0).action == "wait"
    trial.slots.ask(order(0), trial.now_s)
    trial.slots.ask(order(1), trial.now_s)
    assert trial.says(0) == SlotTask("start", order(0).to_text())
    assert trial.says(0) == SlotTask("start", order(0).to_text()), "the answer may be lost"
    assert trial.says(0, agent=0).action == "wait"
    assert trial.says(1) == SlotTask("start", order(1).to_text())
    assert trial.ended() == {}


def test_an_agent_that_ends_is_reported_once_and_its_slot_takes_another() -> None:
    trial = Trial()
    trial.slots.ask(order(0), trial.now_s)
    trial.says(1)
    trial.says(1, agent=0)
    assert trial.says(1, ended=0, how="was killed by SIGKILL").action == "wait"
    assert trial.ended() == {0: "was killed by SIGKILL"}
    trial.slots.ask(order(1), trial.now_s)
    assert trial.says(1, ended=0, how="was killed by SIGKILL") == SlotTask("start", order(1).to_text())
    assert trial.ended() == {}


def test_a_slot_that_is_silent_or_started_again_has_lost_its_agent() -> None:
    trial = Trial()
    trial.slots.ask(order(0), trial.now_s)
    trial.says(1)
    trial.now_s += SILENT_S + 1
    assert trial.ended() == {0: "rank 1 on h1 was not heard of for 11 s"}
    trial.slots.ask(order(1), trial.now_s)
    assert trial.says(1).action == "start"
    assert trial.says(1, incarnation=2).action == "wait"
    assert trial.ended() == {1: "rank 1 on h1 was started again"}


def test_processes_that_do_not_come_are_named() -> None:
    trial = Trial(world_size=4)
    for rank in (0, 2):
        trial.says(rank)
        trial.slots.ask(order(rank), trial.now_s)
        trial.says(rank)
    trial.slots.ask(order(3), trial.now_s)
    for _ in range(20):
        trial.now_s += MISSING_S / 19
        for rank in (0, 2):
            trial.says(rank, agent=rank)
    assert trial.ended() == {3: "nothing was heard of rank 1, 3 within 120 s: what they print says why"}


def test_agents_that_are_not_needed_are_stopped() -> None:
    trial = Trial()
    trial.slots.ask(order(0), trial.now_s)
    trial.says(1)
    trial.slots.stop(0)
    assert trial.says(1).action == "wait", "it had not begun"
    assert trial.ended() == {0: ""}
    trial.slots.ask(order(1), trial.now_s)
    trial.says(1)
    trial.slots.stop(1)
    assert trial.says(1, agent=1).action == "stop"
    assert trial.slots.has_agents
    trial.says(1, ended=1)
    assert not trial.slots.has_agents


def test_a_process_that_is_asked_to_end_leaves_unless_the_whole_run_ends() -> None:
    trial = Trial()
    trial.slots.ask(order(0), trial.now_s)
    trial.says(1)
    assert trial.says(1, agent=0, is_leaving=True).action == "wait", "rank 0 may be asked as well"
    trial.now_s += LEAVE_AFTER_S + 0.1
    trial.is_stopping = True
    assert trial.says(1, agent=0, is_leaving=True).action == "wait", "the run is saved with it"
    trial.is_stopping = False
    assert trial.says(1, agent=0, is_leaving=True).action == "stop"
    trial.slots.ask(order(1), trial.now_s)
    assert trial.says(1, ended=0, is_leaving=True) == SlotTask("over", code=130), "it gets no other agent"


def test_everybody_exits_with_the_code_of_the_run() -> None:
    trial = Trial()
    trial.says(0)
    trial.says(1)
    trial.slots.finish(2)
    assert trial.says(0) == SlotTask("over", code=2)
    assert not trial.slots.is_everybody_told
    assert trial.says(1) == SlotTask("over", code=2)
    assert trial.slots.is_everybody_told


def test_a_process_that_was_not_there_yet_is_waited_for_and_a_lost_one_is_not() -> None:
    trial = Trial()
    trial.says(0)
    trial.slots.finish(2)
    trial.says(0)
    assert not trial.slots.is_everybody_told, "rank 1 is still starting"
    trial = Trial()
    trial.says(0)
    trial.says(1)
    trial.now_s += SILENT_S + 1
    trial.says(0)
    trial.ended()
    trial.slots.finish(0)
    trial.says(0)
    assert trial.slots.is_everybody_told, "rank 1 was lost"


def test_another_version_is_refused_and_both_are_named() -> None:
    other = Versions("0.0.1", "2.0", "3.9")
    told = Slots(2).handle(state(1, versions=other), 1, 0.0, is_stopping=False)
    assert isinstance(told, Refused)
    assert "cordee 0.0.1, torch 2.0 and Python 3.9" in told.detail
    assert Versions.here().describe() in told.detail


def test_several_hosts_need_a_secret(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_rendezvous(ONE_HOST).secret == ""
    with pytest.raises(JobError, match="no secret that they share: without one anybody on the network"):
        find_rendezvous(TWO_HOSTS)
    monkeypatch.setenv("CORDEE_SECRET", "short")
    with pytest.raises(JobError, match="5 characters, and must have at least 16"):
        find_rendezvous(TWO_HOSTS)
    monkeypatch.setenv("CORDEE_SECRET", SECRET)
    assert find_rendezvous(TWO_HOSTS).secret == SECRET
    with pytest.raises(JobError, match="does not say on which host rank 0 is: set MASTER_ADDR"):
        find_rendezvous(msgspec.structs.replace(TWO_HOSTS, first_host=""))
    with pytest.raises(JobError, match="set CORDEE_JOB_ID"):
        find_rendezvous(msgspec.structs.replace(TWO_HOSTS, launch_id=""))
    assert find_rendezvous(msgspec.structs.replace(ONE_HOST, launch_id="")).launch_id.startswith("parent/")


def test_a_file_with_the_secret_is_the_users_alone(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = private / "secret"
    monkeypatch.setenv("CORDEE_SECRET_FILE", str(file))
    with pytest.raises(JobError, match=r"CORDEE_SECRET_FILE: .*No such file"):
        find_rendezvous(TWO_HOSTS)
    file.write_text(SECRET + "\n")
    file.chmod(0o644)
    with pytest.raises(JobError, match="can be read or changed by others"):
        find_rendezvous(TWO_HOSTS)
    file.chmod(0o600)
    assert find_rendezvous(TWO_HOSTS).secret == SECRET
    file.write_text("\n")
    with pytest.raises(JobError, match="is empty"):
        find_rendezvous(TWO_HOSTS)
    monkeypatch.setenv("CORDEE_SECRET", SECRET)
    with pytest.raises(JobError, match="both set: which is meant"):
        find_rendezvous(TWO_HOSTS)


def test_keys_follow_from_the_secret_and_the_launch() -> None:
    server, clients = derive_keys(SECRET, "launch/1", 3)
    again, _ = derive_keys(SECRET, "launch/1", 3)
    assert server.parts() == again.parts()
    assert server.admitted == tuple(client.public for client in clients)
    assert len({client.secret for client in clients} | {server.secret}) == 4
    for secret, launch in ((SECRET, "launch/2"), (SECRET + "x", "launch/1")):
        other, _ = derive_keys(secret, launch, 3)
        assert other.public != server.public


def test_ports_follow_from_the_launch() -> None:
    ports = candidate_ports("launch/1")
    assert ports == candidate_ports("launch/1") != candidate_ports("launch/2")
    assert len(set(ports)) == 16 and all(20_000 <= port < 30_000 for port in ports)


def test_where_rank_0_listens() -> None:
    assert own_ip(ONE_HOST) == "127.0.0.1"
    assert own_ip(TWO_HOSTS) == "127.0.0.1", "the user says so"
    with pytest.raises(JobError, match="cannot be looked up"):
        own_ip(msgspec.structs.replace(TWO_HOSTS, first_host="no-such-host.invalid"))
    with pytest.raises(JobError, match=r"cannot listen at 192\.0\.2\.77"):
        own_ip(msgspec.structs.replace(TWO_HOSTS, first_host="192.0.2.77"))


@pytest.mark.parametrize("task", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_processes_of_a_launch_meet_and_others_do_not(
    task: LaunchedTask, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not task.is_one_host:
        monkeypatch.setenv("CORDEE_SECRET", SECRET)
    rendezvous = find_rendezvous(task)
    server = environment.SlotServer(rendezvous, Slots(2))
    try:
        if task.is_one_host:
            assert rendezvous.file.stat().st_mode & 0o777 == 0o600
            assert rendezvous.file.parent.stat().st_mode & 0o777 == 0o700
        else:
            assert int(server.address.rpartition(":")[2]) in rendezvous.ports()
        other = msgspec.structs.replace(rendezvous, task=msgspec.structs.replace(task, rank=1))
        found = Connection(other, find_timeout_s=5.0)
        assert found.ask(state(1)).action == "wait"
        found.close()
        if not task.is_one_host:
            stranger = Connection(msgspec.structs.replace(other, secret=SECRET + "!"), find_timeout_s=1.0)
            with pytest.raises(CommunicationError, match="has not found rank 0 within 1 s"):
                stranger.ask(state(1))
    finally:
        server.close()
    assert not rendezvous.file.exists()


def test_a_process_that_lost_its_connection_is_the_same_process_on_the_next(private: Path) -> None:
    rendezvous, slots = find_rendezvous(ONE_HOST), Slots(2)
    server = environment.SlotServer(rendezvous, slots)
    other = Connection(msgspec.structs.replace(rendezvous, task=msgspec.structs.replace(ONE_HOST, rank=1)))
    try:
        with server.lock:
            slots.ask(order(0), 0.0)
        assert other.ask(state(1)).action == "start"
        assert other.ask(state(1, agent=0)).action == "wait"
        other.close()
        assert other.ask(state(1, agent=0)).action == "wait"
        with server.lock:
            assert slots.has_agents and slots.take_ended(0.0) == []
    finally:
        other.close()
        server.close()


def test_rank_0_takes_another_port_where_the_first_is_used(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_SECRET", SECRET)
    rendezvous = find_rendezvous(TWO_HOSTS)
    first, second = open_server(rendezvous), open_server(rendezvous)
    try:
        assert first.address != second.address
        only: Rendezvous = msgspec.structs.replace(rendezvous, port=int(first.address.rpartition(":")[2]))
        with pytest.raises(JobError, match=r"cannot listen at 127\.0\.0\.1, ports \d+: .*set CORDEE_PORT"):
            open_server(only)
    finally:
        close_server(rendezvous, first)
        close_server(rendezvous, second)


def test_what_an_earlier_launch_left_is_not_read(private: Path) -> None:
    rendezvous = find_rendezvous(ONE_HOST)
    rendezvous.file.parent.mkdir(parents=True, mode=0o700)
    rendezvous.file.write_text('{"address": "tcp://127.0.0.1:1", "secret": "x", "pid": 1, "started": 1.0}')
    rendezvous.file.chmod(0o600)
    with pytest.raises(CommunicationError, match="rank 0 has not written"):
        Connection(rendezvous, find_timeout_s=0.1).ask(state(1))


def test_slots_by_host() -> None:
    assert slots_by_host(ONE_HOST) == {"here": 2}
    assert slots_by_host(TWO_HOSTS) == {"here": 1, "other hosts": 1}
    listed = msgspec.structs.replace(TWO_HOSTS, tasks_by_host={"a": 2, "b": 1})
    assert slots_by_host(listed) == {"a": 2, "b": 1}


class TestWhichRun:
    """Where a run is written, and whether it is resumed, by what the scheduler says."""

    job = Job.from_dict({"name": "j", "model": "mlp", "data": "iris"})

    @pytest.fixture(autouse=True)
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CORDEE_RUNS", str(tmp_path))

    def place(
        self, monkeypatch: pytest.MonkeyPatch, run_dir: Path | None = None, *, resume: bool = False, **task: object
    ) -> tuple[Path | None, bool]:
        monkeypatch.setattr(environment.env, "launched_task", lambda: msgspec.structs.replace(ONE_HOST, **task))
        return place_run(self.job, run_dir, resume)

    def test_without_an_id_as_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.place(monkeypatch) == (None, False)
        assert self.place(monkeypatch, tmp_path / "d") == (tmp_path / "d", False)
        assert self.place(monkeypatch, tmp_path / "d", resume=True) == (tmp_path / "d", True)
        with pytest.raises(JobError, match="nothing says which run to continue: give --run-dir"):
            self.place(monkeypatch, restart_count=1)

    def test_a_job_that_is_started_again_resumes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "j-slurm-12.0"
        assert self.place(monkeypatch, job_id="slurm-12.0", restart_count=0) == (folder, False)
        assert self.place(monkeypatch, job_id="slurm-12.0", restart_count=1) == (folder, False), "nothing to resume"
        folder.mkdir()
        (folder / "job.toml").touch()
        assert self.place(monkeypatch, job_id="slurm-12.0", restart_count=1) == (folder, True)
        assert self.place(monkeypatch, job_id="slurm-12.0", restart_count=0) == (folder, False), "another job's"
        assert self.place(monkeypatch, job_id="slurm-12.0") == (folder, True), "starts are not counted"
        assert self.place(monkeypatch, folder, job_id="other", restart_count=1) == (folder, True)
