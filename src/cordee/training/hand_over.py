"""The state of a member that is furthest, given to all members of a new team."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.core.fault_points import reach


def share_furthest(team: Team, held: State | None, step: int) -> State | None:
    """Return the state of the member that is furthest, on every member; None where nobody has any. Collective.

    `held` is what this member has after `step` steps; -1 is nothing.
    """
    reach("enter.begun")
    steps = team.gather(step)
    reach("enter.gathered")
    furthest = max(steps)
    if furthest < 0:
        return None
    if team.num_workers == 1:
        return held
    source = steps.index(furthest)
    own = held if step == furthest else None
    if min(steps) < furthest:
        received = checkpoint.share_state(held if team.worker_index == source else None, source)
        own = own or received
    assert own is not None
    # Where all took the step, one may have evaluated it already and another not: all continue as the source does.
    shared = checkpoint.share_value("progress", own, source)
    reach("enter.shared")
    return shared


def load_together(team: Team, load: Callable[[], State | None], *, in_files: bool = False) -> State | None:
    """Return the checkpoint that the first member's `load` returns, on every member; None if there is none. Collective.

    The first reads it: others may have no way to the run directory, or find another one to be the newest. `in_files`:
    nobody needs memory for all of it.
    """
    state = load() if team.is_first else None
    reach("enter.loaded")
    if not team.gather(int(state is not None))[0]:
        return None
    return state if team.num_workers == 1 else checkpoint.share_state(state, in_files=in_files)


def map_together(team: Team, find: Callable[[], Path | None]) -> State | None:
    """Return the checkpoint that the first member's `find` returns, on every member; None if there is none. Collective.

    The first has verified all of it. Each member reads what it looks at, from the folder to which all have access.
    """
    path = find() if team.is_first else None
    reach("enter.loaded")
    place = os.fsdecode(checkpoint.share_bytes(b"" if path is None else os.fsencode(path)))
    return checkpoint.map_state(Path(place)) if place else None


def nothing_left(step: int, advice: str) -> str:
    """Return the message for a team that was lost with all that it had."""
    return f"the team was lost at step {step}, and there is no checkpoint yet: start the run again, {advice}"
