"""Files of a federated run, in its directory and through the coordinator: the same files, whoever writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cordee.cluster.control import marked
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.messages import PIECE_BYTES
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import Refused
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError, StorageError
from cordee.runs.federated.link import FederatedLink
from cordee.runs.federated.messages import FEDERATED, LIMITS, AskRoundFiles, ReadRoundFile, WriteRoundFile
from cordee.runs.federated.round_files import FolderFiles, RemoteFiles, RoundFiles, RoundFileServer, open_round_files
from cordee.runs.federated.spool import RoundNumbers, Spool
from cordee.strategies.federated.aggregation import Contribution

pytestmark = pytest.mark.timeout(60)
SERVER_KEYS, (CLIENT_KEYS,) = make_keys()


class Coordinator:
    """Serves the files in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self.members = Members(failure_timeout_s=5.0)
        self._channel = ServerChannel(
            "tcp://127.0.0.1:*",
            Speaker(run="run", name="coordinator", incarnation=time.time_ns()),
            Codec(FEDERATED, LIMITS),
            SERVER_KEYS,
        )
        self.spec = MemberSpec(
            kind="rounds",
            role="worker",
            index=0,
            run_dir=str(run_dir),
            run_id="run",
            run_host=host_id(),
            job="",
            address=self._channel.address,
            client_keys=CLIENT_KEYS.to_text(),
            failure_timeout_s=5.0,
            startup_timeout_s=10.0,
        )
        self.server = RoundFileServer(run_dir, self.members)
        self.heard: list[Any] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def admit(self, link: FederatedLink) -> None:
        record = self.members.expect(MemberRecord(index=0, number=0), 0.0)
        self.members.join(record, link.incarnation, 0.0)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            received = self._channel.receive(0.01)
            if received is not None:
                self.heard.append(received.message)
                self._channel.reply(received, self.server.handle(received.message))  # type: ignore[arg-type]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(5)
        self._channel.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def coordinator(run_dir: Path) -> Iterator[Coordinator]:
    with closing(Coordinator(run_dir)) as coordinator:
        yield coordinator


@pytest.fixture(params=["folder", "remote"])
def files(request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path) -> Iterator[RoundFiles]:
    with ExitStack() as stack:
        if request.param == "folder":
            opened: RoundFiles = FolderFiles(run_dir)
        else:
            opened = stack.enter_context(open_remote(stack.enter_context(closing(Coordinator(run_dir))), tmp_path))
        opened.clear()
        yield opened


@contextmanager
def open_remote(coordinator: Coordinator, tmp_path: Path) -> Iterator[RemoteFiles]:
    (tmp_path / "copies").mkdir(exist_ok=True)
    with FederatedLink(coordinator.spec) as link:
        coordinator.admit(link)
        with closing(RemoteFiles(coordinator.spec, link, tmp_path / "copies")) as files:
            yield files


def contribution(num_values: int = 5) -> Contribution:
    values = torch.arange(num_values, dtype=torch.float32) + 1
    return Contribution(values, torch.ones(2), {"counts": values * 2}, 2.0, 2.0, 7, 1)


def test_what_is_written_is_read(files: RoundFiles, run_dir: Path) -> None:
    spool = Spool(files)
    large = contribution(PIECE_BYTES)  # of four bytes each, and twice: several pieces
    for place, part in enumerate((contribution(), large)):
        spool.write_leaf(3, place, part, RoundNumbers(loss_sum=0.5, tests=[(1, 2, 3)]))
        found, numbers = spool.read_leaf(3, place)
        assert torch.equal(found.difference, part.difference) and torch.equal(
            found.summed["counts"], part.summed["counts"]
        )
        assert (found.weight, found.num_samples, numbers.tests) == (2.0, 7, [(1, 2, 3)])
    rows = spool.read_columns(3, [1, 1], 2, 4)
    assert torch.equal(rows, torch.stack([large.difference[2:4] / 2.0] * 2))
    assert (run_dir / "rounds" / "leaf-3-1").is_file()
    assert not spool.has_block(3, 0)
    spool.write_block(3, 0, None, RoundNumbers())
    assert spool.has_block(3, 0) and spool.read_block(3, 0) == (None, RoundNumbers())


