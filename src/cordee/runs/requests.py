"""A member's requests to the coordinator for what is large: bytes of files that are beside the run directory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cordee.cluster.member_link import AGAIN_S, LONGEST_REQUEST_S, MemberSpec
from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Message
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError

log = logging.getLogger("cordee.requests")


class CoordinatorRequests:
    """A connection to the coordinator beside that of the heartbeats, which must not wait for what is large.

    Any thread may ask; one request is under way at a time. A coordinator that is killed is asked again when it is back.
    """

    def __init__(self, spec: MemberSpec, purpose: str, codec: Codec) -> None:
        speaker = Speaker(run=spec.run_id, name=f"{purpose}-{spec.name}", incarnation=time.time_ns())
        keys = ClientKeys.from_text(spec.client_keys)
        self._channel = ClientChannel(spec.coordinator_address, speaker, codec, keys, silence_s=spec.silence_s)
        self._asking = threading.Lock()
        self._is_closed = False

    def ask(self, message: Message, before: Callable[[], None] = lambda: None) -> Message:
        """Return the answer, for as long as it takes; `before` is called before each attempt.

        Raises CommunicationError if the coordinator refuses the member, which was given up, and after `close`.
        """
        with self._asking:
            while True:
                try:
                    before()
                    return self._channel.request(message, timeout_s=LONGEST_REQUEST_S).message
                except RefusedError as error:
                    raise CommunicationError(error.detail or str(error)) from error
                except CommunicationError as error:
                    if self._is_closed:
                        raise
                    log.info("asking again: %s", error)
                    while self._channel.kept() is not None:  # an answer that came too late
                        pass
                    time.sleep(AGAIN_S)

    def close(self) -> None:
        self._is_closed = True
        self._channel.close()
