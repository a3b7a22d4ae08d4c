"""Forming the group of a generation. Whoever waits for a member that is lost gives up as soon as that is known.

Members on several hosts find each other through the coordinator, which passes on what they say: through its channel,
which is encrypted and lets only members in. What is said is small: each member's place, the addresses at which members
then connect, and the secret by which they know each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import (
    COORDINATION,
    Accepted,
    Message,
    StoreAdd,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreRequest,
    StoreSet,
    StoreSwap,
    StoreValue,
)
from cordee.communication.shared_memory import BackendSettings, register
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach

STORE_PREFIX = "store-"
PATIENCE_S = 2.0  # for one answer of the coordinator, which may be busy
LONGEST_ABSENCE_S = 10.0  # of a coordinator that was killed and comes back


class GenerationStore:
    """What the members of one generation have stored, at the coordinator: pure, and not written down."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._added: dict[str, dict[str, int]] = {}  # to each number, by each member

    def handle(self, sender: str, message: StoreRequest) -> Message:
        """Do what a member asks, which it may ask again; return the answer."""
        match message:
            case StoreSet(key=key, value=value):
                self._values[key] = value
                return Accepted()
            case StoreGet(key=key):
                return StoreValue(self._find(key))
            case StoreAdd(key=key, amount=amount):
                self._added.setdefault(key, {})[sender] = amount
                return StoreValue(self._find(key))
            case StoreSwap(key=key, expected=expected, wanted=wanted):
                found = self._find(key)
                if (found or b"") == expected:
                    self._values[key] = found = wanted
                return StoreValue(expected if found is None else found)
            case StoreDelete(key=key):
                found = self._find(key)
                self._values.pop(key, None)
                self._added.pop(key, None)
                return StoreValue(found)
            case StoreCount():
                return StoreValue(str(len(self._values.keys() | self._added.keys())).encode())

    def _find(self, key: str) -> bytes | None:
        if key in self._added:
            return str(sum(self._added[key].values())).encode()
        return self._values.get(key)


