"""A process's side of a run, whatever its kind: its connection to the coordinator, and that it ends with the run."""

from __future__ import annotations

import abc
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cordee.cluster.members import member_name
from cordee.cluster.processes import is_alive
from cordee.communication.channel import ClientChannel
from cordee.communication.messages import Failure
from cordee.core.errors import CommunicationError

log = logging.getLogger("cordee.link")

LONGEST_ABSENCE_S = 30.0  # of the coordinator, before a process that cannot look at the launcher ends


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told when it is started, or joins. Travels through a private socket, or the secure channel."""

    kind: str  # of the run
    role: str  # "worker", "server", "evaluator"
    index: int  # among those of its role; the place of a worker in a team may be another
    replica: int = 0  # of a server: 0 is the first to serve, the others can take its place
    run_dir: str
    run_id: str
    address: str  # of the coordinator
    client_keys: str
    server_keys: str = ""
    store: str = ""  # folder where the groups of a team find themselves
    failure_timeout_s: float
    startup_timeout_s: float
    resume: bool = False
    has_state: bool = True  # a server: what it starts with, or reads, is what the run has; else it is given everything
    launcher_pid: int = 0  # for one that the launcher did not start: it ends when this one does
    host_address: str = ""  # of this host, for what goes between hosts; empty where nobody can join from another
    job: str = ""  # as TOML, for one on another host: it has a run directory of its own
    data: str = ""  # what is known of the run's data, for one on another host
    num_local: int = 1  # processes that compute on this host to begin with: they share its cores

    @property
    def is_remote(self) -> bool:
        return bool(self.job)

    @property
    def name(self) -> str:
        return member_name(self.role, self.index, self.replica)

    @property
    def log_file(self) -> Path:
        """Where a worker's log is."""
        return Path(self.run_dir) / "logs" / f"{self.name}.log"


class MemberLink(abc.ABC):
    """One connection. A thread shows that this process lives, from `_show_life` to `close`.

    A process that the launcher did not start looks at it, and ends when it does. One on another host cannot: it ends
    when the coordinator is out of reach for long.
    """

    def __init__(self, channel: ClientChannel, *, launcher_pid: int = 0, is_remote: bool = False) -> None:
        """`launcher_pid` is 0 for one that the launcher has started: it dies with it."""
        self._channel = channel
        self._launcher_pid, self._is_remote = launcher_pid, is_remote
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.step = 0  # told with each heartbeat

    def _show_life(self, heartbeat_s: float) -> None:
        self._thread = threading.Thread(
            target=self._keep_alive, args=(heartbeat_s,), name="cordee-heartbeat", daemon=True
        )
        self._thread.start()

    @abc.abstractmethod
    def _keep_alive(self, heartbeat_s: float) -> None:
        """Send a heartbeat every `heartbeat_s`, until `_is_closing` is set."""

    @property
    def _is_launcher_gone(self) -> bool:
        return self._launcher_pid > 0 and not is_alive(self._launcher_pid)

    def _end_with_the_run(self, heard_s: float) -> None:
        """End this process if the run is over: the main thread may wait for others, or for an answer, for ever."""
        if self._is_launcher_gone:
            log.error("the run is over: its launcher (process %d) is gone", self._launcher_pid)
            os._exit(1)
        if self._is_remote and time.monotonic() - heard_s > LONGEST_ABSENCE_S:
            message = f"the run has ended or is out of reach: nothing was heard of it for {LONGEST_ABSENCE_S:g} s"
            log.error("%s", message)
            sys.stderr.write(f"cordee: {message}\n")
            os._exit(1)

    def close(self) -> None:
        self._is_closing.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe_failure(error: BaseException, step: int) -> Failure:
    """Return what is told of an error; the loss of a peer is a consequence, anything else a cause."""
    text = "".join(traceback.format_exception(error))[-60_000:]
    line = f"raised {type(error).__name__}: {error}"[:4000]
    return Failure(step, line, text, isinstance(error, CommunicationError))
