"""External workers: workers that somebody else started with `cordee join`, on the run's own host or on another.

One of the run's own host is watched by its process; of a remote one nothing is known but what it says. Nobody takes the
place of an external worker that is lost.
"""

from __future__ import annotations

import msgspec

from cordee.cluster.control import check_remote
from cordee.cluster.processes import is_alive
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id


class ExternalWorkers(msgspec.Struct):
    """The external workers of one run, by their numbers as workers. Written down with what else a coordinator knows."""

    pids: dict[int, int] = {}  # on their own hosts
    far: dict[int, float] = {}  # those of other hosts, and when they were taken: they may be lost, and come back

    def __contains__(self, index: int) -> bool:
        return index in self.pids or index in self.far

    @property
    def near(self) -> list[tuple[int, int]]:
        """Number and pid of those whose processes can be looked at."""
        return [(index, pid) for index, pid in self.pids.items() if index not in self.far]

    def add(self, index: int, pid: int, now_s: float, *, is_remote: bool) -> None:
        """Take note of a new external worker, in the place of an earlier one if there was."""
        self.remove(index)
        self.pids[index] = pid
        if is_remote:
            self.far[index] = now_s

    def remove(self, index: int) -> None:
        """Forget a worker, which may not be a external worker."""
        self.pids.pop(index, None)
        self.far.pop(index, None)

    def take_ended(self) -> list[int]:
        """Return the near ones whose processes have ended, and forget them."""
        ended = [index for index, pid in self.near if not is_alive(pid)]
        for index in ended:
            self.remove(index)
        return ended


def check_join_request(wish: JoinRequest, public: str) -> bool:
    """Return whether who wants to join is on another host.

    Raises JobError if it cannot take part in a run that listens for other hosts at `public`, or nowhere.
    """
    is_remote = wish.host_id != host_id()
    if is_remote:
        check_remote(wish, public)
    return is_remote