class CoordinatorStore:
    """What the members of one generation have said. Raises CommunicationError when the generation is over.

    Has what torch's stores have, so that groups can be formed in it as long as the generation lasts. Any thread may
    call.
    """

    def __init__(self, address: str, run: str, worker_index: int, keys: ClientKeys, generation: int) -> None:
        speaker = Speaker(run=run, name=f"{STORE_PREFIX}{worker_index}", incarnation=time.time_ns())
        self._channel = ClientChannel(address, speaker, Codec(COORDINATION), keys)
        self._generation = generation
        self._using = threading.RLock()
        # To be said again to a coordinator that has come back.
        self._stored: dict[str, bytes] = {}
        self._added: dict[str, int] = {}
        self._found: dict[str, bytes] = {}  # by `check`, for the `get` that follows

    def set(self, key: str, value: str | bytes) -> None:
        with self._using:
            content = self._stored[key] = _as_bytes(value)
            self._request(StoreSet(self._generation, key, content))

    def get(self, key: str) -> bytes:
        """Return what `check` has found."""
        with self._using:
            if key not in self._found and not self.check([key]):
                raise KeyError(key)
            return self._found.pop(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of it was said."""
        with self._using:
            for key in keys:
                value = self._request(StoreGet(self._generation, key))
                if value is None:
                    return False
                self._found[key] = value
            return True

    def add(self, key: str, amount: int) -> int:
        with self._using:
            total = self._added[key] = self._added.get(key, 0) + amount
            return int(self._request(StoreAdd(self._generation, key, total)) or 0)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        with self._using:
            content = _as_bytes(wanted)
            found = self._request(StoreSwap(self._generation, key, _as_bytes(expected), content)) or b""
            if found == content:
                self._stored[key] = content
            return found

    def delete_key(self, key: str) -> bool:
        with self._using:
            for known in (self._stored, self._added, self._found):
                known.pop(key, None)
            return self._request(StoreDelete(self._generation, key)) is not None

    def num_keys(self) -> int:
        with self._using:
            return int(self._request(StoreCount(self._generation)) or 0)

    def _request(self, message: Message) -> bytes | None:
        """Return the value of the answer, if it has one."""
        deadline_s = time.monotonic() + LONGEST_ABSENCE_S
        while True:
            try:
                reply = self._channel.request(message, timeout_s=PATIENCE_S).message
                return reply.value if isinstance(reply, StoreValue) else None
            except RefusedError as error:
                raise CommunicationError(error.detail or str(error)) from error
            except CommunicationError:
                if time.monotonic() > deadline_s:
                    raise
            self._resend()

    def _resend(self) -> None:
        """A coordinator that was killed has forgotten what was said."""
        try:
            for key, value in self._stored.items():
                self._channel.request(StoreSet(self._generation, key, value), timeout_s=PATIENCE_S)
            for key, total in self._added.items():
                self._channel.request(StoreAdd(self._generation, key, total), timeout_s=PATIENCE_S)
        except CommunicationError:
            return  # what is to be said next finds out why

    def __enter__(self) -> CoordinatorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# Collectives end by the loss of a peer long before; this is the limit for one that is only slow.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Members that have said that they are ready, and live: on a busy machine they may need long. One that dies or freezes
# meanwhile is known to the coordinator, which tells the others.
RENDEZVOUS_TIMEOUT_S = 60.0
LEAST_CONNECTING_S = 15.0  # between hosts: a firewall may swallow what is sent, and all wait meanwhile
COULD_NOT_FORM = "could not meet"
FIRST_NAP_S, LONGEST_NAP_S = 0.001, 0.01

_Base: Any = dist.distributed_c10d.Store  # its stubs give `wait` two overloads: one method cannot have both


class RendezvousStore(_Base):  # type: ignore[misc]
    """What members of a generation tell each other, in a file or a store, while they form their group.

    Waiting ends with CommunicationError when `why_over()` has an answer, and after `timeout_s`.
    """

    def __init__(self, file: Any, why_over: Callable[[], str], timeout_s: float) -> None:
        super().__init__()
        self._file = file
        self._why_over = why_over
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._file.get(key)
        return value

    def add(self, key: str, value: int) -> int:
        return int(self._file.add(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._file.check(list(keys)))

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        value: bytes = self._file.compare_set(key, expected, wanted)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        return int(self._file.num_keys())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wanted = list(keys)
        limit_s = self._timeout_s if timeout is None else min(self._timeout_s, timeout.total_seconds())
        deadline_s, nap_s = time.monotonic() + limit_s, FIRST_NAP_S
        while not self._file.check(wanted):
            if why := self._why_over():
                raise CommunicationError(why)
            if time.monotonic() > deadline_s:
                raise CommunicationError(f"nobody said {', '.join(wanted)} within {limit_s:g} s")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)


class BetweenHosts(NamedTuple):
    """What members need to meet if they are on several hosts."""

    store: CoordinatorStore
    address: str  # of this host
    encrypt: bool


@contextlib.contextmanager
def meet(
    path: Path,
    rank: int,
    num_members: int,
    *,
    failure_timeout_s: float,
    why_over: Callable[[], str],
    between: BetweenHosts | None = None,
) -> Iterator[None]:
    """Inside, this process is a member of a group that finds itself in the file at `path`, or `between` hosts.

    Collective. Raises CommunicationError if the group cannot be formed: `why_over()` says why, or a member died, or
    none came.
    """
    register()
    # Kept here: torch holds on to what is below Python only, and groups that are formed later meet there as well.
    file = between.store if between else dist.FileStore(str(path), num_members)  # type: ignore[attr-defined]
    store = RendezvousStore(file, why_over, RENDEZVOUS_TIMEOUT_S)
    settings = BackendSettings(failure_timeout_s=failure_timeout_s)
    if between:
        connecting_s = max(LEAST_CONNECTING_S, 2 * failure_timeout_s)
        settings = replace(
            settings, address=between.address or None, encrypt=between.encrypt, connect_timeout_s=connecting_s
        )
    try:
        reach("rendezvous.begin")
        dist.init_process_group(
            "cordee",
            store=store,
            rank=rank,
            world_size=num_members,
            timeout=COLLECTIVE_TIMEOUT,
            pg_options=settings,
        )
        if why := why_over():  # heard when nothing was there yet that could have been told to stop waiting
            raise CommunicationError(why)
        reach("rendezvous.formed")
    except (CommunicationError, RuntimeError) as error:
        if dist.is_initialized():  # the others may be in it already: they wait for as long as this one seems to live
            dist.destroy_process_group()
        # torch names groups by counting them, and counts one that failed: a new process would wait under another name.
        dist.distributed_c10d._world.group_count = 0
        raise CommunicationError(f"{path.name} {COULD_NOT_FORM}: {why_over() or error}") from error
    try:
        yield
    finally:
        reach("rendezvous.end")
        dist.destroy_process_group()
