"""The places of the servers: who serves, who follows it, and who takes over when one is lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Post:
    """One server's place. Names of processes; "" is nobody."""

    serving: str = ""
    follower: str = ""
    is_following: bool = False  # has everything that the serving one has


@dataclass
class Posts:
    """The places of all servers. `version` grows with each change of who serves."""

    posts: list[Post] = field(default_factory=list)
    version: int = 0
    has_been_ready: bool = False

    @property
    def serving(self) -> list[str]:
        """Those that serve, in the order of the servers; without the places where nobody does."""
        return [post.serving for post in self.posts if post.serving]

    def is_ready(self, *, wants_followers: bool) -> bool:
        """Whether all servers serve, and at the start all followers follow."""
        if not all(post.serving for post in self.posts):
            return False
        self.has_been_ready |= not wants_followers or all(post.is_following for post in self.posts)
        return self.has_been_ready

    def join(self, index: int, name: str, *, has_state: bool = True) -> None:
        """Give a new server its part: to serve where nobody does and it has the run's parameters, else to follow."""
        post = self.posts[index]
        if post.serving or not has_state:
            post.follower, post.is_following = name, False
        else:
            post.serving = name
            self.version += 1

    def lose(self, name: str) -> None:
        """Forget a process; where it served and somebody has everything, that one serves."""
        for post in self.posts:
            if name == post.follower:
                post.follower, post.is_following = "", False
            elif name == post.serving:
                post.serving = post.follower if post.is_following else ""
                if post.serving:
                    post.follower, post.is_following = "", False
                self.version += 1

    def can_leave(self, name: str, *, has_retired: bool) -> bool:
        """Whether nothing is lost with a server that leaves: it does not serve, or its follower has everything."""
        serving = [post for post in self.posts if post.serving == name]
        return all(has_retired and post.is_following for post in serving)

    def without_follower(self) -> list[tuple[int, str]]:
        """Return where a server serves alone: index, who serves."""
        return [(index, post.serving) for index, post in enumerate(self.posts) if post.serving and not post.follower]

    def note_following(self, index: int, serving: str, follower: str) -> None:
        """Take note that `follower` was given everything by `serving`, if these are still the two."""
        post = self.posts[index]
        if (post.serving, post.follower) == (serving, follower):
            post.is_following = True

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return where the follower waits to be given everything: index, who serves, who follows."""
        return [
            (index, post.serving, post.follower)
            for index, post in enumerate(self.posts)
            if post.serving and post.follower and not post.is_following
        ]
