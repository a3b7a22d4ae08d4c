"""A server process of a store: the directory, a shard, or both, served until the store ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cordee.communication.calls import CallServer
from cordee.communication.endpoint import Speaker
from cordee.communication.shared_memory.liveness import read_stat
from cordee.communication.this_host import host_id
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.directory import Directory, Participant, describe_missing
from cordee.parameters.keys import StoreKey
from cordee.parameters.membership import Heartbeats, Link
from cordee.parameters.messages import LIMITS, STORE, Adopt, Following, Registered
from cordee.parameters.service import StoreService
from cordee.parameters.shard import Shard
from cordee.parameters.updaters import load_functions

_TICK_S = 0.2
_PARTING_S = 3.0  # for the other servers to hear that it is over


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What one server process is to do."""

    listen: str = "tcp://127.0.0.1:*"
    num_workers: int = 0  # that are expected; 0: as many as come, until it is told to end
    num_servers: int = 1  # that are expected, this one included if it has a shard
    replicas: int = 1  # processes of each server; with 2 the first process has the directory only
    updaters: Sequence[str] = ()  # modules with update functions
    failure_timeout_s: float = 30.0
    must_complete: bool = False  # end with an error when not everybody has come in that time
    has_shard: bool = True  # False: only the directory, as ps-lite's scheduler
    key: StoreKey = field(default_factory=StoreKey.make)


