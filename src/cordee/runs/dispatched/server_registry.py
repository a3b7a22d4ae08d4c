"""Where the servers of a run are: who serves, who follows it, who takes over when one is lost, and who asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cordee.cluster.members import MemberRecord
from cordee.communication.channel import Received
from cordee.communication.messages import Message
from cordee.communication.this_host import host_id
from cordee.parameters.server_slots import ServerSlots
from cordee.runs.dispatched.messages import ServerAddress, Servers


class ServerRegistry:
    """Answers through `reply`. `records` is what is known of each member, servers among them."""

    def __init__(
        self,
        slots: ServerSlots,
        records: Mapping[str, MemberRecord],
        reply: Callable[[Received, Message], None],
        *,
        wants_followers: bool,
    ) -> None:
        self._slots = slots
        self._records = records
        self._reply = reply
        self._wants_followers = wants_followers
        self._asking: list[Received] = []

    @property
    def addresses(self) -> list[str]:
        """Of those that serve, in the order of the servers, for the coordinator."""
        return [self.address_of(name) for name in self._slots.serving]

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

    def has_server(self, index: int) -> bool:
        return bool(self._slots.slots[index].serving)

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return the servers whose followers wait to be given everything: index, name, the follower's name."""
        return self._slots.unfollowed()

    def address_of(self, name: str, caller: str = "") -> str:
        """Return the address of a server for another, or for the coordinator."""
        return self._describe(name).seen_from(self._records[caller].host_id if caller else host_id())

    def _describe(self, name: str) -> ServerAddress:
        record = self._records[name]
        return ServerAddress(record.host_id, record.address, record.public)

    def record_following(self, index: int, serving: str, follower: str) -> None:
        """Record that the follower of a server has everything, if it is still the follower."""
        self._slots.record_following(index, serving, follower)
        self.answer_waiting()

    def has_part(self, name: str) -> bool:
        """Whether a server serves or follows, or may yet."""
        return any(name in (slot.serving, slot.follower) for slot in self._slots.slots)

    def join(self, index: int, name: str, *, has_state: bool) -> None:
        """Give a process that is up its part of server `index`; without the run's parameters it can only follow."""
        self._slots.join(index, name, has_state=has_state)

    def drop_follower(self, serving: str, address: str) -> str:
        """Have the follower at `address` not take over from `serving`; return its name, "" if it does not follow."""
        for slot in self._slots.slots:
            if slot.serving == serving and slot.follower and self.address_of(slot.follower, serving) == address:
                name = slot.follower
                self._slots.lose(name)
                return name
        return ""

    def can_leave(self, name: str, *, has_retired: bool) -> bool:
        """Whether nothing is lost with a server that leaves."""
        return self._slots.can_leave(name, has_retired=has_retired)

    def lacking_follower(self) -> list[tuple[int, str]]:
        """Return the servers that are alone and should not be, by the settings or to be able to leave: index, name."""
        alone, wants = self._slots.without_follower(), self._wants_followers and self.has_been_ready
        return [(index, name) for index, name in alone if wants or self._records[name].is_leaving]

    def lose(self, name: str) -> None:
        """Forget a process, whatever it was."""
        self._slots.lose(name)

    def ask(self, received: Received) -> None:
        """Take a request for the list, and answer it if that can be."""
        self._asking.append(received)
        self.answer_waiting()

    def answer_waiting(self) -> None:
        """Answer those who ask, if there is an answer."""
        if not self.is_ready:
            return
        servers = Servers(tuple(self._describe(name) for name in self._slots.serving))
        asking, self._asking = self._asking, []
        for received in asking:
            self._reply(received, servers)
