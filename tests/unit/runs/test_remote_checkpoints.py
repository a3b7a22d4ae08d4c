"""Checkpoints of a worker without the run directory: over a real channel, from and to the coordinator's folder."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.cluster.control import TOKEN_FILE, has_run_directory, marked
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import MemberRecord
from cordee.cluster.messages import PIECE_BYTES, TEAM, CheckpointEnd, CheckpointPiece, CheckpointTaken, ReadPiece
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import Refused
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CheckpointError, CommunicationError, StorageError
from cordee.runs.checkpoints import CheckpointReceiver, RemoteCheckpoints
from cordee.runs.team.link import TeamLink
from cordee.runs.team.member_channel import TeamChannel
from cordee.runs.team.membership import Membership

pytestmark = pytest.mark.timeout(60)
SERVER_KEYS, (CLIENT_KEYS,) = make_keys()


class Coordinator:
    """Serves one worker in a thread; another can take its place at the same address."""

    def __init__(self, root: Path, address: str = "tcp://127.0.0.1:*", membership: Membership | None = None) -> None:
        self.membership = membership or Membership(num_workers=1, failure_timeout_s=5.0)
        if membership is None:
            self.membership.expect(MemberRecord(index=0, number=0), time.monotonic())
        self._channel = ServerChannel(
            address, Speaker(run="run", name="coordinator", incarnation=time.time_ns()), Codec(TEAM), SERVER_KEYS
        )
        self.address = self._channel.address
        self.receiver = CheckpointReceiver(root, self.membership)
        self._team_channel = TeamChannel(
            self._channel, self.membership, lambda _: None, lambda _: "", lambda *_: None, self.receiver
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self._team_channel.serve(0.01)
            self._team_channel.flush()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(5)
        self._channel.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with closing(Coordinator(tmp_path / "checkpoints")) as coordinator:
        yield coordinator


@pytest.fixture
def store(coordinator: Coordinator) -> Iterator[RemoteCheckpoints]:
    spec = MemberSpec(
        kind="team",
        role="worker",
        index=0,
        run_dir="/not here",
        run_id="run",
        run_host=host_id(),
        job="",
        address=coordinator.address,
        client_keys=CLIENT_KEYS.to_text(),
        failure_timeout_s=5.0,
        startup_timeout_s=10.0,
    )
    with TeamLink(spec) as link:
        link.join()
        with closing(RemoteCheckpoints(spec, link)) as opened:
            yield opened


def state_of(step: int, num_values: int = 1000) -> State:
    values = torch.arange(num_values, dtype=torch.float32) + step
    return State({"model.x": values, "model.y": torch.ones(3), "optimizer.x": values / 2}, {"step": step})


def save(store: RemoteCheckpoints, step: int, **changes: Any) -> Path:
    return store.save(step, state_of(step, changes.pop("num_values", 1000)), keep=changes.pop("keep", 2), protected=())


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_sent_is_what_a_worker_saves_by_itself(store: RemoteCheckpoints, tmp_path: Path) -> None:
    num_values = PIECE_BYTES  # of four bytes each: several pieces
    path = save(store, 3, num_values=num_values)
    assert path == tmp_path / "checkpoints" / "step-3"
    own = checkpoint.save(tmp_path / "own", 3, state_of(3, num_values), keep=2)
    assert files_in(path) == files_in(own)
    loaded = store.load_newest()
    assert loaded is not None and loaded.step == 3 and not loaded.damaged
    assert torch.equal(loaded.state.tensors["model.x"], state_of(3, num_values).tensors["model.x"])
    assert loaded.state.values == {"step": 3}


def test_old_ones_are_removed_but_those_to_keep(store: RemoteCheckpoints, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        store.save(step, state_of(step), keep=2, protected=(1,))
    assert store.names() == ["step-1", "step-3", "step-4"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == store.names()


def test_a_damaged_one_is_passed_over(store: RemoteCheckpoints) -> None:
    assert store.load_newest() is None and store.names() == []
    save(store, 1)
    (save(store, 2) / "values.json").write_text("{}")
    loaded = store.load_newest()
    assert loaded is not None and loaded.step == 1 and [path.name for path, _ in loaded.damaged] == ["step-2"]


def test_a_coordinator_that_dies_half_way_leaves_nothing_and_is_sent_all_again(
    store: RemoteCheckpoints, coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[Coordinator] = []
    request = store._requests._channel.request

    def ask(message: Any, **options: Any) -> Any:
        if isinstance(message, CheckpointPiece) and message.index == 2 and not later:
            coordinator.close()
            assert len(list((tmp_path / "checkpoints").glob(".*"))) == 1
            coordinator.receiver.close()  # what the process of another coordinator does with that of a dead one
            later.append(Coordinator(tmp_path / "checkpoints", coordinator.address, coordinator.membership))
        return request(message, **options)

    monkeypatch.setattr(store._requests._channel, "request", ask)
    try:
        path = save(store, 5, num_values=PIECE_BYTES)
    finally:
        store.close()
        for other in later:
            other.close()
    assert later and checkpoint.load(path).values == {"step": 5}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_a_disk_that_refuses_is_told_like_that_of_a_worker(store: RemoteCheckpoints, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(StorageError) as own:
        checkpoint.save(tmp_path / "checkpoints", 1, state_of(1), keep=1)
    with pytest.raises(StorageError) as told:
        save(store, 1)
    assert str(told.value) == str(own.value)
    (tmp_path / "checkpoints").unlink()
    assert checkpoint.load(save(store, 1)).values == {"step": 1}, "the next one is saved"


def test_a_link_in_the_place_of_the_folder_is_refused(store: RemoteCheckpoints, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link"):
        save(store, 1)
    with pytest.raises(CheckpointError, match="is a link"):
        store.names()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_nothing_is_taken_of_a_worker_that_was_given_up(
    store: RemoteCheckpoints, coordinator: Coordinator, tmp_path: Path
) -> None:
    record = coordinator.membership.of(0)
    coordinator.membership.lose(record, is_away=False)
    with pytest.raises(CommunicationError, match="given up"):
        save(store, 1)
    assert not (tmp_path / "checkpoints").exists()


# The coordinator's side, message by message


@pytest.fixture
def receiver(tmp_path: Path) -> CheckpointReceiver:
    membership = Membership(num_workers=2, failure_timeout_s=5.0)
    for index in range(2):
        record = membership.expect(MemberRecord(index=index, number=index), 0.0)
        membership.join(record, 7, 0.0)
    return CheckpointReceiver(tmp_path, membership)


def piece(
    index: int, content: bytes, *, member: str = "worker-0", incarnation: int = 7, number: int = 1
) -> CheckpointPiece:
    return CheckpointPiece(member, incarnation, number, index, 4, "values.json", content)


def end(num_pieces: int, content: bytes, *, number: int = 1) -> CheckpointEnd:
    files = {"values.json": (len(content), hashlib.sha256(content).hexdigest())}
    return CheckpointEnd("worker-0", 7, number, num_pieces, files, 1, ())


def test_what_comes_again_counts_once(receiver: CheckpointReceiver, tmp_path: Path) -> None:
    for again in (piece(0, b"{"), piece(0, b"{"), piece(1, b"}"), piece(0, b"{"), piece(1, b"}")):
        assert receiver.handle(again) == CheckpointTaken()
    saved = receiver.handle(end(2, b"{}"))
    assert saved == CheckpointTaken(path=str(tmp_path / "step-4")) and checkpoint.load(tmp_path / "step-4").values == {}
    assert receiver.handle(end(2, b"{}")) == saved, "the answer was lost"
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_pieces_that_are_missing_are_asked_for(receiver: CheckpointReceiver, tmp_path: Path) -> None:
    unknown = CheckpointTaken(is_known=False)
    assert receiver.handle(piece(1, b"}")) == unknown and receiver.handle(end(1, b"{}")) == unknown
    assert receiver.handle(piece(0, b"{")) == CheckpointTaken()
    assert receiver.handle(piece(2, b"}")) == unknown and receiver.handle(end(2, b"{}")) == unknown
    assert receiver.handle(end(1, b"{", number=2)) == unknown, "of another checkpoint"
    receiver.close()
    assert not list(tmp_path.iterdir())


def test_what_arrives_damaged_is_not_saved(receiver: CheckpointReceiver, tmp_path: Path) -> None:
    receiver.handle(piece(0, b"{}"))
    taken = receiver.handle(end(1, b"[]"))
    assert isinstance(taken, CheckpointTaken) and "damaged" in taken.problem
    assert not list(tmp_path.iterdir())


def test_what_a_lost_worker_began_is_removed_when_another_begins(receiver: CheckpointReceiver, tmp_path: Path) -> None:
    receiver.handle(piece(0, b"{}", member="worker-1"))
    receiver._members.lose(receiver._members.records["worker-1"])
    assert isinstance(receiver.handle(piece(1, b"{}", member="worker-1")), Refused)
    receiver.handle(piece(0, b"{}"))
    assert len(list(tmp_path.iterdir())) == 1
    receiver.handle(piece(0, b"{}", number=2))
    assert len(list(tmp_path.iterdir())) == 1, "the same worker has begun another"


@pytest.mark.parametrize("file", ["../x.safetensors", "manifest.json", "x", "/etc/passwd", ".safetensors"])
def test_other_files_are_not_written(receiver: CheckpointReceiver, tmp_path: Path, file: str) -> None:
    answer = receiver.handle(CheckpointPiece("worker-0", 7, 1, 0, 4, file, b"x"))
    assert isinstance(answer, Refused) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, file", [("..", "values.json"), ("step-4", "../x"), ("step-4/..", "manifest.json")])
def test_other_files_are_not_read(receiver: CheckpointReceiver, name: str, file: str) -> None:
    answer = receiver.handle(ReadPiece(name, file, 0))
    assert getattr(answer, "problem", "").endswith(("is no checkpoint", "is no file of a checkpoint"))


def test_a_process_finds_out_whether_it_has_the_run_directory(tmp_path: Path) -> None:
    with marked(tmp_path, "run"):
        assert has_run_directory(tmp_path, "run")
        assert not has_run_directory(tmp_path, "another run"), "the folder of that name on another host"
        assert not has_run_directory(tmp_path / "not there", "run")
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert not has_run_directory(tmp_path / "copy", "run"), "a copy on another host"
        shutil.rmtree(tmp_path / "copy")
    assert not has_run_directory(tmp_path, "run") and not list(tmp_path.iterdir())
    (tmp_path / TOKEN_FILE).mkdir()
    with marked(tmp_path, "run"):
        assert not has_run_directory(tmp_path, "run"), "the disk has refused the mark"
