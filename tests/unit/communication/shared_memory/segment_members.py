"""Several members of one segment inside one process, each driven by a thread of the test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from cordee.communication.shared_memory.backend import HostTeam
from cordee.communication.shared_memory.liveness import Identity
from cordee.communication.shared_memory.segment import Layout, Segment, create_segment


def make_segment(num_members: int, slot_bytes: int = 4096) -> tuple[Segment, Layout]:
    layout = Layout(num_members=num_members, slot_bytes=slot_bytes)
    segment, fd = create_segment(layout.total_bytes, "a test")
    os.close(fd)
    return segment, layout


def make_teams(num_members: int, slot_bytes: int = 4096, failure_timeout_s: float = 5.0) -> list[HostTeam]:
    segment, layout = make_segment(num_members, slot_bytes)
    identities = [Identity.own(rank) for rank in range(num_members)]
    return [HostTeam(segment, layout, member, identities, failure_timeout_s) for member in range(num_members)]


def run_members(teams: list[HostTeam], function: Callable[[HostTeam], Any]) -> list[Any]:
    """Run `function(team)` in one thread per member; return the results or raise the first error."""
    results: list[Any] = [None] * len(teams)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = function(teams[index])
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(teams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results
