"""Errors under the names that Horovod's scripts catch."""

from __future__ import annotations

from cordee.core.errors import CommunicationError
from cordee.runs.script.member import Halted


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that ranks called differently, or a rank that was lost in it. Also an error of Cordée."""


class HostsUpdatedInterrupt(Halted):
    """All ranks leave the function of `hvd.elastic.run`, which is called again as another team.

    Raised by `state.commit()` and `state.check_host_updates()` on every rank. Horovod's is an Exception, which a script
    that catches everything swallows on one rank.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod raises it for a library built for another version. Here nothing is built, and nothing raises it."""
