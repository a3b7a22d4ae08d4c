"""`cordee server`: one server of a store in the foreground, which says what its user needs to know."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cordee.core import env
from cordee.core.durations import parse_duration
from cordee.core.errors import JobError
from cordee.parameters.keys import KEY_VARIABLE, StoreKey, default_key_file, find_key, save_key
from cordee.parameters.membership import Link
from cordee.parameters.process import EndSignals, ServerSettings, own_address, serve_member, serve_root


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
    with EndSignals() as is_ended:
        if join is not None:
            if num_workers or num_servers > 1 or replicas > 1 or must_complete:
                raise JobError(
                    "--workers, --servers, --replicas and --require-all are for the first server, not one with --join"
                )
            host, _, port = join.removeprefix("tcp://").rpartition(":")
            if not join.startswith("tcp://") or not port.isdecimal():
                raise JobError(f"--join {join}: give the address that the first server printed, tcp://HOST:PORT")
            link = Link(join, env.store_key_text(), key_file, timeout_s)
            settings = ServerSettings(
                listen=listen or f"tcp://{own_address(host.strip('[]'), int(port))}:*",
                updaters=updaters,
                failure_timeout_s=timeout_s,
            )
            serve_member(settings, link, say=say, is_told_to_end=is_ended)
            return
        _serve_first(
            listen or "tcp://127.0.0.1:*",
            num_workers,
            num_servers,
            replicas,
            key_file,
            updaters,
            timeout_s,
            must_complete,
            say,
            is_ended,
        )


def _serve_first(
    listen: str,
    num_workers: int,
    num_servers: int,
    replicas: int,
    key_file: Path | None,
    updaters: Sequence[str],
    timeout_s: float,
    must_complete: bool,
    say: Callable[[str], None],
    is_ended: Callable[[], bool],
) -> None:
    text = env.store_key_text()
    key = find_key(listen, text, None) if text else StoreKey.make()
    settings = ServerSettings(
        listen=listen,
        num_workers=num_workers,
        num_servers=num_servers,
        replicas=replicas,
        updaters=updaters,
        failure_timeout_s=timeout_s,
        must_complete=must_complete,
        key=key,
    )
    left: list[Path] = []

    def ready(address: str) -> None:
        who = f"server 0 of {num_servers}" if replicas == 1 else "the directory"
        say(f"{who} listens at {address} (process {os.getpid()})")
        option = ""
        if text:
            say(f"key: that in {KEY_VARIABLE}")
        else:
            place = key_file or default_key_file(int(address.rpartition(":")[2]))
            save_key(key, place)
            left.append(place)
            option = f" --key-file {place}" if key_file else ""
            say(f"key: {place} (workers on other hosts need a copy)")
        say(f"start workers with: cordee worker --servers {address}{option} SCRIPT")
        if replicas > 1:
            say(f"start the {num_servers * replicas} servers with: cordee server --join {address}{option}")
        elif num_servers > 1:
            say(f"start the other servers with: cordee server --join {address}{option}")

    try:
        serve_root(settings, say=say, is_told_to_end=is_ended, ready=ready)
    finally:
        for place in left:
            place.unlink(missing_ok=True)
