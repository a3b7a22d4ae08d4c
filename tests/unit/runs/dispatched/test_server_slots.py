"""Who serves and who follows: a server takes over only with everything that was acknowledged."""

from __future__ import annotations

import pytest
from test_dispatcher import Play

from cordee.cluster.members import MemberRecord
from cordee.communication.this_host import host_id
from cordee.core.errors import CommunicationError
from cordee.monitoring.events import Warned
from cordee.parameters.messages import FollowerLost
from cordee.parameters.server_slots import ServerSlot, ServerSlots
from cordee.runs.dispatched.messages import AskServers, ServerAddress, Servers


def test_a_replacement_without_the_parameters_does_not_serve() -> None:
    """Both servers of a slot are lost, and the follower's replacement, which was to be given everything, is first."""
    slots = ServerSlots([ServerSlot("server-0", "server-0.1", is_following=True)])
    slots.lose("server-0")
    slots.lose("server-0.1")
    slots.join(0, "server-0.2", has_state=False)
    assert slots.serving == []
    slots.join(0, "server-0.3", has_state=True)
    assert slots.serving == ["server-0.3"]
    assert slots.unfollowed() == [(0, "server-0.3", "server-0.2")]


def test_a_follower_that_was_dropped_does_not_take_over() -> None:
    """The first server could not reach it for a moment, and has continued alone."""
    play = Play()
    play.join(MemberRecord(role="server", index=0, replica=1, number=0), "follower")
    play.dispatcher.servers.record_following(0, "server-0", "server-0.1")
    play.say("server-0", FollowerLost("follower", "server-0 has lost its follower (no reply)"))
    assert not play.dispatcher.servers.has_part("server-0.1")
    play.dispatcher.lose(play.members.records["server-0"])
    assert not play.dispatcher.servers.has_server(0)
    (warning,) = [event.message for event in play.events if isinstance(event, Warned)]
    assert warning == "server-0 has lost its follower (no reply): continuing alone until there is another"


def test_a_server_that_was_given_everything_too_late_does_not_follow() -> None:
    """It was dropped, and is being replaced, when the coordinator hears that handing over has succeeded."""
    slots = ServerSlots([ServerSlot("server-0", "server-0.1")])
    slots.lose("server-0.1")
    slots.join(0, "server-0.2", has_state=False)
    slots.record_following(0, "server-0", "server-0.1")
    assert not slots.slots[0].is_following
    slots.record_following(0, "server-0", "server-0.2")
    assert slots.slots[0].is_following


def test_every_member_hears_both_addresses_of_a_server_and_chooses_by_its_host() -> None:
    play = Play(servers=2)
    assert play.say("worker-0", AskServers()) == [], "one server is not there"
    server = ServerAddress(host_id(), "tcp://here", "tcp://there")
    answers = play.join(MemberRecord(role="server", index=1, number=0), server.local, public=server.public)
    (servers,) = [message for name, message in answers if name == "worker-0"]
    assert servers == Servers((ServerAddress(host_id(), "address"), server))
    assert [server.seen_from(host) for host in (host_id(), "another")] == ["tcp://here", "tcp://there"]
    assert play.dispatcher.servers.addresses == ["address", "tcp://here"], "for the coordinator"
    with pytest.raises(CommunicationError, match=r"listens for its own host only: cluster\.address is not set"):
        servers.addresses[0].seen_from("another")
