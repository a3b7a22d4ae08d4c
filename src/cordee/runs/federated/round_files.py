"""Where the files of a federated run are: in its directory, or, for members that do not have that, at the coordinator.

A file is written under another name and renamed, so that it is complete or not there. One name has the same content
whoever writes it: a request that is made again, also to the next coordinator, has no other effect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from cordee.cluster.control import has_run_directory
from cordee.cluster.member_link import MemberLink, MemberSpec
from cordee.cluster.members import NOT_JOINED, Members
from cordee.cluster.messages import PIECE_BYTES, FilePiece
from cordee.communication.messages import Message, Refused
from cordee.communication.wire import Codec
from cordee.core.errors import StorageError
from cordee.core.temporary import temporary_folder
from cordee.runs.federated.messages import (
    LIMITS,
    ROUND_FILES,
    AskRoundFiles,
    ChangeRoundFiles,
    ReadRoundFile,
    RoundFileNames,
    RoundFileRequest,
    RoundFilesChanged,
    RoundFileTaken,
    WriteRoundFile,
)
from cordee.runs.requests import CoordinatorRequests

log = logging.getLogger("cordee.rounds")

VALUES = "values"  # in the metadata of a file
PICTURE = "partition.png"  # in the run directory itself
_CLIENTS = "clients"
_NAME = re.compile(r"(sent|server)-\d{1,18}|(leaf|block)-\d{1,18}-\d{1,18}|clients/\d{1,18}/\d{1,18}|partition\.png")
_FOLDER = re.compile(r"|clients(/\d{1,18})?")
_MOST_NAMES = 1 << 14  # in one request


class RoundFiles(Protocol):
    """The files of one run. Every method raises StorageError for a disk that refuses."""

    def find(self, name: str) -> Path:
        """Return where a file can be read, until `forget` is called. One that is missing is found out by reading it."""

    def has(self, name: str) -> bool: ...

    def names(self, folder: str = "") -> list[str]:
        """Return the names in the folder of the run, or in one inside of it; none if it is not there."""

    def write(self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None: ...

    def keep_picture(self, draw: Callable[[Path], None]) -> None:
        """Have a picture in the run directory, which `draw` makes at a path, or does not."""

    def remove(self, names: Iterable[str]) -> None: ...

    def clear(self) -> None:
        """Remove everything."""

    def forget(self) -> None:
        """Free what was found to be read."""


@contextlib.contextmanager
def open_round_files(spec: MemberSpec, link: MemberLink) -> Iterator[RoundFiles]:
    """Inside, the files can be read and written.

    A folder that another host shares is not used: in its listings there, what a client kept may be missing for a while.
    """
    run_dir = Path(spec.run_dir)
    if not spec.is_remote and has_run_directory(run_dir, spec.run_id):
        yield FolderFiles(run_dir)
        return
    log.info("the files of the rounds are on the host of the run: the coordinator reads and writes them")
    with temporary_folder() as folder, contextlib.closing(RemoteFiles(spec, link, Path(folder))) as files:
        yield files


class FolderFiles:
    """Files in the run directory, which any process of its host may use."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.folder = run_dir / "rounds"

    def find(self, name: str) -> Path:
        return self._run_dir / name if name == PICTURE else self.folder / name

    def has(self, name: str) -> bool:
        return self.find(name).exists()

    def names(self, folder: str = "") -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in (self.folder / folder).iterdir()]
        return []

    def write(self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        path = self.find(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(_whole(tensors), temporary, metadata=_metadata(values))
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"cannot write {path}: {error}") from error

    def keep_picture(self, draw: Callable[[Path], None]) -> None:
        draw(self.find(PICTURE))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.find(name).unlink(missing_ok=True)

    def clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)
        (self.folder / _CLIENTS).mkdir(parents=True)

    def forget(self) -> None:
        pass


