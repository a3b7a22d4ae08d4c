"""Messages between two members of one process: order, tags, sizes, and messages longer than the channel."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_members import make_segment, make_teams

from cordee.communication.shared_memory.channels import Inbox, Message, Outbox
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.core.errors import CommunicationError


def some_bytes(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


SEGMENT, LAYOUT = make_segment(3)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 100, 400_000, 1_500_000])), max_size=8),
    st.randoms(use_true_random=False),
)
def test_messages_arrive_by_tag_in_the_order_sent(messages: list[tuple[int, int]], chance: random.Random) -> None:
    SEGMENT.memory[: LAYOUT.slots_at] = bytes(LAYOUT.slots_at)
    outbox = Outbox(SEGMENT, LAYOUT, 0, 2)
    inbox = Inbox(SEGMENT, LAYOUT, 0, 2, 0, [])
    sent = [(tag, some_bytes(length, seed)) for seed, (tag, length) in enumerate(messages)]
    for tag, data in sent:
        outbox.queue.append(Message(data, tag))
    # Ask tag by tag, in any interleaving; inside a tag the order is that of sending.
    waiting = {tag: [data for other, data in sent if other == tag] for tag, _ in sent}
    asked: list[tuple[Message, torch.Tensor]] = []
    steps = 0
    while waiting or not all(request.is_done for request, _ in asked):
        steps += 1
        assert steps < 10_000
        if waiting and chance.random() < 0.5:
            tag = chance.choice(sorted(waiting))
            expected = waiting[tag].pop(0)
            if not waiting[tag]:
                del waiting[tag]
            request = Message(torch.zeros_like(expected), tag)
            asked.append((request, expected))
            inbox.ask(request)
        outbox.advance()
        inbox.advance()
    assert all(torch.equal(request.data, expected) for request, expected in asked)
    assert not outbox.queue


def test_a_message_of_another_size_is_an_error_of_that_request_alone() -> None:
    SEGMENT.memory[: LAYOUT.slots_at] = bytes(LAYOUT.slots_at)
    outbox, inbox = Outbox(SEGMENT, LAYOUT, 0, 1), Inbox(SEGMENT, LAYOUT, 0, 1, 0, [])
    outbox.queue.extend([Message(some_bytes(10, 0), 0), Message(some_bytes(4, 1), 0)])
    bad, good = Message(torch.zeros(8, dtype=torch.uint8), 0), Message(torch.zeros(4, dtype=torch.uint8), 0)
    inbox.ask(bad)
    inbox.ask(good)
    outbox.advance()
    inbox.advance()
    assert bad.error == "a message of 10 bytes with tag 0 came for a tensor of 8 bytes"
    assert good.is_done
    assert good.error is None
    assert torch.equal(good.data, some_bytes(4, 1))


def test_mailboxes_deliver_while_the_receiver_does_something_else() -> None:
    teams = make_teams(2)
    boxes = [Mailbox(team.segment, team.layout, team.host.member, team.watch, (0, 1), timeout_s=20) for team in teams]
    data, target = some_bytes(5_000_000, 3), torch.zeros(5_000_000, dtype=torch.uint8)
    received = boxes[1].receive(target, 0, 7, [target], None)
    sent = boxes[0].send(data, 1, 7, [data])
    done = threading.Event()
    sent.get_future().then(lambda _: done.set())
    assert done.wait(20)  # without anybody waiting for either work
    assert received.wait()
    assert received.source_rank() == 0
    assert torch.equal(data, target)
    for team, box in zip(teams, boxes, strict=True):
        box.close()
        team.close()


def test_receiving_from_anybody() -> None:
    teams = make_teams(3)
    boxes = [
        Mailbox(team.segment, team.layout, team.host.member, team.watch, (0, 1, 2), timeout_s=20) for team in teams
    ]
    target = torch.zeros(3, dtype=torch.uint8)
    received = boxes[0].receive(target, None, 0, [target], None)
    boxes[2].send(some_bytes(3, 5), 0, 0, []).wait()
    received.wait()
    assert received.source_rank() == 2
    assert torch.equal(target, some_bytes(3, 5))
    pending = boxes[0].receive(target, 1, 0, [target], None)
    for team, box in zip(teams, boxes, strict=True):
        box.close()
        team.close()
    with pytest.raises(CommunicationError, match="destroyed before the message was through"):
        pending.wait()