def test_what_is_over_is_removed(files: RoundFiles, run_dir: Path) -> None:
    spool = Spool(files)
    for number in (1, 2):
        spool.write_block(number, 0, None, RoundNumbers())
        spool.write_leaf(number, 0, contribution(), RoundNumbers())
    for number in (1, 2, 3):
        spool.write_state(17, number, {"x": torch.full((2,), float(number))})
    assert spool.clients() == [17] and torch.equal(spool.read_state(17, 3)["x"], torch.full((2,), 2.0))
    assert sorted(files.names("clients/17")) == ["2", "3"] and spool.read_state(4, 3) == {}
    spool.remove_before(2, 1)
    spool.remove_leaves(2, [0, 5])
    assert sorted(path.name for path in (run_dir / "rounds").iterdir()) == ["block-2-0", "clients"]
    spool.clear()
    assert spool.clients() == [] and files.names() == ["clients"]


def test_a_file_that_is_missing_is_named(files: RoundFiles, run_dir: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*rounds/sent-4: "):
        Spool(files).read_sent(4)


def test_a_disk_that_refuses_is_told(files: RoundFiles, run_dir: Path) -> None:
    (run_dir / "rounds" / "block-1-0").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*block-1-0: "):
        Spool(files).write_block(1, 0, None, RoundNumbers())


def test_a_picture_is_beside_the_folder(files: RoundFiles, run_dir: Path) -> None:
    files.keep_picture(lambda path: None)
    assert not (run_dir / "partition.png").exists()
    files.keep_picture(lambda path: path.write_bytes(b"picture") and None)
    assert (run_dir / "partition.png").read_bytes() == b"picture"


def test_what_was_read_is_kept_for_one_task(coordinator: Coordinator, tmp_path: Path) -> None:
    with open_remote(coordinator, tmp_path) as files:
        files.clear()
        Spool(files).write_leaf(0, 0, contribution(), RoundNumbers())
        before = len(coordinator.heard)
        for _ in range(3):
            Spool(files).read_leaf(0, 0)
        assert len(coordinator.heard) == before + 1
        files.forget()
        assert not list((tmp_path / "copies").iterdir())
        Spool(files).read_leaf(0, 0)


def test_a_coordinator_that_comes_back_is_sent_the_file_again(
    coordinator: Coordinator, run_dir: Path, tmp_path: Path
) -> None:
    """What was half written is gone: the piece that follows is not taken."""
    with open_remote(coordinator, tmp_path) as files:
        files.clear()
        ask, lost = files._requests.ask, []

        def lose_once(message: Any) -> Any:
            if isinstance(message, WriteRoundFile) and message.offset and not lost:
                lost.append(message)
                (run_dir / "rounds" / ".of-worker-0").unlink()
            return ask(message)

        files._requests.ask = lose_once  # type: ignore[method-assign]
        large = contribution(PIECE_BYTES)
        Spool(files).write_leaf(0, 0, large, RoundNumbers())
        assert lost and torch.equal(Spool(files).read_leaf(0, 0)[0].difference, large.difference)


def test_a_member_that_was_given_up_changes_nothing(coordinator: Coordinator, run_dir: Path, tmp_path: Path) -> None:
    with open_remote(coordinator, tmp_path) as files:
        files.clear()
        Spool(files).write_block(0, 0, None, RoundNumbers())
        coordinator.members.lose(coordinator.members.records["worker-0"])
        for change in (files.clear, lambda: Spool(files).write_block(1, 0, None, RoundNumbers())):
            with pytest.raises(CommunicationError, match="worker-0 was given up"):
                change()
        assert sorted(path.name for path in (run_dir / "rounds").iterdir()) == ["block-0-0", "clients"]


def test_other_files_than_those_of_rounds_are_refused(run_dir: Path) -> None:
    (run_dir / "job.toml").write_text("secret")
    server = RoundFileServer(run_dir, Members(failure_timeout_s=5.0))
    for name in ("../job.toml", "job.toml", "clients/../sent-1", "leaf-1", "sent-1/..", "/etc/passwd"):
        assert isinstance(server.handle(ReadRoundFile(name, 0)), Refused), name
        assert isinstance(server.handle(WriteRoundFile("worker-0", 1, name, 0, b"", is_last=True)), Refused), name
    for folder in ("..", "/", "clients/..", "checkpoints"):
        assert isinstance(server.handle(AskRoundFiles(folder)), Refused), folder


def test_a_folder_that_another_host_shares_is_not_used(coordinator: Coordinator, run_dir: Path) -> None:
    with marked(run_dir, "run"), FederatedLink(coordinator.spec) as link:
        with open_round_files(coordinator.spec, link) as own:
            assert isinstance(own, FolderFiles)
        elsewhere = msgspec.structs.replace(coordinator.spec, run_host="elsewhere", public=coordinator.spec.address)
        with open_round_files(elsewhere, link) as remote:
            assert isinstance(remote, RemoteFiles)
