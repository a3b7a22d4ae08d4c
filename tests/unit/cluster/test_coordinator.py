"""The turns of a coordinator: what it hears is written down with what follows, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cordee.cluster import coordinator
from cordee.cluster.coordinator import Addresses, CoordinatorSpec, MemberStarter
from cordee.cluster.engine import ProcessSpec
from cordee.cluster.launcher_link import LauncherSpec
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import Members, incarnation_of
from cordee.communication.keys import make_keys
from cordee.communication.messages import COORDINATION, JoinRequest
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core import Job


class Launcher:
    """Records what is written down, and when."""

    def __init__(self, story: list[str], restored: bytes | None) -> None:
        self.story, self.restored, self.has_pending = story, restored, False

    def commit(self, state: bytes) -> None:
        self.story.append(f"write {state.decode()}")

    def emit(self, kind: str, **fields: Any) -> None:
        raise AssertionError(kind)


class Leader:
    """A run of two turns. Hearing changes what is known; deciding has something follow from it."""

    codec = Codec(COORDINATION)

    def __init__(self, story: list[str], ended: str | None = None) -> None:
        self.story, self.ended = story, ended
        self.addresses, self.step = Addresses("tcp://127.0.0.1:*"), 7
        self.has_pending = False
        self.num_turns, self.num_waits = 0, 1

    def find_ended(self) -> Any:
        return self.ended

    def open(self, channel: object) -> None:
        self.story.append("open")

    def begin(self) -> None:
        self._want("begin")

    def resend_directives(self) -> None:
        self._want("take up")

    @property
    def is_over(self) -> bool:
        return self.num_turns >= 2

    def receive(self, timeout_s: float) -> None:
        self._want("receive")

    def decide(self) -> None:
        self.num_turns += 1
        self.story.append("decide")  # nothing follows from it

    def shut_down(self) -> bool:
        self._want("shut_down")
        self.num_waits -= 1
        return self.num_waits >= 0

    def encode(self) -> bytes:
        return b"state"

    def flush(self) -> None:
        self.has_pending = False
        self.story.append("do")

    def summarise(self) -> Any:
        return "summary"

    def _want(self, what: str) -> None:
        self.story.append(what)
        self.has_pending = True


def spec_in(folder: Path, *, resume: bool = False) -> CoordinatorSpec:
    server, (client, control) = make_keys(2)
    return CoordinatorSpec(
        kind="team",
        run_dir=str(folder),
        run_id="run",
        server_keys=server.to_text(),
        client_keys=client.to_text(),
        control_keys=control.to_text(),
        resume=resume,
        launcher_pid=1,
        num_slots=1,
        facts={},
        launcher=LauncherSpec(folder=str(folder), run_dir=str(folder), run_id="run", alive_every_s=1.0),
    )


def lead(folder: Path, restored: bytes | None = None, *, resume: bool = False, ended: str | None = None) -> list[str]:
    story, spec = list[str](), spec_in(folder, resume=resume)
    summary = coordinator._lead(spec, Leader(story, ended), Launcher(story, restored))  # type: ignore[arg-type]
    return [*story, str(summary)]


DONE = ["write state", "do"]
TURNS = [*("receive", *DONE, "decide", "do") * 2, "shut_down", *DONE, "receive", "shut_down", *DONE, "summary"]


def test_nothing_is_done_before_it_is_written_down(tmp_path: Path) -> None:
    assert lead(tmp_path) == ["open", "begin", *DONE, *TURNS]
    assert (tmp_path / "control.json").exists()


def test_one_that_comes_back_takes_up_and_starts_nobody(tmp_path: Path) -> None:
    assert lead(tmp_path, b"state") == ["open", "take up", *DONE, *TURNS]
    assert lead(tmp_path, b"state", resume=True, ended="ended")[0] == "open", "the run had begun"


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_nothing_left_to_do_is_not_begun(tmp_path: Path, resume: bool) -> None:
    assert (lead(tmp_path, resume=resume, ended="ended") == ["ended"]) == resume


class Starts:
    """A launcher that records what is to be started."""

    def __init__(self) -> None:
        self.specs: list[ProcessSpec] = []

    def start(self, spec: ProcessSpec) -> None:
        self.specs.append(spec)


def test_members_are_told_the_same_whoever_has_started_them(tmp_path: Path) -> None:
    job = Job.from_dict({"model": {"use": "mlp"}, "data": {"use": "iris"}, "strategy": {"workers": 2}})
    spec, addresses = spec_in(tmp_path, resume=True), Addresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    members, launcher, fenced = Members(failure_timeout_s=5.0), Starts(), dict[str, int]()
    starter = MemberStarter(spec, job, launcher, members, addresses, fenced.__setitem__, "a.b")  # type: ignore[arg-type]
    starter.data = "data"
    record = starter.start("server", 1, replica=1, has_state=False)
    (process,) = launcher.specs
    assert (process.index, process.incarnation, process.target) == (record.number, record.started, "a.b.server:main")
    told = msgspec.convert(process.argument, MemberSpec)
    assert told.name == "server-1.1" and told.num_local == 2 and not told.has_state and not told.is_external
    assert (told.address, told.host_address) == ("tcp://127.0.0.1:1", "127.0.0.1")
    assert (told.data, told.load_job().to_dict()["model"]) == ("data", job.to_dict()["model"])
    own = msgspec.structs.replace(told, role="worker", index=2, replica=0, has_state=True, launcher_pid=1)
    for host in (host_id(), "another"):
        joined = msgspec.json.decode(starter.admit(2, JoinRequest(77, "host", host, "1", "2")), type=MemberSpec)
        assert msgspec.structs.replace(joined, serial=own.serial) == own and joined.serial > own.serial
        assert joined.is_external and not joined.is_remote
        record = members.records["worker-2"]
        assert record.is_external and record.is_remote == (host == "another") and record.pid == 77
    assert msgspec.structs.replace(told, run_host="another").is_remote


def test_the_process_that_is_replaced_is_not_listened_to(tmp_path: Path) -> None:
    job = Job.from_dict({"model": {"use": "mlp"}, "data": {"use": "iris"}, "strategy": {"workers": 2}})
    members, launcher, fenced = Members(failure_timeout_s=5.0), Starts(), dict[str, int]()
    addresses = Addresses("tcp://127.0.0.1:1")
    starter = MemberStarter(spec_in(tmp_path), job, launcher, members, addresses, fenced.__setitem__, "a")  # type: ignore[arg-type]
    members.join(starter.start("worker", 0), 40, 1.0)
    assert fenced == {}
    starter.start("worker", 0)
    assert fenced == {"worker-0": incarnation_of(2, 0) - 1} and [spec.index for spec in launcher.specs] == [1, 2]
