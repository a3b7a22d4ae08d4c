"""The turns of a coordinator: what it hears is written down with what follows, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cordee.cluster import coordinator
from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.launcher_link import LauncherSpec
from cordee.cluster.members import Process
from cordee.communication.keys import make_keys
from cordee.communication.messages import COORDINATION
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

    def take_up(self) -> None:
        self._want("take up")

    @property
    def is_over(self) -> bool:
        return self.num_turns >= 2

    def hear(self, timeout_s: float) -> None:
        self._want("hear")

    def decide(self) -> None:
        self.num_turns += 1
        self.story.append("decide")  # nothing follows from it

    def dismiss(self) -> bool:
        self._want("dismiss")
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
TURNS = [*("hear", *DONE, "decide") * 2, "dismiss", *DONE, "hear", "dismiss", *DONE, "summary"]


def test_nothing_is_done_before_it_is_written_down(tmp_path: Path) -> None:
    assert lead(tmp_path) == ["open", "begin", *DONE, *TURNS]
    assert (tmp_path / "control.json").exists()


def test_one_that_comes_back_takes_up_and_starts_nobody(tmp_path: Path) -> None:
    assert lead(tmp_path, b"state") == ["open", "take up", *DONE, *TURNS]
    assert lead(tmp_path, b"state", resume=True, ended="ended")[0] == "open", "the run had begun"


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_nothing_left_to_do_is_not_begun(tmp_path: Path, resume: bool) -> None:
    assert (lead(tmp_path, resume=resume, ended="ended") == ["ended"]) == resume


def test_external_workers_are_told_what_others_are_and_what_they_miss(tmp_path: Path) -> None:
    job = Job.from_dict({"model": {"use": "mlp"}, "data": {"use": "iris"}, "strategy": {"workers": 2}})
    (tmp_path / "job.toml").write_text(job.to_toml())
    spec, addresses = spec_in(tmp_path, resume=True), Addresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    told = spec.tell(job, addresses, Process(role="server", index=1, replica=1), resume=True)
    assert told.name == "server-1.1" and told.num_local == 2 and not told.is_remote
    assert (told.address, told.host_address, told.launcher_pid) == ("tcp://127.0.0.1:1", "127.0.0.1", 0)
    near = spec.tell_external(told, addresses, "data", is_remote=False)
    assert near == msgspec.structs.replace(told, launcher_pid=1), "it ends with the launcher, and has the run's files"
    far = spec.tell_external(told, addresses, "data", is_remote=True)
    assert far.is_remote and far.job == job.to_toml() and far.data == "data"
    assert (far.address, far.launcher_pid, far.resume) == ("tcp://127.0.0.1:2", 0, False)
