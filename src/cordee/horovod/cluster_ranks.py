"""Processes of Ray or Spark as ranks: who is which, where they meet, and what is undone afterwards.

Ray and Spark have started the processes and bring functions to them. What is left to do is what a launcher does.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from cordee.communication.exchange import find_lost_peer
from cordee.communication.shared_memory import BackendSettings
from cordee.communication.this_host import own_host_id
from cordee.core import env
from cordee.core.errors import TrainingError
from cordee.horovod import world

LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.2
REPORT_S = 5.0
_FAILED = "cordee-horovod-failed"


def host_of(number: int) -> str:
    """Return an id of this host, for process `number`: equal for processes that can share memory."""
    return own_host_id(BackendSettings(), number)


def number_ranks(hosts: Sequence[str]) -> list[env.Place]:
    """Return the place of each process, given its host: ranks go host by host, in the order of the first of each."""
    by_host: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        by_host.setdefault(host, []).append(process)
    places: dict[int, env.Place] = {}
    for processes in by_host.values():
        for local_rank, process in enumerate(processes):
            places[process] = env.Place(len(places), len(hosts), local_rank, len(processes))
    return [places[process] for process in range(len(hosts))]


class Meeting:
    """A store, kept by rank 0, through which ranks find each other. It ends when one of them reports a failure.

    A rank that fails before `hvd.init()` would else be waited for by the others, for half an hour.
    """

    def __init__(self, address: str) -> None:
        """Listen at one address of this host. Left to itself the store would listen at all of them."""
        with socket.create_server((address, 0), backlog=128) as listener:
            self.address, self.port = address, int(listener.getsockname()[1])
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._await_failure, name="cordee-horovod-meeting", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """End the store: whoever waits for something in it gets an error."""
        self._is_over.set()
        self._watch.join()

    def _await_failure(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S) and not self._store.check([_FAILED]):
            pass
        self._store = None


def report_failure(address: str, port: int) -> None:
    """End the store of a meeting, from any rank: nobody waits any longer for this one."""
    with contextlib.suppress(dist.DistError):  # it has ended already
        timeout = datetime.timedelta(seconds=REPORT_S)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        store.set(_FAILED, "")


@contextlib.contextmanager
def taking_part(place: env.Place, address: str, port: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process is a rank, for `hvd.init()` to find. Afterwards it is what it was: Spark uses it again."""
    with env.adopted({**variables, **env.script_environment(place, port, address)}):
        had_group = dist.is_initialized()
        try:
            yield
        finally:
            leave(had_group)


def leave(keeps_group: bool = False) -> None:
    """End what `hvd.init()` has begun: ranks that wait for this one get an error that names it."""
    world.shutdown()
    if dist.is_initialized() and not keeps_group:
        dist.destroy_process_group()


class Outcome(NamedTuple):
    """How a function ended on one rank."""

    rank: int
    value: Any = None
    error: str = ""  # the traceback
    summary: str = ""  # the error in one line
    is_consequence: bool = False  # of what happened to another rank

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Outcome:
        text = "".join(traceback.format_exception(error))
        summary = traceback.format_exception_only(error)[-1].strip()
        return cls(rank, None, text, summary, find_lost_peer(error) is not None or isinstance(error, dist.DistError))


def results_of(outcomes: Sequence[Outcome], where: str) -> list[Any]:
    """Return what the ranks returned, in their order. Raises TrainingError that names the rank that failed first."""
    if failed := [outcome for outcome in outcomes if outcome.error]:
        cause = next((outcome for outcome in failed if not outcome.is_consequence), failed[0])
        raise TrainingError(f"{where}: rank {cause.rank} failed: {cause.summary}\n{cause.error}".rstrip())
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
