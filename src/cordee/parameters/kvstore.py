"""`cordee.KVStore`: init, push, pull and push_pull of arrays that live on server processes."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec

from cordee.communication.compression import SPARSE, Compression
from cordee.communication.messages import Json
from cordee.core import env
from cordee.core.durations import parse_duration
from cordee.core.errors import JobError, StoreError, nearest
from cordee.core.importing import stop_import
from cordee.parameters import transfer
from cordee.parameters.arrays import NUMPY, TORCH, Origin, Taken, Target, make_target, take
from cordee.parameters.local import LocalServers
from cordee.parameters.membership import Membership
from cordee.parameters.messages import Create, Done, EnterBarrier, Locate, Located, Place, Placed, Ready, SetUpdater
from cordee.parameters.pending import CallQueue, Handle, JointHandle
from cordee.parameters.placement import part_shape
from cordee.parameters.serving import serve_role
from cordee.parameters.transfer import Entry, Pulled

Key: TypeAlias = str | int
Keys: TypeAlias = list[Key] | tuple[Key, ...]
_Result = TypeVar("_Result")
_BARRIER_S = 600.0
_TOPK = 0.01  # share of the values that compression "topk" sends


class KVStore:
    """A client of a store. Any thread may use it; a forked child opens its own.

    Pushes count exactly once, in the order they were made by this client for each key, also when a connection is lost
    in between. Arrays above 1 MB are cut over the servers. Whatever takes a key also takes a list of keys, with a list
    of values. Raises `StoreError` for what a server refuses, `CommunicationError` for a server that is gone.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        key_file: str | Path | None = None,
        failure_timeout: str | float = "30s",
        shared_memory: bool = True,
        compression: Compression = "none",
    ) -> None:
        """Join the store at an address, else at that of the environment: `CORDEE_STORE`, or ps-lite's `DMLC_*`.

        Waits for the workers and servers that are expected, at most for `failure_timeout`. In a process whose
        `DMLC_ROLE` is scheduler or server, this serves until all workers have left and then ends the process.
        `compression` is that of `set_compression`, for all keys.
        """
        stop_import("cordee.KVStore")
        timeout_s = _seconds(failure_timeout)
        role = env.store_role() if address is None and not env.store_address() else None
        if role is not None and role.role != "worker":
            sys.exit(serve_role(role, timeout_s))
        address = address or env.store_address() or (role.address if role is not None else "")
        if not address:
            raise StoreError(
                "which store? Start one with `cordee server` and this program with `cordee worker`, give the address, "
                "set CORDEE_STORE or ps-lite's DMLC_ROLE and so on, or use cordee.KVStore.local()"
            )
        file = Path(key_file).expanduser() if key_file is not None else env.store_key_file()
        text = env.store_key_text() if key_file is None else ""
        _check_compression(compression, _TOPK)
        self._open(Membership(address, text, file, timeout_s, shared_memory=shared_memory), None, compression)

    @classmethod
    def local(
        cls,
        num_servers: int = 1,
        *,
        replicas: int = 1,
        updaters: Sequence[str] = (),
        failure_timeout: str | float = "30s",
        shared_memory: bool = True,
        compression: Compression = "none",
    ) -> KVStore:
        """Start servers on this host, which end with this process or `close`, and return a client of them.

        With `replicas` = 2 each server is two processes: what it has acknowledged is not lost when one of them is
        killed. Other processes join with the variables in `environment`.
        """
        stop_import("cordee.KVStore.local")
        timeout_s = _seconds(failure_timeout)
        _check_compression(compression, _TOPK)
        servers = LocalServers(num_servers, list(updaters), timeout_s, replicas)
        store = cls.__new__(cls)
        try:
            membership = Membership(
                servers.address, servers.key.to_text(), None, timeout_s, shared_memory=shared_memory
            )
            store._open(membership, servers, compression)
        except BaseException:
            servers.close()
            raise
        return store

    def _open(self, membership: Membership, servers: LocalServers | None, compression: Compression) -> None:
        self._membership, self._servers = membership, servers
        # By key; None: of those without their own. Empty while nothing is compressed.
        self._compression: dict[str | None, tuple[Compression, float]] = {}
        if compression != "none":
            self._compression[None] = compression, _TOPK
        self._calls = membership.calls
        self._entries: dict[Key, Entry] = {}
        self._origins: dict[str, Origin] = {}
        self._sequence = itertools.count(1)
        self._barriers = itertools.count(1)
        self._queue = CallQueue()
        self._is_closed = self._is_inherited = False
        # A worker that ends without `close` has left in order all the same.
        reference = weakref.ref(self)

        def leave() -> None:
            if (store := reference()) is not None:
                store.close()

        def disown() -> None:
            if (store := reference()) is not None:
                store._is_inherited = True

        os.register_at_fork(after_in_child=disown)  # asking for the process at each call would take microseconds
        self._at_exit = leave
        atexit.register(leave)

    @property
    def rank(self) -> int:
        """Which of the workers this is, from 0."""
        return self._membership.index

    @property
    def num_workers(self) -> int:
        """How many workers the store was started for; 0 if for as many as come."""
        return self._membership.num_workers

    @property
    def num_servers(self) -> int:
        return self._membership.num_servers

    @property
    def address(self) -> str:
        return self._membership.address

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which another process joins this store; they hold its key."""
        return env.store_environment(self.address, self._membership.key.to_text())

    def init(self, key: Key | Keys, value: Any) -> None:
        """Give a key its first value, once.

        All workers may do so. With a known number of workers the value of worker 0 counts, else the first that comes;
        the others wait for it.
        """
        self._check_open()
        if not isinstance(key, (list, tuple)):
            self._init(key, _name(key), take(value))
            return
        values = _list_for(key, value)
        prepared = [(one, _name(one), take(its)) for one, its in zip(key, values, strict=True)]
        if twice := [name for name, count in Counter(name for _, name, _ in prepared).items() if count > 1]:
            raise StoreError(f"key '{twice[0]}' comes twice in the list: init each key once")
        for one in prepared:  # all of them are good as far as can be told here
            self._init(*one)

    def _init(self, key: Key, name: str, taken: Taken) -> None:
        asked = Place(name, taken.kind, taken.shape, next(self._sequence))  # type: ignore[arg-type]
        placed: Placed = self._calls.ask(asked)
        entry = Entry(name, placed.number, taken.kind, taken.shape, placed.cuts, self._calls.piece_bytes(placed.cuts))
        if placed.is_yours:
            num_parts = len(entry.cuts)
            for cut in entry.cuts:
                shape = part_shape(entry.shape, cut, num_parts)
                self._calls.call(cut.server, Create(entry.number, name, entry.kind, shape, num_parts > 1))  # type: ignore[arg-type]
            transfer.fill(self._calls, entry, taken.view)
            self._calls.ask(Ready(name))
        self._entries[key] = self._entries[name] = entry
        self._origins[name] = taken.origin

    def push(self, key: Key | Keys, value: Any) -> Any:
        """Hand a value to the key's updater; return the version that has it. It is applied when this returns."""
        if isinstance(key, (list, tuple)):
            return self._each(self.push, key, value)
        return self._push(self._idle_entry(key), value)

    def pull(
        self,
        key: Key | Keys,
        out: Any = None,
        min_version: int | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the value of a key with its version, as `Pulled`; in `out` if that is given.

        `min_version` waits until that many pushes are in it, at most `timeout_s` (else the failure timeout).
        """
        if isinstance(key, (list, tuple)):
            return self._each(lambda one, its: self.pull(one, its, min_version, timeout_s=timeout_s), key, out)
        return self._pull(self._idle_entry(key), out, min_version, timeout_s)

    def push_pull(self, key: Key | Keys, value: Any, out: Any = None) -> Any:
        """Push and return the value that has the push, as `Pulled`; one way instead of two."""
        if isinstance(key, (list, tuple)):
            return self._each(lambda one, its: self.push_pull(one, *its), key, _pairs(key, value, out))
        return self._push_pull(self._idle_entry(key), value, out)

    def push_async(self, key: Key | Keys, value: Any, *, priority: float = 0) -> Handle:
        """Begin a push; the value must not change before it has ended. Higher priorities go first."""
        return self._begin(key, value, priority, self._push)

    def pull_async(
        self,
        key: Key | Keys,
        out: Any = None,
        min_version: int | None = None,
        *,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> Handle:
        """Begin a pull."""
        return self._begin(
            key, out, priority, lambda entry, its: self._pull(entry, its, min_version, timeout_s), is_optional=True
        )

    def push_pull_async(self, key: Key | Keys, value: Any, out: Any = None, *, priority: float = 0) -> Handle:
        """Begin a push_pull; the value must not change before it has ended."""
        pairs: Any = _pairs(key, value, out) if isinstance(key, (list, tuple)) else (value, out)
        return self._begin(key, pairs, priority, lambda entry, its: self._push_pull(entry, *its))

    def push_rows(self, key: Key, rows: Any, values: Any) -> int:
        """Push some rows of an array, by their numbers; a row that comes twice counts twice. Return the version."""
        entry = self._idle_entry(key)
        with entry.lock:
            return transfer.push_rows(self._calls, entry, rows, take(values), next(self._sequence))

    def pull_rows(self, key: Key, rows: Any) -> Pulled:
        """Return some rows of an array, by their numbers, with its version."""
        entry = self._idle_entry(key)
        return transfer.pull_rows(self._calls, entry, rows, self._origins.get(entry.key) or _default(entry.kind))

    def set_updater(self, name: str, *, keys: Key | Keys | None = None, **settings: Json) -> None:
        """Choose what servers make of pushes: "add" (at first), "assign", any optimizer of torch by name with its
        settings, or "module:function" of a module that the servers were started with.

        For these keys, or for all that have no choice of their own. The same choice made again, by other workers say,
        changes nothing.
        """
        self._check_open()
        _check_updater(name, settings)
        self._queue.wait_idle()
        if keys is None:
            for server in range(self.num_servers):
                self._calls.call(server, SetUpdater(name, settings))
            return
        at: dict[int, list[int]] = {}
        for key in keys if isinstance(keys, (list, tuple)) else [keys]:
            entry = self._entry(key)
            for cut in entry.cuts:
                at.setdefault(cut.server, []).append(entry.number)
        for server, numbers in at.items():
            self._calls.call(server, SetUpdater(name, settings, tuple(numbers)))

    def set_compression(self, compression: Compression, *, topk: float = _TOPK, keys: Key | Keys | None = None) -> None:
        """Choose how this client's pushes travel: "none", "fp16", "int8", or "topk", the share `topk` of the values.

        For these keys, or for all that have no choice of their own. What a push leaves out is added to the next one of
        the key. Pulls and rows travel as they are.
        """
        self._check_open()
        _check_compression(compression, topk)
        self._queue.wait_idle()
        chosen = keys if isinstance(keys, (list, tuple)) else [keys]
        self._compression |= {None if key is None else _name(key): (compression, topk) for key in chosen}

    def wait(self, handle: Handle, timeout_s: float | None = None) -> Any:
        """Wait for an operation, and return what it does."""
        return handle.wait(timeout_s)

    def wait_all(self) -> None:
        """Wait until nothing is under way; errors are raised by the handles."""
        self._queue.wait_idle()

    def barrier(self, timeout_s: float = _BARRIER_S) -> None:
        """Wait until all workers have come here; of a store without a number of workers, all that have joined.

        Raises StoreError that names who is missing after `timeout_s`, or as soon as one of them is lost.
        """
        self._check_open()
        self._queue.wait_idle()
        reply = self._calls.ask(EnterBarrier(next(self._barriers), _waiting(timeout_s)))
        assert isinstance(reply, Done)

    def close(self) -> None:
        """Leave the store; end its servers if they are this object's own. What is under way is finished first."""
        if self._is_closed or self._is_inherited:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._queue.close()
        self._membership.leave()
        if self._servers is not None:
            self._servers.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, entry: Entry, value: Any) -> int:
        taken = take(value)
        _check_fits(entry, taken.kind, taken.shape)
        self._origins[entry.key] = taken.origin
        return self._send(entry, taken, None)

    def _pull(self, entry: Entry, out: Any, min_version: int | None, timeout_s: float | None) -> Pulled:
        target = self._target(entry, out)
        limit_s = self._membership.failure_timeout_s if timeout_s is None else _waiting(timeout_s)
        if min_version is not None and not (isinstance(min_version, int) and 0 <= min_version < 2**63):
            raise StoreError(f"min_version = {min_version!r} must be a whole number from 0 to 2**63 - 1")
        version = transfer.pull(self._calls, entry, target.view, min_version or 0, limit_s)
        return Pulled(target.finish(), version)

    def _push_pull(self, entry: Entry, value: Any, out: Any) -> Pulled:
        taken = take(value)
        _check_fits(entry, taken.kind, taken.shape)
        self._origins[entry.key] = taken.origin
        target = make_target(entry.kind, entry.shape, taken.origin, out)
        return Pulled(target.finish(), self._send(entry, taken, target.view))

    def _send(self, entry: Entry, taken: Taken, target: memoryview | None) -> int:
        with entry.lock:
            if self._compression:
                default = self._compression.get(None, ("none", _TOPK))
                entry.compress(*self._compression.get(entry.key, default))
            return transfer.push(self._calls, entry, taken.view, next(self._sequence), target)

    def _target(self, entry: Entry, out: Any) -> Target:
        return make_target(entry.kind, entry.shape, self._origins.get(entry.key) or _default(entry.kind), out)

    def _idle_entry(self, key: Key) -> Entry:
        """Return what is known of a key, after the asynchronous operations on it."""
        self._check_open()
        entry = self._entry(key)
        if self._queue.num_open:
            self._queue.wait_idle(entry.key)
        return entry

    def _entry(self, key: Key) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            name = _name(key)
            located: Located = self._calls.ask(Locate(name))
            piece_bytes = self._calls.piece_bytes(located.cuts)
            entry = Entry(name, located.number, located.dtype, located.shape, located.cuts, piece_bytes)
            self._entries[key] = self._entries[name] = entry
        return entry

    def _begin(
        self,
        key: Key | Keys,
        value: Any,
        priority: float,
        operation: Callable[[Entry, Any], Any],
        *,
        is_optional: bool = False,
    ) -> Handle:
        self._check_open()
        if not isinstance(key, (list, tuple)):
            entry = self._entry(key)
            return self._queue.submit(entry.key, priority, lambda: operation(entry, value))
        keys = key
        values = [None] * len(keys) if is_optional and value is None else _list_for(keys, value)
        return JointHandle(
            [str(one) for one in keys],
            [self._begin(one, its, priority, operation) for one, its in zip(keys, values, strict=True)],
        )

    def _each(self, operation: Callable[[Any, Any], _Result], keys: Any, values: Any) -> list[_Result]:
        values = [None] * len(keys) if values is None else _list_for(keys, values)
        return [operation(one, its) for one, its in zip(keys, values, strict=True)]

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("the store is closed")
        if self._is_inherited:
            raise StoreError("this store was opened before a fork: open one in the child")


