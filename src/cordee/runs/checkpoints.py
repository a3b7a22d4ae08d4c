"""Checkpoints of a member that has no access to the run directory: the coordinator writes and reads them for it.

A checkpoint is sent in pieces. A coordinator that dies on the way forgets what it has, removes it when it is back, and
is sent everything again. What it has saved is as whole as what a member saves by itself: it is the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cordee import checkpoint
from cordee.checkpoint import Draft, Folder, Loaded, State, Store
from cordee.checkpoint.layout import VALUES, encode_files, part_of
from cordee.cluster.control import has_run_directory
from cordee.cluster.member_link import MemberLink, MemberSpec
from cordee.cluster.members import NOT_JOINED, Members
from cordee.cluster.messages import (
    CHECKPOINTS,
    PIECE_BYTES,
    AskCheckpoints,
    CheckpointEnd,
    CheckpointNames,
    CheckpointPiece,
    CheckpointRequest,
    CheckpointTaken,
    FilePiece,
    ReadPiece,
)
from cordee.communication.messages import Message, Refused
from cordee.communication.wire import Codec
from cordee.core.errors import CheckpointError, StorageError
from cordee.core.fault_points import reach
from cordee.runs.requests import CoordinatorRequests

log = logging.getLogger("cordee.checkpoints")

SYNC_BYTES = 16 << 20  # written between two waits for the disk: the coordinator answers nobody while it waits


@contextlib.contextmanager
def open_store(spec: MemberSpec, link: MemberLink) -> Iterator[Store]:
    """Inside, the checkpoints of the run can be written and read: in its directory, or through the coordinator."""
    run_dir = Path(spec.run_dir)
    if has_run_directory(run_dir, spec.run_id):
        yield Folder(run_dir / "checkpoints")
        return
    log.info("the run directory is out of reach: the coordinator writes and reads checkpoints")
    with contextlib.closing(RemoteCheckpoints(spec, link)) as store:
        yield store


class RemoteCheckpoints:
    """The `checkpoint.Store` of a member without the run directory. Any thread may use it; one saves at a time.

    A coordinator that is killed is asked again when it is back. Raises CommunicationError if it refuses this member,
    which was given up, and when the store is closed.
    """

    def __init__(self, spec: MemberSpec, link: MemberLink) -> None:
        self._link = link
        self._member = spec.name
        self._requests = CoordinatorRequests(spec, "checkpoints", Codec(CHECKPOINTS))
        self._num_saves = 0

    def save(self, step: int, state: State, *, keep: int, protected: Collection[int]) -> Path:
        """Have the coordinator save a checkpoint; return where it is on the run's host. Raises like `checkpoint.save`.

        The state must not change meanwhile.
        """
        incarnation = self._link.incarnation
        while True:
            self._num_saves += 1
            sender = (self._member, incarnation, self._num_saves)
            if (taken := self._send(sender, step, state, keep, protected)) is not None:
                return Path(taken.path)
            log.warning("another coordinator leads the run: sending the checkpoint of step %d again", step)

    def names(self) -> list[str]:
        reply = self._request(AskCheckpoints(), "remote_load.ask")
        assert isinstance(reply, CheckpointNames), reply
        if reply.problem:
            raise CheckpointError(reply.problem)
        return list(reply.names)

    def load_newest(self) -> Loaded | None:
        paths = [Path(name) for name in reversed(self.names())]
        return checkpoint.load_first_whole(paths, "the run directory", self._read)

    def close(self) -> None:
        self._requests.close()

    def _send(
        self, sender: tuple[str, int, int], step: int, state: State, keep: int, protected: Collection[int]
    ) -> CheckpointTaken | None:
        """Return what became of the checkpoint; None if the coordinator has not heard of its first pieces."""
        files: dict[str, tuple[int, str]] = {}
        index = 0
        for name, pieces in encode_files(state).items():
            digest, num_bytes = hashlib.sha256(), 0
            for content in _cut(pieces):
                digest.update(content)
                num_bytes += len(content)
                if self._take(CheckpointPiece(*sender, index, step, name, content), "remote_save.piece") is None:
                    return None
                index += 1
            files[name] = (num_bytes, digest.hexdigest())
        taken = self._take(CheckpointEnd(*sender, index, files, keep, tuple(protected)), "remote_save.end")
        reach("remote_save.heard")
        return taken

    def _take(self, message: CheckpointPiece | CheckpointEnd, point: str) -> CheckpointTaken | None:
        reply = self._request(message, point)
        assert isinstance(reply, CheckpointTaken), reply
        if reply.problem:
            raise StorageError(reply.problem)
        return reply if reply.is_known else None

    def _read(self, path: Path, max_bytes: int) -> bytes:
        """Return the content of a file of a checkpoint. What is read is verified when it is loaded."""
        content = bytearray()
        while True:
            reply = self._request(ReadPiece(path.parent.name, path.name, len(content)), "remote_load.ask")
            assert isinstance(reply, FilePiece), reply
            if reply.problem:
                raise CheckpointError(reply.problem)
            if reply.num_bytes > max_bytes:
                raise CheckpointError(f"{path} has {reply.num_bytes} bytes, at most {max_bytes} were expected")
            content += reply.content
            if len(content) >= reply.num_bytes or not reply.content:
                return bytes(content)

    def _request(self, message: CheckpointRequest, point: str) -> Message:
        return self._requests.ask(message, lambda: reach(point))


@dataclass
class _Incoming:
    """A checkpoint that a member sends."""

    sender: tuple[str, int, int]
    draft: Draft
    num_pieces: int = 0  # that are written
    num_unsynced: int = 0  # bytes
    taken: CheckpointTaken | None = None  # what became of it


class CheckpointReceiver:
    """The coordinator's side: saves in `root` what members send, and reads there what they ask for."""

    def __init__(self, root: Path, members: Members) -> None:
        self._root = root
        self._members = members
        self._incoming: dict[str, _Incoming] = {}  # by the member's name

    def remove_unfinished(self) -> None:
        """Remove what a coordinator that died was writing: members send it again."""
        with contextlib.suppress(OSError):  # the next checkpoint tries again
            checkpoint.remove_stale(self._root)

    def close(self) -> None:
        """Remove what will not be finished any more."""
        for incoming in self._incoming.values():
            incoming.draft.discard()

    def handle(self, request: CheckpointRequest) -> Message:
        """Do what a member asks for; return the answer. A request that comes again has no other effect."""
        match request:
            case AskCheckpoints():
                try:
                    return CheckpointNames(tuple(path.name for path in checkpoint.list_checkpoints(self._root)))
                except CheckpointError as error:
                    return CheckpointNames((), str(error))
            case ReadPiece(name=name, file=file, offset=offset):
                try:
                    return FilePiece(*checkpoint.read_piece(self._root, name, file, offset, PIECE_BYTES))
                except CheckpointError as error:
                    return FilePiece(b"", 0, str(error))
            case _ if not self._members.is_current(request.member, request.incarnation):
                return Refused(NOT_JOINED, f"{request.member} was given up")
            case CheckpointPiece(file=file) if file != VALUES and part_of(file) is None:
                return Refused("malformed", f"{file!r} is no file of a checkpoint")
            case CheckpointPiece():
                return self._write(request)
            case CheckpointEnd():
                return self._finish(request)

    def _write(self, piece: CheckpointPiece) -> CheckpointTaken:
        try:
            incoming = self._begin(piece) if piece.index == 0 else self._find(piece)
            if incoming is None or piece.index > incoming.num_pieces:
                return CheckpointTaken(is_known=False)
            if piece.index == incoming.num_pieces:
                incoming.draft.append(piece.file, piece.content)
                incoming.num_pieces += 1
                incoming.num_unsynced += len(piece.content)
                if incoming.num_unsynced >= SYNC_BYTES:
                    incoming.draft.sync()
                    incoming.num_unsynced = 0
        except StorageError as error:
            self._incoming.pop(piece.member, None)
            return CheckpointTaken(problem=str(error))
        reach("remote_save.written")
        return CheckpointTaken()

    def _finish(self, end: CheckpointEnd) -> CheckpointTaken:
        incoming = self._find(end)
        if incoming is None or incoming.num_pieces != end.index:
            return CheckpointTaken(is_known=False)
        if incoming.taken is None:
            draft = incoming.draft
            try:
                written = {name: (file.num_bytes, file.sha256) for name, file in draft.end_files().items()}
                if written == end.files:
                    path = draft.finish(keep=end.keep, protected=end.protected)
                    incoming.taken = CheckpointTaken(path=str(path))
                else:
                    problem = f"the checkpoint that {end.member} sent has arrived damaged"
                    incoming.taken = CheckpointTaken(problem=problem)
            except (StorageError, CheckpointError) as error:
                incoming.taken = CheckpointTaken(problem=str(error))
            finally:
                draft.discard()
            reach("remote_save.saved")
        return incoming.taken

    def _begin(self, piece: CheckpointPiece) -> _Incoming:
        """Begin a checkpoint, unless its first piece has come again. What is given up is removed."""
        if (known := self._find(piece)) is not None:
            return known
        for member, incoming in list(self._incoming.items()):
            if member == piece.member or not self._members.is_current(*incoming.sender[:2]):
                incoming.draft.discard()
                del self._incoming[member]
        begun = self._incoming[piece.member] = _Incoming(_sender_of(piece), Draft(self._root, piece.step))
        return begun

    def _find(self, message: CheckpointPiece | CheckpointEnd) -> _Incoming | None:
        known = self._incoming.get(message.member)
        return known if known is not None and known.sender == _sender_of(message) else None


def _sender_of(message: CheckpointPiece | CheckpointEnd) -> tuple[str, int, int]:
    return message.member, message.incarnation, message.number


def _cut(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the same bytes in pieces that a message can hold, as few as possible."""
    waiting = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            room = PIECE_BYTES - len(waiting)
            waiting += rest[:room]
            rest = rest[room:]
            if len(waiting) == PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
