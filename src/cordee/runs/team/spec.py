"""What the launcher of a team's run tells its coordinator."""

from __future__ import annotations

from cordee.cluster.launcher_link import CoordinatorSpec


class TeamSpec(CoordinatorSpec, frozen=True, kw_only=True):
    """Travels through a private socket."""

    store: str  # folder where the groups find themselves
