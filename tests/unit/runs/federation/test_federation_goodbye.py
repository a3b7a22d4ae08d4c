"""The end of a federation: who is told, and who is waited for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cordee.communication.messages import Message
from cordee.runs.federation import server as module
from cordee.runs.federation.messages import Finished, Poll
from cordee.runs.federation.server import FederationServer, _Client
from cordee.runs.federation.store import ClientRecord


class Scripted:
    """Clients that are heard, one message for each look, and what they are told."""

    def __init__(self, asks_after: int | None) -> None:
        self.asks_after, self.num_looks = asks_after, 0
        self.told: list[Message] = []
        self.said: list[str] = []
        self.is_stopping = False
        learning: Any = SimpleNamespace(counted=lambda name: 3)
        self.server = FederationServer(
            self,  # type: ignore[arg-type]
            SimpleNamespace(version=lambda: -1),  # type: ignore[arg-type]
            learning,
            job_toml="",
            num_classes=0,
            num_clients=1,
            failure_timeout_s=60.0,
            should_stop=lambda: self.is_stopping,
            say=self.said.append,
        )
        record = ClientRecord(0, "slow", "", "aa", False)
        self.server._records = {"aa": record}
        self.server._clients = {"slow": _Client(record, time.monotonic(), is_ready=True)}

    def receive(self, timeout_s: float) -> Any:
        self.num_looks += 1
        if self.num_looks == self.asks_after:
            return SimpleNamespace(envelope=SimpleNamespace(sender="aa"), message=Poll(), peer=None)
        assert self.num_looks < 1000, "the server waits for ever"
        return None

    def reply(self, received: Any, message: Message, buffers: Any) -> None:
        self.told.append(message)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GOODBYE_S", 0.0)
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


def test_a_client_that_trains_is_told_when_it_is_done() -> None:
    scripted = Scripted(asks_after=50)
    scripted.server._say_goodbye(None)
    assert scripted.told == [Finished("all rounds are done", 3)]
    assert scripted.said == ["all rounds are done; slow must be told (Ctrl-C does not wait)"]


def test_a_client_of_which_nothing_is_heard_any_more_is_not_waited_for() -> None:
    scripted = Scripted(asks_after=None)
    scripted.server._clients["slow"].heard_s -= 61.0
    scripted.server._say_goodbye(None)
    assert not scripted.told and not scripted.said


def test_a_server_that_is_asked_to_stop_waits_for_nobody() -> None:
    scripted = Scripted(asks_after=None)
    scripted.is_stopping = True
    scripted.server._say_goodbye("interrupt")
    assert not scripted.told and scripted.num_looks <= 1


def test_results_after_the_last_that_a_round_takes_are_heard_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous round is over with its last update; others may have come in the same moment."""
    server, messages, heard = Scripted(asks_after=None).server, list(range(3)), []
    monkeypatch.setattr(server, "_channel", SimpleNamespace(receive=lambda timeout_s: messages.pop(0)))
    monkeypatch.setattr(server, "_round", SimpleNamespace(is_full=False))
    monkeypatch.setattr(server, "_wait_s", lambda: 0.0)
    monkeypatch.setattr(server, "_continue", lambda: None)

    def hear(received: Any, turn: Any) -> None:
        heard.append(received)
        server._round.is_full = len(heard) == 2  # type: ignore[union-attr,misc]

    monkeypatch.setattr(server, "_hear", hear)
    server._turn()
    assert heard == [0, 1] and messages == [2]