def _name(key: Key) -> str:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise StoreError(f"a key is a name or a number, not {key!r}")
    name = str(key)
    if not 0 < len(name) <= 128:
        raise StoreError(f"a key has 1 to 128 characters, not {len(name)}")
    return name


def _list_for(keys: Sequence[Any], values: Any) -> list[Any]:
    """Return the values that come with a list of keys, one for each."""
    try:
        listed = list(values)
    except TypeError:
        raise StoreError(f"a list of keys needs a list of values, not a {type(values).__name__}") from None
    if len(keys) != len(listed):
        raise StoreError(f"{len(keys)} keys and {len(listed)} values: there must be one for each")
    return listed


def _pairs(keys: Sequence[Any], values: Any, outs: Any) -> list[tuple[Any, Any]]:
    outs = [None] * len(keys) if outs is None else _list_for(keys, outs)
    return list(zip(_list_for(keys, values), outs, strict=True))


def _check_updater(name: str, settings: dict[str, Json]) -> None:
    if not isinstance(name, str):
        raise StoreError(f"set_updater: an updater is chosen by its name, not by {name!r}")
    for setting, value in settings.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise StoreError(
                f"set_updater: {setting} = {value!r} cannot be sent to the servers: "
                "settings are numbers, texts, and lists of them"
            ) from None


