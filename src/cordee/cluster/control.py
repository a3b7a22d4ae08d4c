"""Speaking to a run that is under way: its launcher leaves an address and a key in the run directory."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import COORDINATION, Accepted, Enlist, Scale
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError, JobError, RunDirectoryError

CONTROL_FILE = "control.json"
CONTROL_NAME = "control"
REPLY_TIMEOUT_S = 10.0


class Control(msgspec.Struct, frozen=True):
    """Where a run is spoken to, and the key for it. Whoever can read the file can scale the run."""

    address: str
    run: str
    keys: str


def write_control(folder: Path, control: Control) -> None:
    """Leave the file in a run directory, readable by its owner alone."""
    path = folder / CONTROL_FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(control))


def remove_control(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / CONTROL_FILE).unlink(missing_ok=True)


def scale_run(folder: Path, num_workers: int, threads: int = 0) -> str:
    """Ask the run in `folder` for another number of workers; return what it says. Does not wait for them to join.

    `threads` is how many each worker computes with; 0 leaves that as it is.

    Raises JobError when the run refuses, and RunDirectoryError when none is under way there.
    """
    if num_workers < 1:
        raise JobError(f"N = {num_workers} must be at least 1; Ctrl-C in the run's terminal ends it, saved")
    if not 0 <= threads <= 4096:
        raise JobError(f"--threads {threads} must be from 1 to 4096")
    return _ask(folder, Scale(num_workers, threads))


def _ask(folder: Path, wish: Scale | Enlist) -> str:
    control = _read_control(folder)
    speaker = Speaker(run=control.run, name=CONTROL_NAME, incarnation=time.time_ns())
    keys = ClientKeys.from_text(control.keys)
    try:
        with ClientChannel(control.address, speaker, Codec(COORDINATION), keys) as channel:
            reply = channel.request(wish, timeout_s=REPLY_TIMEOUT_S).message
    except RefusedError as error:
        raise JobError(error.detail or str(error)) from error
    except CommunicationError as error:
        raise RunDirectoryError(f"the launcher of the run {folder} does not answer: {error}") from error
    assert isinstance(reply, Accepted), reply
    return reply.detail


def check_control(folder: Path) -> None:
    """Raise RunDirectoryError where nobody listens."""
    _read_control(folder)


def enlist(folder: Path) -> dict[str, Any]:
    """Ask the run in `folder` to take this process as a worker; return what a worker is told.

    Raises JobError when the run refuses, and RunDirectoryError when none is under way there.
    """
    reply = _ask(folder, Enlist(os.getpid(), socket.gethostname()))
    order: dict[str, Any] = msgspec.json.decode(reply)
    return order


def _read_control(folder: Path) -> Control:
    if not (folder / "job.toml").exists():
        raise RunDirectoryError(f"{folder} is not a run directory: it has no job.toml")
    try:
        return msgspec.json.decode((folder / CONTROL_FILE).read_bytes(), type=Control)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"nobody listens in the run {folder}: it has ended, or it trains in one process"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirectoryError(f"cannot read {folder / CONTROL_FILE}: {error}") from error
