"""A client's membership of a store: the way to the directory, signs of life, and the way to each server."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

from cordee.communication.calls import Connection
from cordee.communication.channel import RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.sockets import check_address
from cordee.communication.this_host import host_id
from cordee.core.errors import CommunicationError, CordeeError, StoreError
from cordee.parameters.calls import DIRECTORY, DirectoryGoneError, StoreCalls, as_store_error
from cordee.parameters.directory import describe_missing
from cordee.parameters.keys import StoreKey, find_key
from cordee.parameters.messages import LIMITS, STORE, Alive, Bye, JoinRequest, Registered, Role, StoreStatus

log = logging.getLogger(__name__)

_ATTEMPT_S = 2.0  # for one try to connect: the key file may be written again meanwhile
_ASK_S = 0.05
_QUIET_S = 1.0  # what is missing for longer is worth a line


class Link:
    """A process's connection to the directory of a store."""

    def __init__(
        self,
        address: str,
        key_text: str,
        key_file: Path | None,
        failure_timeout_s: float,
        *,
        shared_memory: bool = True,
    ) -> None:
        """Connect, trying again until `failure_timeout_s` is over. Raises CordeeError that says why it could not."""
        check_address(address, is_encrypted=True)
        self.address = address
        self.failure_timeout_s = failure_timeout_s
        self.shared_memory = shared_memory
        deadline = time.monotonic() + failure_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                self.key = find_key(address, key_text, key_file)
                self.speaker = Speaker(
                    run=self.key.run, name=f"{os.getpid()}-{secrets.token_hex(6)}", incarnation=time.time_ns()
                )
                self.connection = self.connect(address, connect_timeout_s=max(0.1, min(_ATTEMPT_S, left_s)))
                return
            except CordeeError as error:
                if time.monotonic() + _ASK_S > deadline or (key_text and isinstance(error, StoreError)):
                    raise type(error)(f"cannot join the store: {error}") from error
            time.sleep(_ASK_S)

    def connect(self, address: str, connect_timeout_s: float | None = None) -> Connection:
        return Connection(
            address,
            self.speaker,
            STORE,
            self.key.client_keys(),
            failure_timeout_s=self.failure_timeout_s,
            connect_timeout_s=connect_timeout_s,
            limits=LIMITS,
            shared_memory=self.shared_memory,
        )

    def register(self, role: Role, address: str = "", *, until_complete: bool) -> Registered:
        """Register; wait until everybody is there if asked to. Raises StoreError that says who is missing."""
        started = time.monotonic()
        has_said = False
        while True:
            try:
                joined = self.connection.call(JoinRequest(role, os.getpid(), socket.gethostname(), host_id(), address))
            except RefusedError as error:
                raise as_store_error(error) from error
            assert isinstance(joined, Registered)
            num_servers = joined.num_servers * joined.replicas
            missing = describe_missing(joined.servers_missing, num_servers, joined.workers_present, joined.num_workers)
            if not missing or not until_complete:
                return joined
            waited_s = time.monotonic() - started
            if waited_s > self.failure_timeout_s:
                self.leave()
                raise StoreError(
                    f"the store at {self.address} is not complete: {missing} did not come within "
                    f"{self.failure_timeout_s:g} s"
                )
            if waited_s > _QUIET_S and not has_said:
                has_said = True
                sys.stderr.write(
                    f"cordee: waiting for {missing} of the store at {self.address}, at most "
                    f"{self.failure_timeout_s:g} s\n"
                )
                sys.stderr.flush()
            time.sleep(_ASK_S)

    def leave(self) -> None:
        """Say goodbye to the directory, if it is there, and close the connection."""
        with contextlib.suppress(CordeeError):
            self.connection.call(Bye(), timeout_s=1.0)
        self.connection.close()


class Heartbeats:
    """Tells the directory now and then that this process lives; `is_over` once the store ends or its directory does."""

    def __init__(self, link: Link, heard_s: float) -> None:
        """The directory has heard this process after `heard_s`."""
        self._link = link
        self.is_over = False
        self.problem = ""
        self.lost: frozenset[str] = frozenset()  # workers that were given up, as the directory tells servers
        self.heard_until_s = heard_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cordee-store-alive", daemon=True)
        self._thread.start()

    def end(self, problem: str) -> None:
        """Have the process end, for another reason."""
        self.problem, self.is_over = problem, True

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        interval_s = min(1.0, self._link.failure_timeout_s / 5)
        heard_s = time.monotonic()
        while not self._has_ended.wait(interval_s):
            asked_s = time.monotonic()
            try:
                # A directory that lives may be busy for long, with an updater of its own shard say.
                status = self._link.connection.call(Alive())
                assert isinstance(status, StoreStatus)
                heard_s, self.heard_until_s = time.monotonic(), asked_s
                self.is_over |= status.is_over
                self.lost = frozenset(status.lost)
            except CommunicationError as error:
                self.problem = self.problem or f"the directory of the store is gone: {error}"
                # A connection to a directory that died stays broken; a refusal means that it has given this process up.
                if isinstance(error, RefusedError) or time.monotonic() - heard_s > self._link.failure_timeout_s:
                    self.is_over = True


class Membership:
    """A worker's membership. Made when everybody who is expected is there."""

    def __init__(
        self, address: str, key_text: str, key_file: Path | None, failure_timeout_s: float, *, shared_memory: bool
    ) -> None:
        self.failure_timeout_s = failure_timeout_s
        self._link = Link(address, key_text, key_file, failure_timeout_s, shared_memory=shared_memory)
        try:
            joined = self._link.register("worker", until_complete=True)
        except BaseException:
            self._link.connection.close()
            raise
        self.index, self.num_workers, self.num_servers = joined.index, joined.num_workers, joined.num_servers
        self._addresses = joined.addresses
        has_followers = joined.replicas > 1
        # A frozen server is silent for the failure timeout before its client knows, and so it is for the directory.
        patience_s = 3 * failure_timeout_s if has_followers else failure_timeout_s
        self.calls = StoreCalls(
            self._connect_serving if has_followers else self._connect, patience_s, is_replaced=has_followers
        )
        self._heartbeats = Heartbeats(self._link, time.monotonic())

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def key(self) -> StoreKey:
        return self._link.key

    def leave(self) -> None:
        """Say goodbye to everybody and close all connections."""
        self._heartbeats.close()
        self.calls.close()
        self._link.leave()

    def _connect_serving(self, server: int) -> Connection:
        """Connect to the process that is a server now. Raises CommunicationError while there is none."""
        if server != DIRECTORY:
            try:
                self._addresses = self._link.register("worker", until_complete=False).addresses
            except CommunicationError as error:
                raise DirectoryGoneError(
                    f"the directory of the store is gone, and without it no server answers: {error}"
                ) from error
            if not self._addresses:
                raise CommunicationError(f"no process is server {server} at the moment")
        # The directory may not know yet that the process has died: not long for one attempt.
        return self._connect(server, connect_timeout_s=min(1.0, self.failure_timeout_s))

    def _connect(self, server: int, connect_timeout_s: float | None = None) -> Connection:
        address = self._addresses[server] if server != DIRECTORY else ""
        return self._link.connect(address or self._link.address, connect_timeout_s)
