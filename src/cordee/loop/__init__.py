"""One's own training loop on many workers: `with cordee.join() as team`."""

from cordee.loop.joining import join
from cordee.loop.team import LoopTeam

__all__ = ["LoopTeam", "join"]
