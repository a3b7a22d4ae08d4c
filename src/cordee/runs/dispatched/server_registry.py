"""Where the servers of a run are: who serves, who follows it, who takes over when one is lost, and who asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cordee.cluster.members import ProcessRecord
from cordee.communication.channel import Received
from cordee.communication.messages import Message
from cordee.runs.dispatched.messages import AskServers, Servers


@dataclass
class ServerSlot:
    """One server's place. Names of processes; "" is nobody."""

    serving: str = ""
    follower: str = ""
    is_following: bool = False  # has everything that the serving one has


@dataclass
class ServerSlots:
    """The places of all servers. `version` grows with each change of who serves."""

    slots: list[ServerSlot] = field(default_factory=list)
    version: int = 0
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
            self.version += 1

    def lose(self, name: str) -> None:
        """Forget a process; where it served and somebody has everything, that one serves."""
        for slot in self.slots:
            if name == slot.follower:
                slot.follower, slot.is_following = "", False
            elif name == slot.serving:
                slot.serving = slot.follower if slot.is_following else ""
                if slot.serving:
                    slot.follower, slot.is_following = "", False
                self.version += 1

    def can_leave(self, name: str, *, has_retired: bool) -> bool:
        """Whether nothing is lost with a server that leaves: it does not serve, or its follower has everything."""
        serving = [slot for slot in self.slots if slot.serving == name]
        return all(has_retired and slot.is_following for slot in serving)

    def without_follower(self) -> list[tuple[int, str]]:
        """Return where a server serves alone: index, who serves."""
        return [(index, slot.serving) for index, slot in enumerate(self.slots) if slot.serving and not slot.follower]

    def note_following(self, index: int, serving: str, follower: str) -> None:
        """Take note that `follower` was given everything by `serving`, if these are still the two."""
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


class ServerRegistry:
    """Answers through `reply`. `process records` is what is known of each process, servers among them."""

    def __init__(
        self,
        slots: ServerSlots,
        process_records: Mapping[str, ProcessRecord],
        reply: Callable[[Received, Message], None],
        *,
        wants_followers: bool,
    ) -> None:
        self._slots = slots
        self._hearings = process_records
        self._reply = reply
        self._wants_followers = wants_followers
        self._asking: list[tuple[Received, AskServers]] = []

    @property
    def addresses(self) -> list[str]:
        """Of those that serve, in the order of the servers."""
        return [self._hearings[name].address for name in self._slots.serving]

    @property
    def is_ready(self) -> bool:
        """Whether all servers serve, and at the start all followers follow."""
        return self._slots.is_ready(wants_followers=self._wants_followers)

    @property
    def has_been_ready(self) -> bool:
        """Whether all servers have served: there was work."""
        return self._slots.has_been_ready

    def serves(self, name: str) -> bool:
        return name in self._slots.serving

    def is_served(self, index: int) -> bool:
        return bool(self._slots.slots[index].serving)

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return the servers whose followers wait to be given everything: index, name, the follower's name."""
        return self._slots.unfollowed()

    def address_of(self, name: str) -> str:
        return self._hearings[name].address

    def note_following(self, index: int, serving: str, follower: str) -> None:
        """Take note that the follower of a server has everything, if it is still the follower."""
        self._slots.note_following(index, serving, follower)
        self.tell()

    def has_part(self, name: str) -> bool:
        """Whether a server serves or follows, or may yet."""
        return any(name in (slot.serving, slot.follower) for slot in self._slots.slots)

    def join(self, index: int, name: str, *, has_state: bool) -> None:
        """Give a process that is up its part of server `index`; without the run's parameters it can only follow."""
        self._slots.join(index, name, has_state=has_state)

    def drop_follower(self, serving: str, address: str) -> str:
        """Have the follower at `address` not take over from `serving`; return its name, "" if it does not follow."""
        for slot in self._slots.slots:
            if slot.serving == serving and slot.follower and self._hearings[slot.follower].address == address:
                name = slot.follower
                self._slots.lose(name)
                return name
        return ""

    def can_leave(self, name: str, *, has_retired: bool) -> bool:
        """Whether nothing is lost with a server that leaves."""
        return self._slots.can_leave(name, has_retired=has_retired)

    def lacking_second(self) -> list[tuple[int, str]]:
        """Return the servers that are alone and should not be, by the settings or to be able to leave: index, name."""
        alone, wants = self._slots.without_follower(), self._wants_followers and self.has_been_ready
        return [(index, name) for index, name in alone if wants or self._hearings[name].is_leaving]

    def lose(self, name: str) -> None:
        """Forget a process, whatever it was."""
        self._slots.lose(name)

    def ask(self, received: Received, question: AskServers) -> None:
        """Take a request for the list, and answer it if that can be."""
        self._asking.append((received, question))
        self.tell()

    def tell(self) -> None:
        """Answer those who ask, if there is an answer."""
        if not self.is_ready:
            return
        near, far = tuple(self.addresses), tuple(self._hearings[name].public for name in self._slots.serving)
        asking, self._asking = self._asking, []
        for received, question in asking:
            self._reply(received, Servers(self._slots.version, far if question.is_remote else near))