class RemoteFiles:
    """Files that the coordinator has. What is read is copied to a folder of this process until `forget` is called."""

    def __init__(self, spec: MemberSpec, link: MemberLink, folder: Path) -> None:
        self._requests = CoordinatorRequests(spec, "rounds", Codec(ROUND_FILES, LIMITS))
        self._sender = (spec.name, link.incarnation)
        self._folder = folder

    def find(self, name: str) -> Path:
        path = self._folder / name.replace("/", "-")
        if not path.exists():
            with path.open("wb") as file:
                for content in self._read(name):
                    file.write(content)
        return path

    def _read(self, name: str) -> Iterator[bytes]:
        offset = 0
        while True:
            reply = self._requests.ask(ReadRoundFile(name, offset))
            assert isinstance(reply, FilePiece), reply
            if reply.problem:
                raise StorageError(reply.problem)
            yield reply.content
            offset += len(reply.content)
            if offset >= reply.num_bytes or not reply.content:
                return

    def has(self, name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return last in self.names(folder)

    def names(self, folder: str = "") -> list[str]:
        reply = self._requests.ask(AskRoundFiles(folder))
        assert isinstance(reply, RoundFileNames), reply
        if reply.problem:
            raise StorageError(reply.problem)
        return list(reply.names)

    def write(self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._send(name, save(_whole(tensors), metadata=_metadata(values)))

    def keep_picture(self, draw: Callable[[Path], None]) -> None:
        path = self._folder / PICTURE
        draw(path)
        if path.exists():
            self._send(PICTURE, path.read_bytes())

    def remove(self, names: Iterable[str]) -> None:
        left = list(names)
        while left:
            self._change(ChangeRoundFiles(*self._sender, tuple(left[:_MOST_NAMES])))
            left = left[_MOST_NAMES:]

    def clear(self) -> None:
        self._change(ChangeRoundFiles(*self._sender, is_clear=True))

    def forget(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()

    def close(self) -> None:
        self._requests.close()

    def _send(self, name: str, content: bytes) -> None:
        offset = 0
        while True:
            piece = content[offset : offset + PIECE_BYTES]
            is_last = offset + len(piece) == len(content)
            reply = self._requests.ask(WriteRoundFile(*self._sender, name, offset, piece, is_last))
            assert isinstance(reply, RoundFileTaken), reply
            if reply.problem:
                raise StorageError(reply.problem)
            if is_last and reply.is_known:
                return
            offset = offset + len(piece) if reply.is_known else 0

    def _change(self, change: ChangeRoundFiles) -> None:
        reply = self._requests.ask(change)
        assert isinstance(reply, RoundFilesChanged), reply
        if reply.problem:
            raise StorageError(reply.problem)


class RoundFileServer:
    """The coordinator's side: reads and writes the files of the run for members that cannot. It remembers nothing."""

    def __init__(self, run_dir: Path, members: Members) -> None:
        self._files = FolderFiles(run_dir)
        self._members = members

    def handle(self, request: RoundFileRequest) -> Message:
        """Do what a member asks for; return the answer."""
        names: tuple[str, ...] = ()
        match request:
            case AskRoundFiles(folder=folder):
                if _FOLDER.fullmatch(folder):
                    return self._list(folder)
                return Refused("malformed", f"{folder!r} is no folder of a federated run")
            case ReadRoundFile(name=name) | WriteRoundFile(name=name):
                names = (name,)
            case ChangeRoundFiles():
                names = request.names
        for name in names:
            if not _NAME.fullmatch(name):
                return Refused("malformed", f"{name!r} is no file of a federated run")
        if isinstance(request, ReadRoundFile):
            return self._read(request)
        if not self._members.is_current(request.member, request.incarnation):
            return Refused(NOT_JOINED, f"{request.member} was given up")
        return self._write(request) if isinstance(request, WriteRoundFile) else self._change(request)

    def _list(self, folder: str) -> Message:
        try:
            return RoundFileNames(tuple(name for name in self._files.names(folder) if not name.startswith(".")))
        except OSError as error:
            return RoundFileNames((), f"cannot read the folder {folder or 'rounds'} of the run: {error}")

    def _read(self, request: ReadRoundFile) -> FilePiece:
        path = self._files.find(request.name)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return FilePiece(os.pread(file.fileno(), PIECE_BYTES, request.offset), size)
        except OSError as error:
            return FilePiece(b"", 0, f"cannot read {path}: {error}")

    def _write(self, piece: WriteRoundFile) -> RoundFileTaken:
        path = self._files.find(piece.name)
        temporary = self._files.folder / f".of-{piece.member}"  # a member writes one file at a time
        try:
            if piece.offset and not (temporary.exists() and temporary.stat().st_size >= piece.offset):
                return RoundFileTaken(is_known=False)
            with temporary.open("r+b" if piece.offset else "wb") as file:
                file.seek(piece.offset)
                file.write(piece.content)
            if piece.is_last:
                path.parent.mkdir(exist_ok=True)
                temporary.replace(path)
        except OSError as error:
            return RoundFileTaken(problem=f"cannot write {path}: {error}")
        return RoundFileTaken()

    def _change(self, change: ChangeRoundFiles) -> RoundFilesChanged:
        try:
            if change.is_clear:
                self._files.clear()
            self._files.remove(change.names)
        except OSError as error:
            return RoundFilesChanged(f"cannot remove files of {self._files.folder}: {error}")
        return RoundFilesChanged()


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().contiguous() for key, tensor in tensors.items()}


def _metadata(values: Mapping[str, Any]) -> dict[str, str]:
    return {VALUES: json.dumps(dict(values))}
