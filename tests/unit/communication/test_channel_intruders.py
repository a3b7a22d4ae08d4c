"""Who is not let in: nothing of theirs is parsed, they cost little, and those who may are served meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from cordee.communication.channel import ClientChannel, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys, make_keys
from cordee.communication.messages import COORDINATION, Accepted, Directive, Heartbeat
from cordee.communication.sockets import DOMAIN, ZapAuthenticator
from cordee.communication.wire import PROTOCOL_VERSION, Codec, Envelope, Limits
from cordee.core.errors import CommunicationError

pytestmark = pytest.mark.timeout(30)

SERVER_KEYS, (CLIENT_KEYS,) = make_keys()
GREETING_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
GREETING_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class CountingCodec(Codec):
    num_looked_at = 0

    def decode_header(self, header: memoryview | bytes) -> Envelope:
        self.num_looked_at += 1
        return super().decode_header(header)


class Guarded:
    """A server that answers directives, and a count of what it has looked at."""

    def __init__(self) -> None:
        self.codec = CountingCodec(COORDINATION, Limits(max_buffers=4, max_buffer_bytes=1 << 20))
        speaker = Speaker(run="run", name="coordinator", incarnation=1)
        self.channel = ServerChannel("tcp://127.0.0.1:*", speaker, self.codec, SERVER_KEYS)
        self.address = self.channel.address
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            received = self.channel.receive(0.02)
            if received is not None:
                self.channel.reply(received, Accepted("b"))

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.channel.close()

    def connect_tcp(self) -> socket.socket:
        host, port = self.address.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def serves_members(self) -> bool:
        speaker = Speaker(run="run", name="member", incarnation=time.monotonic_ns())
        with ClientChannel(self.address, speaker, Codec(COORDINATION), CLIENT_KEYS) as client:
            return client.request(Directive("stop"), timeout_s=5).message == Accepted("b")


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    server = Guarded()
    yield server
    server.close()


def valid_header() -> bytes:
    codec = Codec(COORDINATION)
    return codec.encode_header(
        Envelope(
            version=PROTOCOL_VERSION,
            run="run",
            sender="intruder",
            incarnation=1,
            generation=0,
            sequence=1,
            reply_to=0,
            buffers=(),
            payload=codec.encode_message(Heartbeat(0)),
        )
    )


@pytest.mark.parametrize("kind", ["no key", "wrong server key", "unlisted key", "plain password"])
def test_a_raw_client_without_the_right_keys_gets_nothing_parsed(guarded: Guarded, kind: str) -> None:
    own_public, own_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as intruder:
        intruder.linger = 0
        if kind == "plain password":
            intruder.plain_username, intruder.plain_password = b"cordee", b"cordee"
        elif kind != "no key":
            intruder.curve_publickey, intruder.curve_secretkey = own_public, own_secret
            intruder.curve_serverkey = SERVER_KEYS.public if kind == "unlisted key" else make_keys()[0].public
        intruder.connect(guarded.address)
        with contextlib.suppress(zmq.Again):  # libzmq takes the queue away once the handshake has failed
            for _ in range(5):
                intruder.send(valid_header(), zmq.NOBLOCK)
        assert intruder.poll(300) == 0  # no answer of any kind
        assert guarded.codec.num_looked_at == 0
        assert guarded.serves_members()
        assert guarded.codec.num_looked_at == 1
        if kind == "unlisted key":
            assert guarded.channel.refusals["unknown-key"] >= 1


def test_the_right_key_is_what_the_intruders_lacked(guarded: Guarded) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger, member.sndtimeo = 0, 5000
        member.curve_publickey, member.curve_secretkey = CLIENT_KEYS.public, CLIENT_KEYS.secret
        member.curve_serverkey = CLIENT_KEYS.server_public
        member.connect(guarded.address)
        member.send(valid_header())
        assert member.poll(5000) == zmq.POLLIN
        assert guarded.codec.num_looked_at == 1


def test_a_client_channel_says_why_it_is_not_let_in(guarded: Guarded) -> None:
    _, (other,) = make_keys()
    unlisted = ClientKeys(server_public=SERVER_KEYS.public, public=other.public, secret=other.secret)
    speaker = Speaker(run="run", name="stranger", incarnation=1)
    with ClientChannel(guarded.address, speaker, Codec(COORDINATION), unlisted) as client:
        started = time.monotonic()
        with pytest.raises(CommunicationError, match=f"{guarded.address}: the server does not know our key"):
            client.send(Heartbeat(0), timeout_s=10)
        assert time.monotonic() - started < 5
        with pytest.raises(CommunicationError, match="does not know our key"):
            client.receive(10)
    impostor = ClientKeys(server_public=other.server_public, public=CLIENT_KEYS.public, secret=CLIENT_KEYS.secret)
    client = ClientChannel(guarded.address, speaker, Codec(COORDINATION), impostor)
    with client, pytest.raises(CommunicationError, match="another server key, or is no server of ours"):
        client.send(Heartbeat(0), timeout_s=0.5)
    assert guarded.codec.num_looked_at == 0


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="a browser"),
        pytest.param(random.Random(0).randbytes(200_000), id="noise"),
        pytest.param(b"\xff" * 1000, id="ones"),
        pytest.param(GREETING_CURVE[:20], id="half a greeting"),
        pytest.param(GREETING_NULL + b"\x04\x06\x05READY" + b"\x00\x05hello", id="null mechanism"),
        pytest.param(GREETING_CURVE + b"\x04\xc8\x05HELLO" + bytes(194), id="an empty hello"),
        pytest.param(GREETING_CURVE + b"\x06" + struct.pack(">Q", 2**31) + bytes(100_000), id="a command of 2 GiB"),
        pytest.param(GREETING_CURVE + b"\x02" + struct.pack(">Q", 2**63 - 1) + bytes(1000), id="a frame of 8 EiB"),
        pytest.param(GREETING_CURVE + b"\x00\x05hello" * 1000, id="messages before the handshake"),
    ],
)
def test_garbage_on_the_port(guarded: Guarded, data: bytes) -> None:
    before = resident_bytes()
    connections = [guarded.connect_tcp() for _ in range(5)]
    try:
        for connection in connections:
            try:
                connection.sendall(data)
            except ConnectionError:
                continue  # hung up on in the middle of it
        assert guarded.serves_members()
        assert guarded.codec.num_looked_at == 1
        assert resident_bytes() - before < 64 << 20
    finally:
        for connection in connections:
            connection.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("claim", [2**31, 2**40, (1 << 20) + 65])
def test_a_frame_over_the_limit_ends_the_handshake_before_it_is_read(guarded: Guarded, claim: int) -> None:
    with guarded.connect_tcp() as connection:
        connection.sendall(GREETING_CURVE + b"\x06" + struct.pack(">Q", claim))
        reply = b"greeting"
        while reply:  # ends when the server hangs up, which it must without waiting for the rest
            try:
                reply = connection.recv(1000)
            except ConnectionResetError:
                reply = b""
    assert guarded.codec.num_looked_at == 0


def test_an_oversized_frame_of_a_member_is_not_read(guarded: Guarded) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger, member.sndtimeo = 0, 5000
        member.curve_publickey, member.curve_secretkey = CLIENT_KEYS.public, CLIENT_KEYS.secret
        member.curve_serverkey = CLIENT_KEYS.server_public
        member.connect(guarded.address)
        member.send_multipart([valid_header(), bytes((1 << 20) + 100)])
        assert member.poll(300) == 0
        assert guarded.codec.num_looked_at == 0
        assert guarded.serves_members()


def test_a_member_with_too_many_frames_is_refused(guarded: Guarded) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger, member.sndtimeo = 0, 5000
        member.curve_publickey, member.curve_secretkey = CLIENT_KEYS.public, CLIENT_KEYS.secret
        member.curve_serverkey = CLIENT_KEYS.server_public
        member.connect(guarded.address)
        member.send_multipart([valid_header()] + [b"x"] * 5000)
        assert member.poll(5000) == zmq.POLLIN
        assert b"more frames than the 4 buffers" in member.recv()
        assert guarded.serves_members()


@pytest.mark.parametrize(
    "request_frames",
    [
        [],
        [b"1.0"],
        [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"NULL"],
        [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", CLIENT_KEYS.public],
        [b"2.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", CLIENT_KEYS.public],
        [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", CLIENT_KEYS.public, b""],
        [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", SERVER_KEYS.public],
        [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", CLIENT_KEYS.public[:31]],
    ],
)
def test_the_authenticator_refuses_unless_all_is_right(request_frames: list[bytes]) -> None:
    with zmq.Context() as context:
        authenticator = ZapAuthenticator(context, SERVER_KEYS.admitted)
        assert authenticator.answer(request_frames)[2] == b"400"
        assert authenticator.answer([b"1.0", b"7", DOMAIN, b"", b"", b"CURVE", CLIENT_KEYS.public])[1:3] == [
            b"7",
            b"200",
        ]
        assert authenticator.num_refused == 1
        authenticator.close()
