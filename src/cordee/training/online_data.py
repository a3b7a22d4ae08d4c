"""Waiting together for data that keeps arriving: all members take the same batch, or none does."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cordee.cluster import Team
from cordee.core.errors import DataError
from cordee.data.online import OnlineStream

Action = Literal["take", "wait", "end", "interrupt", "time", "idle"]

_HALT, _TIME, _IDLE, _END, _READY = 1, 2, 4, 8, 16
_MARK_SHIFT = 8
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class NextAction:
    """What all members do now, and of how many samples the batch is made where it is to be taken."""

    action: Action
    num_samples: int = 0


def await_data(
    stream: OnlineStream,
    team: Team,
    *,
    wants_halt: Callable[[], bool],
    is_time_up: Callable[[], bool],
    idle_s: float | None,
) -> NextAction:
    """Wait until all members have the next batch, or there is a reason not to. Collective."""
    since_s = time.perf_counter()
    while True:
        waited_s = time.perf_counter() - since_s
        is_idle = idle_s is not None and waited_s >= idle_s
        found = agree_on_action(stream, team, wants_halt=wants_halt(), is_time_up=is_time_up(), is_idle=is_idle)
        if found.action != "wait":
            return found
        time.sleep(LOOK_EVERY_S)


def agree_on_action(
    stream: OnlineStream, team: Team, *, wants_halt: bool, is_time_up: bool, is_idle: bool
) -> NextAction:
    """Return what the team does next. Collective, and does not wait for data.

    Raises DataError when the members see different data at the same place.
    """
    num_samples = stream.ready()
    is_ended = not num_samples and stream.is_ended
    word = _HALT * wants_halt + _TIME * is_time_up + _IDLE * is_idle + _END * is_ended + _READY * bool(num_samples)
    mark = zlib.crc32(f"{stream.mark} {num_samples}".encode()) if num_samples else 0
    words = team.gather(word + (mark << _MARK_SHIFT))
    return NextAction(decide(words), num_samples)


def decide(words: list[int]) -> Action:
    """Return what follows from what each member said. Pure."""
    for bit, action in ((_HALT, "interrupt"), (_TIME, "time")):
        if any(word & bit for word in words):
            return action  # type: ignore[return-value]
    is_ready, is_ended = [bool(word & _READY) for word in words], [bool(word & _END) for word in words]
    has_same = len({word >> _MARK_SHIFT for word in words}) == 1
    if (all(is_ready) and not has_same) or (any(is_ready) and any(is_ended)):
        raise DataError(
            "workers found different data behind the same place: names of new files must come after those that are "
            "there, and files must not change; an iterable must give the same to every worker"
        )
    if all(is_ready):
        return "take"
    if all(is_ended):
        return "end"
    return "idle" if any(word & _IDLE for word in words) else "wait"
