"""The ways to start a server of a store in the foreground: `cordee server`, and the roles of ps-lite's variables."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cordee.communication.this_host import own_address
from cordee.core import env
from cordee.core.durations import parse_duration
from cordee.core.errors import CordeeError, JobError
from cordee.parameters.keys import KEY_VARIABLE, StoreKey, default_key_file, find_key, save_key
from cordee.parameters.membership import Link
from cordee.parameters.process import ServerSettings, serve_member, serve_root


def serve(
    *,
    listen: str | None,
    num_workers: int,
    num_servers: int,
    replicas: int,
    join: str | None,
    key_file: Path | None,
    updaters: Sequence[str],
    failure_timeout: str,
    must_complete: bool,
    say: Callable[[str], None],
) -> None:
    """Serve until all workers have left, Ctrl-C or SIGTERM. Raises CordeeError for what kept it from serving."""
    timeout_s = parse_duration(failure_timeout, "--failure-timeout")
    if timeout_s < 0.5:
        raise JobError(f"--failure-timeout {failure_timeout} must be at least 0.5 s")
    if must_complete and not (num_workers or num_servers > 1 or replicas > 1):
        raise JobError("--require-all needs --workers or --servers: who should come?")
    if join is not None:
        if num_workers or num_servers > 1 or replicas > 1 or must_complete:
            raise JobError(
                "--workers, --servers, --replicas and --require-all are for the first server, not one with --join"
            )
        port = join.rpartition(":")[2]
        if not join.startswith("tcp://") or not port.isdecimal():
            raise JobError(f"--join {join}: give the address that the first server printed, tcp://HOST:PORT")
        with _end_signals() as is_ended:
            link = Link(join, env.store_key_text(), key_file, timeout_s)
            settings = ServerSettings(
                listen=listen or f"tcp://{own_address(join)}:*",
                updaters=updaters,
                failure_timeout_s=timeout_s,
            )
            serve_member(settings, link, say=say, is_told_to_end=is_ended)
        return
    settings = ServerSettings(
        listen=listen or "tcp://127.0.0.1:*",
        num_workers=num_workers,
        num_servers=num_servers,
        replicas=replicas,
        updaters=updaters,
        failure_timeout_s=timeout_s,
        must_complete=must_complete,
    )

    def describe(address: str, left_in: Path | None) -> Iterator[str]:
        who = f"server 0 of {num_servers}" if replicas == 1 else "the directory"
        yield f"{who} listens at {address} (process {os.getpid()})"
        if left_in is None:
            yield f"key: that in {KEY_VARIABLE}"
        else:
            yield f"key: {left_in} (workers on other hosts need a copy)"
        option = f" --key-file {left_in}" if key_file and left_in else ""
        yield f"start workers with: cordee worker --servers {address}{option} SCRIPT"
        if replicas > 1:
            yield f"start the {num_servers * replicas} servers with: cordee server --join {address}{option}"
        elif num_servers > 1:
            yield f"start the other servers with: cordee server --join {address}{option}"

    with _end_signals() as is_ended:
        _serve_first(settings, key_file, describe, say, is_ended)


def serve_role(role: env.StoreRole, failure_timeout_s: float) -> int:
    """Be the scheduler or a server of ps-lite's variables; return the exit code."""

    def say(line: str) -> None:
        os.write(2, f"cordee: {line}\n".encode())

    text, file = env.store_key_text(), env.store_key_file() or default_key_file(role.port)

    def describe(address: str, left_in: Path | None) -> list[str]:
        where = left_in or f"in {KEY_VARIABLE}"
        return [f"the scheduler listens at {address} (process {os.getpid()}); its key: {where}"]

    try:
        with _end_signals() as is_ended:
            if role.role == "scheduler":
                settings = ServerSettings(
                    listen=f"tcp://{own_address(role.address)}:{role.port}",
                    num_workers=role.num_workers,
                    num_servers=role.num_servers,
                    failure_timeout_s=failure_timeout_s,
                    must_complete=True,
                    has_shard=False,
                )
                _serve_first(settings, file, describe, say, is_ended)
            else:
                link = Link(role.address, text, None if text else file, failure_timeout_s)
                listen = f"tcp://{own_address(role.address)}:*"
                settings = ServerSettings(listen=listen, updaters=env.store_updaters())
                serve_member(settings, link, say=say, is_told_to_end=is_ended)
    except CordeeError as error:
        say(str(error))
        return 1
    return 0


def _serve_first(
    settings: ServerSettings,
    key_file: Path | None,
    describe: Callable[[str, Path | None], Iterable[str]],
    say: Callable[[str], None],
    is_ended: Callable[[], bool],
) -> None:
    """Serve the directory with the key of the environment, else with a new one that is left in a file meanwhile."""
    text = env.store_key_text()
    key = find_key(settings.listen, text, None) if text else StoreKey.make()
    left_in: Path | None = None

    def ready(address: str) -> None:
        nonlocal left_in
        if not text:
            place = key_file or default_key_file(int(address.rpartition(":")[2]))
            save_key(key, place)
            left_in = place
        for line in describe(address, left_in):
            say(line)

    try:
        serve_root(replace(settings, key=key), say=say, is_told_to_end=is_ended, ready=ready)
    finally:
        if left_in is not None:
            left_in.unlink(missing_ok=True)


@contextlib.contextmanager
def _end_signals() -> Iterator[Callable[[], bool]]:
    """Have Ctrl-C and SIGTERM end this process in order, if this is its main thread; yields whether one has come."""
    has_come = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, lambda *_: has_come.set()) for number in numbers}
    try:
        yield has_come.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
