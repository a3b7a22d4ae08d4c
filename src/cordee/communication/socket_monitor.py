"""What has become of a client's connection, from the events that libzmq reports about its socket."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

from cordee.communication.sockets import can_receive

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


_NOT_OURS = "what listens there has another server key, or is no server of ours"


class Monitor:
    """Follows one socket. To be used by one thread at a time, the one that uses the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.trouble = "nothing listens there"  # why there is no connection; empty while there is one
        self.is_key_refused = False
        self.num_lost = 0  # connections that broke; what was asked over them stays unanswered
        self._watched = socket
        self.socket = socket.get_monitor_socket(_EVENTS)

    def read(self) -> None:
        """Take in what has happened since the last call; does not block."""
        while can_receive(self.socket):
            event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))["event"]
            was_up = not self.trouble
            match event:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self.trouble = ""
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    self.trouble, self.is_key_refused = "the server does not know our key", True
                case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    self.trouble = _NOT_OURS
                case zmq.Event.CONNECTED if self.trouble != _NOT_OURS:
                    self.trouble = "what listens there does not answer our handshake"
                case zmq.Event.DISCONNECTED:
                    # Also before the handshake is done: libzmq takes messages as soon as there is a connection.
                    self.num_lost += 1
                    if was_up:
                        self.trouble = "the connection was lost"
                case zmq.Event.CONNECT_RETRIED if was_up:
                    self.trouble = "nothing listens there any more"

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)
