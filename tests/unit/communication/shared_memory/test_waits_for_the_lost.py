"""The wait for a peer that never arrives counts as a wait, not as an exchange."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from cordee.communication.shared_memory.mailbox import MessageWork
from cordee.communication.shared_memory.rounds import Rounds
from cordee.core.blocked_time import WAITED
from cordee.core.errors import CommunicationError


def fail(*_: Any) -> None:
    raise CommunicationError("rank 1 died")


@pytest.mark.parametrize("is_arriving", [True, False])
def test_in_a_collective(is_arriving: bool) -> None:
    rounds: Any = SimpleNamespace(
        is_streaming=True,
        is_arriving=is_arriving,
        ready=lambda need: False,
        _patience=SimpleNamespace(has_core_each=True),
        _futex=SimpleNamespace(sleep=lambda is_ready: time.sleep(0.02)),
        _check_peers=fail,
    )
    before_ns = WAITED.ns
    with pytest.raises(CommunicationError, match="rank 1 died"):
        Rounds._wait_long(rounds, ((0,), 1), 10.0)
    assert (WAITED.ns - before_ns >= 10_000_000) is is_arriving


def test_for_a_message() -> None:
    def wait_for(work: object, limit_s: float | None) -> None:
        time.sleep(0.02)
        fail()

    work = MessageWork(SimpleNamespace(wait_for=wait_for), SimpleNamespace(source=1), None)  # type: ignore[arg-type]
    before_ns = WAITED.ns
    with pytest.raises(CommunicationError, match="rank 1 died"):
        work.wait(timedelta(seconds=5))
    assert WAITED.ns - before_ns >= 10_000_000
