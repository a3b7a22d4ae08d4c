"""The places of the servers: who serves, who follows it, and who takes over when one is lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ServerSlot:
    """One server's place. Names of processes; "" is nobody."""

    serving: str = ""
    follower: str = ""
    is_following: bool = False  # has everything that the serving one has


@dataclass
class ServerSlots:
    """The places of all servers."""

    slots: list[ServerSlot] = field(default_factory=list)
    has_been_ready: bool = False

    @property
    def serving(self) -> list[str]:
        """Those that serve, in the order of the servers; without the places where nobody does."""
        return [slot.serving for slot in self.slots if slot.serving]

    def is_ready(self, *, wants_followers: bool) -> bool:
        """Whether all servers serve, and at the start all followers follow."""
        if not all(slot.serving for slot in self.slots):
            return False
        self.has_been_ready |= not wants_followers or all(slot.is_following for slot in self.slots)
        return self.has_been_ready

    def join(self, index: int, name: str, *, has_state: bool = True) -> None:
        """Give a new server its part: to serve where nobody does and it has the run's parameters, else to follow."""
        slot = self.slots[index]
        if slot.serving or not has_state:
            slot.follower, slot.is_following = name, False
        else:
            slot.serving = name

    def lose(self, name: str) -> None:
        """Forget a process; where it served and somebody has everything, that one serves."""
        for slot in self.slots:
            if name == slot.follower:
                slot.follower, slot.is_following = "", False
            elif name == slot.serving:
                slot.serving = slot.follower if slot.is_following else ""
                if slot.serving:
                    slot.follower, slot.is_following = "", False

    def can_leave(self, name: str, *, has_retired: bool) -> bool:
        """Whether nothing is lost with a server that leaves: it does not serve, or its follower has everything."""
        serving = [slot for slot in self.slots if slot.serving == name]
        return all(has_retired and slot.is_following for slot in serving)

    def without_follower(self) -> list[tuple[int, str]]:
        """Return where a server serves alone: index, who serves."""
        return [(index, slot.serving) for index, slot in enumerate(self.slots) if slot.serving and not slot.follower]

    def record_following(self, index: int, serving: str, follower: str) -> None:
        """Record that `follower` was given everything by `serving`, if these are still the two."""
        slot = self.slots[index]
        if (slot.serving, slot.follower) == (serving, follower):
            slot.is_following = True

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return where the follower waits to be given everything: index, who serves, who follows."""
        return [
            (index, slot.serving, slot.follower)
            for index, slot in enumerate(self.slots)
            if slot.serving and slot.follower and not slot.is_following
        ]