def serve_root(
    settings: ServerSettings,
    *,
    say: Callable[[str], None],
    is_told_to_end: Callable[[], bool],
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the directory of a store, and a shard; return when all workers have left, or when told to.

    Raises StoreError if not everybody came in time, or a worker was lost.
    """
    torch.set_num_threads(1)
    directory = Directory(
        num_workers=settings.num_workers,
        num_servers=settings.num_servers,
        failure_timeout_s=settings.failure_timeout_s,
        replicas=settings.replicas,
    )
    has_shard = settings.has_shard and settings.replicas == 1
    shard = Shard(load_functions(settings.updaters)) if has_shard else None
    service = StoreService(directory, shard)
    speaker = Speaker(run=settings.key.run, name="server-0", incarnation=time.time_ns())
    with CallServer(
        settings.listen, speaker, STORE, settings.key.server_keys(), service.handle, limits=LIMITS
    ) as server:
        if shard is not None:  # this process is server 0; clients reach it as they reach the directory
            directory.register(
                "server-0", "server", pid=os.getpid(), host=socket.gethostname(), address="", now_s=float("inf")
            )
        watch = _RootWatch(directory, service, settings, say, is_told_to_end)
        ready(server.address)

        def is_over() -> bool:
            now_s = time.monotonic()
            if now_s < watch.next_s:
                return False
            with server.lock:
                return watch.update(now_s)

        server.run(is_over)
    if watch.problem:
        raise StoreError(watch.problem)


class _RootWatch:
    """Looks after the participants, and decides when the store ends."""

    def __init__(
        self,
        directory: Directory,
        service: StoreService,
        settings: ServerSettings,
        say: Callable[[str], None],
        is_told_to_end: Callable[[], bool],
    ) -> None:
        self._directory, self._service, self._settings = directory, service, settings
        self._say, self._is_told_to_end = say, is_told_to_end
        self._started_s = time.monotonic()
        self._over_s = 0.0
        self._has_said = self._was_complete = False
        self.next_s = 0.0
        self.problem = ""

    def update(self, now_s: float) -> bool:
        """Do what is due; return whether the process may end."""
        self.next_s = now_s + _TICK_S
        for line, has_successor in self._service.tick(now_s, _has_died):
            self._say(line)
            if self._settings.num_workers and not has_successor:
                self.problem = self.problem or line
        if self._is_told_to_end():
            self._begin_end(now_s)
        elif not self._was_complete:
            self._await_everybody(now_s)
        if self._directory.is_over:
            self._begin_end(now_s)
        if not self._over_s:
            return False
        others = [server for server in self._directory.present("server") if server.address and server.is_here]
        return not others or now_s - self._over_s > _PARTING_S

    def _begin_end(self, now_s: float) -> None:
        self._service.is_over = True
        self._over_s = self._over_s or now_s

    def _await_everybody(self, now_s: float) -> None:
        directory = self._directory
        if directory.is_complete:
            self._was_complete = True
            if self._has_said:
                self._say("everybody is there")
            return
        num_servers, num_present = directory.num_servers * directory.replicas, len(directory.present("worker"))
        text = describe_missing(directory.num_missing_servers, num_servers, num_present, directory.num_workers)
        if not self._has_said:
            self._has_said = True
            limit = f", at most {directory.failure_timeout_s:g} s" if self._settings.must_complete else ""
            self._say(f"waiting for {text}{limit}")
        if self._settings.must_complete and now_s - self._started_s > directory.failure_timeout_s:
            self.problem = f"{text} did not come within {directory.failure_timeout_s:g} s"
            self._begin_end(now_s)


def serve_member(
    settings: ServerSettings,
    link: Link,
    *,
    say: Callable[[str], None],
    is_told_to_end: Callable[[], bool],
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve a shard of the store that `link` leads to, until that ends. Raises StoreError if its directory is gone."""
    torch.set_num_threads(1)
    service = StoreService(None, Shard(load_functions(settings.updaters)))
    speaker = Speaker(run=link.key.run, name=f"server-{os.getpid()}", incarnation=time.time_ns())
    with CallServer(settings.listen, speaker, STORE, link.key.server_keys(), service.handle, limits=LIMITS) as server:
        asked_s = time.monotonic()
        joined = link.register("server", server.address, until_complete=False)
        say(f"server {joined.index} of {joined.num_servers} listens at {server.address} (process {os.getpid()})")
        ready(server.address)
        heartbeats = Heartbeats(link, asked_s)
        following = _follow(link, service, heartbeats, server.address, joined, say) if joined.replicas > 1 else None
        next_s = 0.0

        def is_over() -> bool:
            nonlocal next_s
            now_s = time.monotonic()
            if now_s < next_s:
                return False
            next_s = now_s + _TICK_S
            with server.lock:
                service.tick(now_s, _has_died)
                service.lost = heartbeats.lost
            return heartbeats.is_over or is_told_to_end()

        server.run(is_over)
        heartbeats.close()
        if following is not None:
            with server.lock:
                service.end()  # the follower serves as soon as the directory knows
            following.join()
        link.leave()
    if heartbeats.problem and not is_told_to_end():
        raise StoreError(heartbeats.problem)


def _follow(
    link: Link,
    service: StoreService,
    heartbeats: Heartbeats,
    own_address: str,
    joined: Registered,
    say: Callable[[str], None],
) -> threading.Thread:
    """Prepare a server to lose its follower or to take its first one's place; begin to follow if it is a follower."""
    service.name = f"server {joined.index} (process {os.getpid()})"
    service.connect = link.connect
    # The directory gives nobody up that it has heard in this time; later another may serve beside this one.
    service.may_serve = lambda: time.monotonic() - heartbeats.heard_until_s < joined.failure_timeout_s
    service.leader = joined.leader

    def follow() -> None:
        if not joined.follows:
            return
        try:
            with link.connect(joined.follows) as connection:
                connection.call(Adopt(own_address))
            link.connection.call(Following(joined.follows))
            say(f"has all that the server at {joined.follows} has, and can take its place")
        except CommunicationError as error:  # it may have been given everything or not: it is of no use
            heartbeats.end(f"the server at {joined.follows} could not give it everything: {error}")

    service.report_to(link.connection.call, heartbeats.end, "the directory")
    thread = threading.Thread(target=follow, name="cordee-store-follow", daemon=True)
    thread.start()
    return thread


def _has_died(server: Participant) -> bool:
    """Whether the process of a server of this host has ended. Of one of another host only silence tells."""
    if server.host_id != host_id():
        return False
    try:
        return read_stat(server.pid).state in ("Z", "X")
    except OSError:
        return True
