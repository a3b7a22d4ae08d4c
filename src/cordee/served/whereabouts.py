"""Where the servers of a run are: who asks is told once all of them serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cordee.communication.channel import Received
from cordee.communication.messages import Message
from cordee.served.memory import Hearing
from cordee.served.messages import AskServers, Servers
from cordee.served.posts import Posts


class Whereabouts:
    """Answers through `reply`. `hearings` is what is known of each process, servers among them."""

    def __init__(
        self,
        posts: Posts,
        hearings: Mapping[str, Hearing],
        reply: Callable[[Received, Message], None],
        *,
        wants_followers: bool,
    ) -> None:
        self._posts = posts
        self._hearings = hearings
        self._reply = reply
        self._wants_followers = wants_followers
        self._asking: list[tuple[Received, AskServers]] = []

    @property
    def addresses(self) -> list[str]:
        """Of those that serve, in the order of the servers."""
        return [self._hearings[name].address for name in self._posts.serving]

    @property
    def is_ready(self) -> bool:
        """Whether all servers serve, and at the start all followers follow."""
        return self._posts.is_ready(wants_followers=self._wants_followers)

    @property
    def has_been_ready(self) -> bool:
        """Whether all servers have served: there was work."""
        return self._posts.has_been_ready

    def serves(self, name: str) -> bool:
        return name in self._posts.serving

    def is_served(self, index: int) -> bool:
        return bool(self._posts.posts[index].serving)

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return the servers whose followers wait to be given everything: index, address, follower's address."""
        return [
            (index, self._hearings[serving].address, self._hearings[follower].address)
            for index, serving, follower in self._posts.unfollowed()
        ]

    def note_following(self, index: int) -> None:
        """Take note that the follower of a server has everything."""
        self._posts.posts[index].is_following = True
        self.tell()

    def join(self, index: int, name: str) -> None:
        """Give a process that is up the part of server `index`."""
        self._posts.join(index, name)

    def lose(self, name: str) -> None:
        """Forget a process, whatever it was."""
        self._posts.lose(name)

    def ask(self, received: Received, question: AskServers) -> None:
        """Take a request for the list, and answer it if that can be."""
        self._asking.append((received, question))
        self.tell()

    def tell(self) -> None:
        """Answer those who ask, if there is an answer."""
        if not self.is_ready:
            return
        near, far = tuple(self.addresses), tuple(self._hearings[name].public for name in self._posts.serving)
        asking, self._asking = self._asking, []
        for received, question in asking:
            self._reply(received, Servers(self._posts.version, far if question.is_far else near))
