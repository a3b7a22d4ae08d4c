"""A coordinator's channel without sockets: what members say comes from a list, and answers go to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cordee.communication.messages import Message


class ScriptedChannel:
    """Takes the place of a `ServerChannel`."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.answers: list[tuple[str, Message]] = []

    def receive(self, timeout_s: float) -> Any:
        return self.inbox.pop(0) if self.inbox else None

    def reply(self, received: Any, message: Message) -> None:
        self.answers.append((received.envelope.sender, message))

    def fence(self, name: str, incarnation: int) -> None:
        pass

    def say(self, dispatcher: Any, sender: str, message: Message) -> list[tuple[str, Message]]:
        """Let a process speak; return what the dispatcher says to anybody after it."""
        self.answers.clear()
        envelope = SimpleNamespace(sender=sender, incarnation=1)
        self.inbox.append(SimpleNamespace(envelope=envelope, message=message))
        dispatcher.serve(0.0)
        dispatcher.flush()
        return list(self.answers)