def _check_compression(compression: str, topk: float) -> None:
    known = get_args(Compression)
    if compression not in known:
        guess = nearest(str(compression), known)
        raise StoreError(f"compression = {compression!r} is not known{guess} (known: {', '.join(known)})")
    if not (isinstance(topk, (int, float)) and 0 < topk <= 1):
        raise StoreError(f"topk = {topk!r} must be above 0 and at most 1: the share of the values that is sent")
    if compression not in SPARSE and topk != _TOPK:
        raise StoreError(f"topk = {topk} is for compression 'topk' and 'topk_2bit', and compression is '{compression}'")


def _check_fits(entry: Entry, kind: str, shape: tuple[int, ...]) -> None:
    if kind != entry.kind or shape != entry.shape:
        raise StoreError(
            f"key '{entry.key}' is {entry.kind} of shape {entry.shape}, and this value is {kind} of shape {shape}"
        )


def _default(kind: str) -> Origin:
    return TORCH if kind == "bfloat16" else NUMPY


def _waiting(timeout_s: float) -> float:
    if not (isinstance(timeout_s, (int, float)) and 0 <= timeout_s < float("inf")):
        raise StoreError(f"timeout_s = {timeout_s!r} must be at least 0 and finite")
    return float(timeout_s)


def _seconds(failure_timeout: str | float) -> float:
    seconds = (
        parse_duration(failure_timeout, "failure_timeout") if isinstance(failure_timeout, str) else failure_timeout
    )
    if not seconds >= 0.5:
        raise JobError(f"failure_timeout = {failure_timeout!r} must be at least 0.5 s")
    return seconds
