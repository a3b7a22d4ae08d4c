"""Where the members of a generation on several hosts find each other: the coordinator passes on what they say.

Through its channel, which is encrypted and lets only members in. What is said is small: each member's place, and the
addresses at which gloo then connects.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import COORDINATION, Ask, Message, Put, Said
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError

BOARD_PREFIX = "board-"
PATIENCE_S = 2.0  # for one answer of the coordinator, which may be busy
LONGEST_ABSENCE_S = 10.0  # of a coordinator that was killed and comes back


class CoordinatorStore:
    """What the members of one generation have said. Raises CommunicationError when the generation is over."""

    def __init__(self, address: str, run: str, worker_index: int, keys: ClientKeys, generation: int) -> None:
        speaker = Speaker(run=run, name=f"{BOARD_PREFIX}{worker_index}", incarnation=time.time_ns())
        self._channel = ClientChannel(address, speaker, Codec(COORDINATION), keys)
        self._generation = generation
        self._said: dict[str, bytes] = {}  # to be said again to a coordinator that has come back
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._said[key] = content
        self._request(Put(self._generation, key, content))

    def get(self, key: str) -> bytes:
        """Return what `check` has found."""
        return self._found[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of it was said."""
        for key in keys:
            if key not in self._found:
                reply = self._request(Ask(self._generation, key))
                assert isinstance(reply, Said), reply
                if reply.value is None:
                    return False
                self._found[key] = reply.value
        return True

    def _request(self, message: Message) -> Message:
        deadline_s = time.monotonic() + LONGEST_ABSENCE_S
        while True:
            try:
                return self._channel.request(message, timeout_s=PATIENCE_S).message
            except RefusedError as error:
                raise CommunicationError(error.detail or str(error)) from error
            except CommunicationError:
                if time.monotonic() > deadline_s:
                    raise
            self._say_again()

    def _say_again(self) -> None:
        """A coordinator that was killed has forgotten what was said."""
        try:
            for key, value in self._said.items():
                self._channel.request(Put(self._generation, key, value), timeout_s=PATIENCE_S)
        except CommunicationError:
            return  # what is to be said next finds out why

    def __enter__(self) -> CoordinatorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
