"""A server of a store and its follower, without a network: what is passed on, and who is believed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cordee.communication.calls import Call, UnavailableError
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message, Refused
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.messages import Adopt, Create, Done, Push, SetUpdater
from cordee.parameters.service import StoreService
from cordee.parameters.shard import Shard


def ask(service: StoreService, caller: str, message: Message, buffers: Sequence[Any] = ()) -> Message:
    answers: list[Message] = []
    sent = tuple(SimpleNamespace(torch=lambda tensor=tensor: tensor) for tensor in buffers)
    service.handle(Call(caller, 1, message, sent, lambda reply, out: answers.append(reply)))  # type: ignore[arg-type]
    (answer,) = answers
    return answer


class Wire:
    """What a connection to the follower is to the first."""

    def __init__(self, follower: StoreService, address: str) -> None:
        self._follower, self.address, self.is_cut = follower, address, False

    def call(self, message: Message, buffers: Sequence[Any] = ()) -> Message:
        if self.is_cut:
            raise CommunicationError("cut")
        try:
            return ask(self._follower, "first", message, buffers)
        except StoreError as error:
            raise RefusedError("follower", Refused("failed", str(error))) from error

    def close(self) -> None:
        pass


def pair() -> tuple[StoreService, StoreService, Wire, list[str]]:
    first, follower = StoreService(None, Shard()), StoreService(None, Shard())
    first.may_serve = follower.may_serve = lambda: True
    follower.leader = "first"
    wire, lost = Wire(follower, "there"), []
    first.connect = lambda address: wire  # type: ignore[assignment,return-value]
    first.report_lost = lambda address, message: lost.append(address)
    ask(first, "a", Create(0, "w", "float32", (3,), False))
    ask(first, "a", Push(0, 1, 0), [torch.ones(3)])
    ask(first, "follower", Adopt("there"))
    return first, follower, wire, lost


def values(service: StoreService) -> list[float]:
    assert service.shard is not None
    return service.shard.part(0).values.tolist()


def test_a_second_has_what_was_there_and_what_came_since_and_counts_pushes_once() -> None:
    first, follower, _, lost = pair()
    assert ask(first, "a", Push(0, 2, 0), [torch.ones(3)]) == Done(2)
    assert values(first) == values(follower) == [2, 2, 2]
    assert ask(follower, "a", Push(0, 2, 0), [torch.ones(3)]) == Done(2), "the client did not hear, and sends again"
    assert ask(follower, "a", Push(0, 3, 0), [torch.ones(3)]) == Done(3)
    assert values(follower) == [3, 3, 3] and not lost


def test_a_second_that_serves_does_not_take_anything_from_the_first_any_more() -> None:
    _, follower, _, _ = pair()
    ask(follower, "a", Push(0, 2, 0), [torch.ones(3)])
    with pytest.raises(UnavailableError, match="does not follow any more: it serves"):
        ask(follower, "first", SetUpdater("assign", {}))
    assert values(follower) == [2, 2, 2]


def test_what_both_refuse_is_no_reason_to_part() -> None:
    first, follower, _, lost = pair()
    with pytest.raises(StoreError, match="'sgdd' is not known"):
        ask(first, "a", SetUpdater("sgdd", {}))
    assert not lost and ask(first, "a", Push(0, 2, 0), [torch.ones(3)]) == Done(2)
    assert values(follower) == [2, 2, 2]


def test_a_second_that_differs_or_does_not_answer_is_reported_before_anybody_is_answered() -> None:
    first, follower, _, lost = pair()
    assert follower.shard is not None
    follower.shard.part(0).version = 7
    assert ask(first, "a", Push(0, 2, 0), [torch.ones(3)]) == Done(2) and lost == ["there"]
    first, follower, wire, lost = pair()
    wire.is_cut = True

    def cannot(address: str, message: str) -> None:
        raise UnavailableError("the directory could not be told")

    first.report_lost = cannot
    with pytest.raises(UnavailableError):
        ask(first, "a", Push(0, 2, 0), [torch.ones(3)])
    assert values(first) == [1, 1, 1]


def test_a_server_that_the_directory_may_have_given_up_does_not_answer() -> None:
    first, _, _, _ = pair()
    first.may_serve = lambda: False
    with pytest.raises(UnavailableError, match="another may have taken its place"):
        ask(first, "a", Push(0, 2, 0), [torch.ones(3)])
