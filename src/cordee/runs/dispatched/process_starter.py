"""The processes of a dispatched run: which number and which settings the next one of each role has."""

from __future__ import annotations

from cordee.cluster.coordinator import MemberStarter
from cordee.cluster.members import MemberRecord


class ProcessStarter(MemberStarter):
    """Starts those that take part in one run."""

    @property
    def next_worker(self) -> int:
        """A number that no worker has had."""
        return max((r.index for r in self._members.records.values() if r.role == "worker"), default=-1) + 1

    def start_worker(self) -> MemberRecord:
        """Have another worker started."""
        return self.start("worker", self.next_worker)

    def start_server(self, index: int, *, resume: bool, has_state: bool = True) -> MemberRecord:
        """Have another process started for a server.

        With `resume` it reads the last checkpoint. Without `has_state` it has nothing of the run until another server
        gives it everything, and never serves before.
        """
        earlier = [r.replica for r in self._members.records.values() if (r.role, r.index) == ("server", index)]
        return self.start(
            "server",
            index,
            replica=max(earlier, default=-1) + 1,
            server_keys=self._spec.server_keys,
            resume=resume,
            has_state=has_state,
        )
