"""Speaking to a run that is under way: its coordinator leaves an address and a key in the run directory.

The file is also the ticket with which workers of other hosts join, if the run listens for them (`cluster.address`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import MEMBERSHIP, Accepted, JoinRequest, Scale
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError, JobError, RunDirectoryError
from cordee.version import __version__

CONTROL_FILE = "control.json"
CONTROL_NAME = "control"
TOKEN_FILE = ".run"
REPLY_TIMEOUT_S = 10.0
NOT_YET = "not-yet"  # why a request is refused that may be asked again in a moment


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is spoken to, and the key for it. Whoever can read the file can scale the run and join it."""

    address: str  # for processes of the run's own host
    run: str
    keys: str
    host: str = ""  # name of the run's host
    host_id: str = ""
    public: str = ""  # for those of other hosts; empty if the run does not listen for them
    version: str = ""  # of cordee

    @classmethod
    def of(cls, address: str, run: str, keys: str, public: str = "") -> Control:
        """Return that of a run on this host."""
        return cls(
            address=address,
            run=run,
            keys=keys,
            host=socket.gethostname(),
            host_id=host_id(),
            public=public,
            version=__version__,
        )

    @property
    def is_remote(self) -> bool:
        """Whether this process is on another host than the run."""
        return self.host_id != host_id()


class NotYetError(JobError):
    """The run cannot do that yet; it may be asked again in a moment."""


def write_control(folder: Path, control: Control) -> str:
    """Leave the file in a run directory, readable by its owner alone.

    Returns what could not be done, if the disk refuses; training does not need the file.
    """
    path = folder / CONTROL_FILE
    content = msgspec.json.encode(control)
    try:
        if path.exists() and path.read_bytes() == content:  # a coordinator that came back listens at the same address
            return ""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        remove_control(folder)
        return f"cannot write {path}: {error.strerror}; the run cannot be scaled or joined, training continues"
    return ""


def remove_control(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / CONTROL_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def marked(folder: Path, run: str) -> Iterator[None]:
    """Inside, processes can find out by `has_run_directory` that a folder is the directory of the run.

    Where the disk refuses the mark, no process finds it, and the coordinator writes their checkpoints.
    """
    with contextlib.suppress(OSError), (folder / TOKEN_FILE).open("w") as file:
        file.write(_token_of(run, file.fileno()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / TOKEN_FILE).unlink(missing_ok=True)


def has_run_directory(folder: Path, run: str) -> bool:
    """Return whether this process can write to the directory of the run, which is `folder` on the run's host."""
    try:
        with (folder / TOKEN_FILE).open() as file:
            return file.read() == _token_of(run, file.fileno()) and os.access(folder, os.W_OK)
    except (OSError, ValueError):
        return False


def _token_of(run: str, file: int) -> str:
    """Return what the token file says: also its own inode, which a copy on another host does not have."""
    return f"{run} {os.fstat(file).st_ino}"


def scale_run(folder: Path, num_workers: int, threads: int = 0) -> str:
    """Ask the run in `folder` for another number of workers; return what it says. Does not wait for them to join.

    `threads` is how many each worker computes with; 0 leaves that as it is.

    Raises JobError when the run refuses, and RunDirectoryError when none is under way there.
    """
    if num_workers < 1:
        raise JobError(f"N = {num_workers} must be at least 1; Ctrl-C in the run's terminal ends it, saved")
    if not 0 <= threads <= 4096:
        raise JobError(f"--threads {threads} must be from 1 to 4096")
    return _ask(read_control(folder), folder, Scale(num_workers, threads))


def request_join(control: Control, place: Path, torch_version: str) -> str:
    """Ask a run to take this process as a worker; return what a worker is told, as JSON. `place` is for messages.

    Raises JobError when the run refuses, NotYetError when it is too early, and RunDirectoryError when nobody answers.
    """
    request = JoinRequest(os.getpid(), socket.gethostname(), host_id(), __version__, torch_version)
    return _ask(control, place, request)


def _ask(control: Control, place: Path, request: Scale | JoinRequest) -> str:
    speaker = Speaker(run=control.run, name=CONTROL_NAME, incarnation=time.time_ns())
    try:
        keys = ClientKeys.from_text(control.keys)
        with ClientChannel(reach(control, place), speaker, Codec(MEMBERSHIP), keys) as channel:
            reply = channel.request(request, timeout_s=REPLY_TIMEOUT_S).message
    except RefusedError as error:
        kind = NotYetError if error.reason == NOT_YET else JobError
        raise kind(error.detail or str(error)) from error
    except CommunicationError as error:
        if control.is_remote:
            raise RunDirectoryError(
                f"the run of the ticket {place} does not answer: it has ended, or its host ({control.host}) cannot be "
                f"reached from here: {error}"
            ) from error
        raise RunDirectoryError(f"the launcher of the run {place} does not answer: {error}") from error
    assert isinstance(reply, Accepted), reply
    return reply.detail


def check_remote(request: JoinRequest, public: str) -> None:
    """Raise JobError if a worker of another host cannot take part in a run of this host and version of torch."""
    import torch  # here, since those who ask need not have it

    if not public:
        raise JobError(f"the run on {socket.gethostname()} takes no workers of other hosts: set cluster.address")
    if request.cordee != __version__ or request.torch != str(torch.__version__):
        raise JobError(
            f"the run uses cordee {__version__} and torch {torch.__version__}, this process cordee {request.cordee} "
            f"and torch {request.torch}: install the same versions"
        )


def reach(control: Control, place: Path) -> str:
    """Return the address at which this process reaches the run. Raises JobError if there is none."""
    if not control.is_remote:
        return control.address
    if not control.public:
        raise JobError(
            f"the run {place} is on another host ({control.host}) and listens there alone: start it with "
            "cluster.address, the address at which that host can be reached"
        )
    return control.public


def read_control(place: Path) -> Control:
    """Return what a run directory, or a ticket, says. Raises RunDirectoryError where nobody listens, and JobError."""
    is_ticket = place.is_file()
    if not is_ticket and not place.is_dir():
        raise RunDirectoryError(f"there is no run directory and no ticket {str(place)!r}")
    if not is_ticket and not (place / "job.toml").exists():
        raise RunDirectoryError(f"{place} is not a run directory: it has no job.toml")
    path = place if is_ticket else place / CONTROL_FILE
    try:
        if is_ticket and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise JobError(f"the ticket {path} can be read by others, who could join the run: chmod 600 {path}")
        control = msgspec.json.decode(path.read_bytes(), type=Control)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"nobody listens in the run {place}: it has ended, or it trains in one process"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        what = f"{path} is no ticket, or a damaged one" if is_ticket else f"cannot read {path}"
        raise RunDirectoryError(f"{what}: {error}") from error
    if control.version != __version__:
        raise JobError(
            f"the run {place} is one of cordee {control.version or 'of an earlier version'}, this is cordee "
            f"{__version__}: install the same version"
        )
    return control
