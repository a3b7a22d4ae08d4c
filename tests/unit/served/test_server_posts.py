"""Who serves and who follows: a server takes over only with everything that was acknowledged."""

from __future__ import annotations

from test_dispatcher import Play

from cordee.served.messages import Join, SecondLost
from cordee.served.posts import Post, Posts


def test_a_replacement_without_the_parameters_does_not_serve() -> None:
    """Both servers of a place are lost, and the second's replacement, which was to be given everything, comes first."""
    posts = Posts([Post("server-0", "server-0.1", is_following=True)])
    posts.lose("server-0")
    posts.lose("server-0.1")
    posts.join(0, "server-0.2", has_state=False)
    assert posts.serving == []
    posts.join(0, "server-0.3", has_state=True)
    assert posts.serving == ["server-0.3"]
    assert posts.unfollowed() == [(0, "server-0.3", "server-0.2")]


def test_a_second_that_was_dropped_does_not_take_over() -> None:
    """The first server could not reach it for a moment, and has continued alone."""
    play = Play()
    play.say("server-0.1", Join("server", 0, 2, "host", "second"))
    play.dispatcher.servers.note_following(0, "server-0", "server-0.1")
    play.say("server-0", SecondLost("second", "server-0 has lost its second server (no reply)"))
    assert not play.dispatcher.servers.has_part("server-0.1")
    play.dispatcher.lose("server-0")
    assert not play.dispatcher.servers.is_served(0)
    (warning,) = [fields["message"] for kind, fields in play.events if kind == "warning"]
    assert warning == "server-0 has lost its second server (no reply): continuing alone until there is another"


def test_a_server_that_was_given_everything_too_late_does_not_follow() -> None:
    """It was dropped, and is being replaced, when the coordinator hears that handing over has succeeded."""
    posts = Posts([Post("server-0", "server-0.1")])
    posts.lose("server-0.1")
    posts.join(0, "server-0.2", has_state=False)
    posts.note_following(0, "server-0", "server-0.1")
    assert not posts.posts[0].is_following
    posts.note_following(0, "server-0", "server-0.2")
    assert posts.posts[0].is_following
