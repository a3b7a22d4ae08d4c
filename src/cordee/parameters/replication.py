"""A server and its follower: one state in two processes (decision 0022).

What changes the state goes to the follower first, then to the server itself, then the caller is answered. A server that
cannot reach its follower has that written down by whoever decides who takes over, before it answers anybody.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cordee.checkpoint import State
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.communication.calls import Call, Connection, UnavailableError
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message, Refused
from cordee.communication.wire import Buffer
from cordee.core.errors import CommunicationError, CordeeError
from cordee.core.fault_points import reach
from cordee.parameters.messages import Adopt, Done, FollowerLost, Load

Answer = tuple[Message, Sequence[Any]]


class ReplicatedService(abc.ABC):
    """Answers calls with what `handlers` do. Called by one thread at a time.

    A handler returns its answer, or None where it answers later.
    """

    def __init__(self) -> None:
        self.handlers: dict[type[Message], Callable[[Call, Any], Answer | None]] = {
            Adopt: self._adopt,
            Load: self._load,
        }
        self._follower: Connection | None = None  # does all that this server does, to take its place
        self._has_retired = False  # the follower may have taken its place
        self.connect: Callable[[str], Connection]
        self.report_lost: Callable[[str, str], None] = lambda address, message: None
        self.name = "server"

    @abc.abstractmethod
    def dump(self) -> Iterable[tuple[Message, Sequence[Any]]]:
        """Return the calls that give another server everything, whatever it had before."""

    @abc.abstractmethod
    def load_part(self, number: int, state: State) -> None:
        """Have a part that another server has dumped, instead of what was there."""

    def carry_out(self, call: Call) -> Answer | None:
        """Do what a call asks for; return the answer, or None where it is answered later."""
        handler = self.handlers.get(type(call.message))
        if handler is None:
            return Refused("unexpected", f"{type(call.message).__name__} is nothing for {self.name}"), ()
        return handler(call, call.message)

    def handle(self, call: Call) -> None:
        if self._has_retired:
            raise UnavailableError(f"{self.name} has handed over")
        reach("server.received", UnavailableError, of=call.message)
        answer = self.carry_out(call)
        reach("server.answering", UnavailableError, of=call.message)
        if answer is not None:
            call.reply(*answer)

    def report_to(self, ask: Callable[[Message], object], end: Callable[[str], None], decider: str) -> None:
        """Have `ask` report a lost follower to who decides which server serves; `end` if this server was given up."""

        def report_lost(address: str, message: str) -> None:
            try:
                ask(FollowerLost(address, message))
            except RefusedError as error:  # this server was given up, and its follower may serve by now
                end(str(error))
                raise UnavailableError(f"{message}, and was given up itself: {error}") from error
            except CommunicationError as error:
                raise UnavailableError(f"{message}, and {decider} could not be told: {error}") from error

        self.report_lost = report_lost

    def retire(self, changes_nothing: Message) -> bool:
        """Answer nobody any more, if the follower has everything; return whether it has. Call under the server's lock.

        Callers that come are to find out where the server is, and to try again.
        """
        if self._follower is not None and not self._has_retired:
            self.pass_on(changes_nothing)  # the follower is there
        self._has_retired = self._follower is not None
        return self._has_retired

    def end(self) -> None:
        """Answer nobody any more. Called under the server's lock."""
        self._has_retired = True

    def resume(self) -> None:
        """Answer again, after all. Called under the server's lock."""
        self._has_retired = False

    def mirrored(self, message: Message, buffers: Sequence[Buffer], act: Callable[[], Message]) -> Message:
        """Have the follower do what `act` does here; return the answer. It is dropped if it answers otherwise."""
        if self._follower is None:
            return act()
        answered = self.pass_on(message, buffers, may_refuse=True)
        try:
            answer = act()
        except Exception as error:
            refused = str(error) if isinstance(error, CordeeError) else f"{type(error).__name__}: {error}"
            self._compare(answered, Refused("failed", refused))
            raise
        self._compare(answered, answer)
        return answer

    def pass_on(self, message: Message, buffers: Sequence[Buffer] = (), *, may_refuse: bool = False) -> Message | None:
        """Have the follower do the same, before anybody is told that it is done; return the answer of the follower.

        A follower that does not answer is dropped, and so is one that refuses, unless it `may_refuse`.
        """
        if self._follower is None:
            return None
        try:
            reach("server.pass_on")
            answer: Message = self._follower.call(message, [buffer.torch() for buffer in buffers])
            reach("server.passed_on")
        except CommunicationError as error:
            if may_refuse and isinstance(error, RefusedError) and error.reason == "failed":
                return Refused("failed", error.detail)
            self._lose_follower(str(error))
            return None
        return answer

    def adopt(self, address: str) -> None:
        """Give another server everything, and have it follow from here. Can fail anywhere, and be done again."""
        reach("server.adopt.connect", UnavailableError)
        connection = self.connect(address)
        try:
            for message, buffers in self.dump():
                connection.call(message, buffers)
            reach("server.adopt.done", UnavailableError)
        except BaseException:
            connection.close()
            raise
        if self._follower is not None:
            self._follower.close()
        self._follower = connection

    def _adopt(self, call: Call, adopt: Adopt) -> Answer:
        self.adopt(adopt.address)
        return Done(), ()

    def _load(self, call: Call, load: Load) -> Answer:
        self.load_part(load.number, decode_state(load.names, [buffer.torch() for buffer in call.buffers]))
        return Done(), ()

    def _compare(self, answered: Message | None, answer: Message) -> None:
        if answered is not None and answered != answer:
            self._lose_follower(f"it answered {answered} where this server answers {answer}")

    def _lose_follower(self, why: str) -> None:
        """Continue alone. Who decides knows it before any caller is answered: that follower may not take over.

        Raises UnavailableError where that one cannot be told, or has given this very server up.
        """
        assert self._follower is not None
        self.report_lost(self._follower.address, f"{self.name} has lost its follower ({why})")
        self._follower.close()
        self._follower = None


def encode_state(state: State) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return a state as buffers: named tensors, which share memory, and one of JSON, which may outgrow a header."""
    plain = torch.frombuffer(bytearray(encode_values(state.values)), dtype=torch.uint8)
    return tuple(state.tensors), [*state.tensors.values(), plain]


def decode_state(names: Sequence[str], buffers: Sequence[Tensor]) -> State:
    """Return the state of these buffers, whose memory it shares."""
    *tensors, plain = buffers
    return State(dict(zip(names, tensors, strict=True)), decode_values(plain.numpy().tobytes()))
