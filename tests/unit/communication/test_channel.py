"""Channels between a client and a server that may: delivery, deadlines, refusals, threads, and a clean end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from cordee.communication.channel import ClientChannel, Peer, Received, RefusedError, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import COORDINATION, Accepted, Bye, Directive, Heartbeat, Refused
from cordee.communication.traffic import SENT
from cordee.communication.wire import PROTOCOL_VERSION, Codec, Envelope, Limits, WireError
from cordee.core.errors import CommunicationError

pytestmark = pytest.mark.timeout(30)

LIMITS = Limits(max_buffers=4, max_buffer_bytes=8 << 20, max_queued=10)
CODEC = Codec(COORDINATION, LIMITS)
SERVER_KEYS, (CLIENT_KEYS,) = make_keys()
LOOPBACK = "tcp://127.0.0.1:*"


def open_server(address: str = LOOPBACK, *, curve: bool = True, incarnation: int = 1) -> ServerChannel:
    speaker = Speaker(run="run", name="coordinator", incarnation=incarnation)
    return ServerChannel(address, speaker, CODEC, SERVER_KEYS if curve else None, curve=curve)


def open_client(address: str, name: str = "worker-0", *, curve: bool = True, incarnation: int = 1) -> ClientChannel:
    speaker = Speaker(run="run", name=name, incarnation=incarnation)
    return ClientChannel(address, speaker, CODEC, CLIENT_KEYS if curve else None, curve=curve)


@contextmanager
def serving(server: ServerChannel, answer: Callable[[Received], None] = lambda _: None) -> Iterator[list[Received]]:
    """Serve in a thread; yields what has come in."""
    received: list[Received] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            message = server.receive(0.02)
            if message is not None:
                answer(message)
                received.append(message)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield received
    finally:
        is_over.set()
        thread.join()


def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_thread_and_no_descriptor_stays() -> Iterator[None]:
    def things() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    before = things()
    yield
    until(lambda: all(now <= then for now, then in zip(things(), before)))


@pytest.mark.parametrize("curve", [True, False])
@pytest.mark.parametrize("scheme", ["tcp", "tcp6", "ipc", "ipc-path"])
def test_messages_and_buffers_go_both_ways(scheme: str, curve: bool, tmp_path: Path) -> None:
    address = {"tcp": LOOPBACK, "tcp6": "tcp://[::1]:*", "ipc": "ipc://*", "ipc-path": f"ipc://{tmp_path}/s"}[scheme]
    tensors = [torch.arange(1000.0), torch.tensor([1, 2, 3], dtype=torch.int8), torch.zeros(0, 3), torch.tensor(True)]
    with open_server(address, curve=curve) as server:
        assert "*" not in server.address

        def answer(received: Received) -> None:
            server.reply(received, Accepted("b"), [buffer.torch() for buffer in received.buffers])

        with serving(server, answer), open_client(server.address, curve=curve) as client:
            reply = client.request(Directive("stop"), tensors, timeout_s=5)
            assert reply.message == Accepted("b")
            assert reply.peer.name == "coordinator"
            for sent, buffer in zip(tensors, reply.buffers):
                assert torch.equal(sent, buffer.torch())


def test_a_large_buffer_may_change_once_it_is_sent_and_outlives_the_channel() -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        client.send(Directive("stop"), [array], timeout_s=5)
        array += 1
        until(lambda: received)
        assert np.array_equal(received[0].buffers[0].numpy(), array - 1)
    assert received[0].buffers[0].torch()[-1] == array[-1] - 1


def test_a_request_keeps_other_messages_for_receive() -> None:
    with open_server() as server:

        def answer(received: Received) -> None:
            server.send(received.peer, Directive("pause"))
            server.reply(received, Accepted("b"))

        with serving(server, answer), open_client(server.address) as client:
            assert client.request(Directive("stop"), timeout_s=5).message == Accepted("b")
            set_aside = client.receive(0)
            assert set_aside is not None
            assert set_aside.message == Directive("pause")
            assert client.receive(0) is None


def test_stale_generations_are_refused_but_heartbeats_are_heard() -> None:
    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        server.generation, client.generation = 3, 2
        with pytest.raises(RefusedError, match="the current generation is 3") as caught:
            client.request(Directive("stop"), timeout_s=5)
        assert caught.value.reason == "stale-generation"
        client.send(Heartbeat(7), timeout_s=5)
        until(lambda: received)
        assert [item.message for item in received] == [Heartbeat(7)]
        client.generation = 3
        client.send(Directive("stop"), timeout_s=5)
        until(lambda: len(received) == 2)
        assert server.refusals == {"stale-generation": 1}


def test_the_fenced_and_the_replaced_are_refused() -> None:
    with open_server() as server, serving(server) as received, open_client(server.address) as zombie:
        zombie.send(Heartbeat(1), timeout_s=5)
        until(lambda: received)
        server.fence("worker-0", 1)
        zombie.send(Heartbeat(2), timeout_s=5)
        refusal = zombie.receive(5)
        assert refusal is not None
        assert refusal.message == Refused("stale-incarnation")
        with open_client(server.address, incarnation=2) as again:
            again.send(Heartbeat(3), timeout_s=5)
            until(lambda: len(received) == 2)


def test_a_malformed_message_of_a_member_is_answered_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        [b""],
        [b"rubbish"],
        [b"\x99\x01", b"x"],
        [b"x"] * 50,
        [CODEC.encode_header(_envelope(sequence=10)), b"unexpected buffer"],
    ]
    with (
        open_server() as server,
        serving(server) as received,
        open_client(server.address) as client,
        open_client(server.address, "good") as good,
    ):
        for frames in bad:
            client.send(Heartbeat(0), timeout_s=5)  # waits for the connection
            with client._using:
                client._socket.send_multipart(frames)
            refusal = client.receive(5)
            assert refusal is not None
            assert isinstance(refusal.message, Refused)
            assert refusal.message.reason == "malformed"
        good.send(Heartbeat(5), timeout_s=5)
        until(lambda: any(item.peer.name == "good" for item in received))
        assert server.refusals["malformed"] == len(bad)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def _envelope(sequence: int, **fields: Any) -> Envelope:
    values: dict[str, Any] = {
        "version": PROTOCOL_VERSION, "run": "run", "sender": "worker-0", "incarnation": 1, "generation": 0,
        "sequence": sequence, "reply_to": 0, "buffers": (), "payload": CODEC.encode_message(Heartbeat(0)),
    }  # fmt: skip
    return Envelope(**(values | fields))


def test_a_message_sent_twice_is_heard_once() -> None:
    header = CODEC.encode_header(_envelope(sequence=1000))
    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        client.send(Heartbeat(0), timeout_s=5)
        with client._using:
            client._socket.send(header)
            client._socket.send(header)
        until(lambda: server.refusals == {"replay": 1})
        assert [item.envelope.sequence for item in received] == [1, 1000]


def test_a_server_that_talks_rubbish_is_an_error_of_the_client() -> None:
    with open_server() as server:

        def answer(received: Received) -> None:
            with server._using:
                server._socket.send_multipart([received.peer.route, b"rubbish"])

        with (
            serving(server, answer),
            open_client(server.address) as client,
            pytest.raises(WireError),
        ):
            client.request(Directive("stop"), timeout_s=5)


def test_nobody_listens() -> None:
    with open_server() as server:
        address = server.address
    with open_client(address) as client:
        started = time.monotonic()
        with pytest.raises(CommunicationError, match=rf"{address} within 0\.2 s: nothing listens there"):
            client.send(Heartbeat(0), timeout_s=0.2)
        assert client.receive(0.05) is None
        assert time.monotonic() - started < 2
    assert time.monotonic() - started < 3


def test_a_server_that_does_not_serve() -> None:
    with open_server() as server, open_client(server.address) as client, pytest.raises(CommunicationError) as caught:
        client.request(Directive("stop"), timeout_s=0.3)
    assert "does not answer our handshake" in str(caught.value)


def test_no_reply() -> None:
    with (
        open_server() as server,
        serving(server),
        open_client(server.address) as client,
        pytest.raises(CommunicationError, match=rf"no reply to Directive from {server.address} within 0\.2 s$"),
    ):
        client.request(Directive("stop"), timeout_s=0.2)


def test_a_request_fails_as_soon_as_the_server_dies_and_the_client_finds_the_next_one() -> None:
    server = open_server()
    with open_client(server.address) as client:
        with serving(server) as received:
            client.send(Heartbeat(0), timeout_s=5)
            until(lambda: received)
        closer = threading.Timer(0.1, server.close)
        closer.start()
        started = time.monotonic()
        with pytest.raises(CommunicationError, match="was lost before the reply came"):
            client.request(Directive("stop"), timeout_s=20)
        assert time.monotonic() - started < 5
        closer.join()
        second = open_server(server.address, incarnation=2)
        with second, serving(second, lambda received: second.reply(received, Accepted("b")) and None):
            assert client.request(Directive("stop"), timeout_s=10).message == Accepted("b")


def test_a_client_that_is_gone_is_named() -> None:
    with open_server() as server:
        with serving(server) as received, open_client(server.address) as client:
            client.send(Bye(), timeout_s=5)
            until(lambda: received)
        peer = received[0].peer

        def is_gone() -> bool:
            try:
                server.send(peer, Heartbeat(0))
            except CommunicationError as error:
                return "worker-0 is no longer connected to" in str(error)
            server.receive(0)
            return False

        until(is_gone)
        with pytest.raises(CommunicationError, match="nobody is no longer connected"):
            server.send(Peer(b"12345", "nobody"), Heartbeat(0))


def test_a_client_that_does_not_read_stalls_nobody() -> None:
    block = np.zeros(1 << 20, np.float32)
    with open_server() as server, serving(server) as received, open_client(server.address, "slow") as slow:
        slow.send(Heartbeat(0), timeout_s=5)
        until(lambda: received)
        started = time.monotonic()
        with pytest.raises(CommunicationError, match="slow does not read: 10 messages wait"):
            for _ in range(200):
                server.send(received[0].peer, Heartbeat(0), [block])
        with open_client(server.address, "quick") as quick:
            quick.send(Heartbeat(1), timeout_s=5)
            until(lambda: len(received) == 2)
            server.send(received[1].peer, Directive("pause"))
            assert quick.receive(5) is not None
        assert time.monotonic() - started < 10


def test_a_server_that_does_not_read_stalls_a_client_only_until_its_deadline() -> None:
    block = np.zeros(1 << 20, np.float32)
    with open_server() as server, open_client(server.address) as client:
        with serving(server) as received:
            client.send(Heartbeat(0), timeout_s=5)
            until(lambda: received)
        with pytest.raises(CommunicationError, match=r"within 0\.05 s: 10 messages wait and it does not read"):
            for _ in range(200):
                client.send(Heartbeat(0), [block], timeout_s=0.05)
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 2


def test_threads_may_send_while_another_receives() -> None:
    with open_server() as server:

        def answer(received: Received) -> None:
            if isinstance(received.message, Directive):
                server.reply(received, Accepted("b"))

        with serving(server, answer) as received, open_client(server.address) as client:
            is_over = threading.Event()

            def beat() -> None:
                while not is_over.is_set():
                    client.send(Heartbeat(0), timeout_s=5)
                    time.sleep(0.0002)

            threads = [threading.Thread(target=beat) for _ in range(2)]
            for thread in threads:
                thread.start()
            slowest_s = 0.0
            for _ in range(300):
                started = time.monotonic()
                client.request(Directive("stop"), timeout_s=10)
                slowest_s = max(slowest_s, time.monotonic() - started)
            is_over.set()
            for thread in threads:
                thread.join()
            assert slowest_s < 2
            until(lambda: len(received) == client._sequence)
            assert server.refusals == {}


def test_a_sender_that_takes_the_signal_of_a_message_away_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        client.send(Heartbeat(0), timeout_s=5)
        until(lambda: received)
        wait = client._wait

        def send_before_waiting(remaining_s: float) -> None:
            monkeypatch.setattr(client, "_wait", wait)
            server.send(received[0].peer, Directive("pause"))
            time.sleep(0.1)  # the message is there, and the descriptor says so
            client.send(Heartbeat(1), timeout_s=5)
            wait(remaining_s)

        monkeypatch.setattr(client, "_wait", send_before_waiting)
        started = time.monotonic()
        message = client.receive(5)
        assert message is not None
        assert message.message == Directive("pause")
        assert time.monotonic() - started < 2


def test_waiting_costs_no_processor_time() -> None:
    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        client.send(Heartbeat(0), timeout_s=5)
        until(lambda: received)
        started = time.process_time()
        assert client.receive(0.5) is None
        assert time.process_time() - started < 0.1


def test_two_receivers_are_an_error_and_close_ends_a_wait() -> None:
    with open_server() as server:
        errors: list[str] = []

        def wait() -> None:
            try:
                server.receive(20)
            except CommunicationError as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: server._is_waiting)
        with pytest.raises(CommunicationError, match="two threads receive"):
            server.receive(1)
        started = time.monotonic()
        server.close()
        thread.join()
        assert time.monotonic() - started < 2
        assert errors == [f"the channel {server.address} is closed"]
        with pytest.raises(CommunicationError, match="is closed"):
            server.receive(0)
        server.close()


def test_a_message_interrupted_half_way_ends_the_channel() -> None:
    class Interrupted(zmq.Socket[bytes]):
        def send(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            if len(data) == 8:
                raise KeyboardInterrupt
            return super().send(data, *args, **kwargs)

    with open_server() as server, serving(server) as received, open_client(server.address) as client:
        client.send(Heartbeat(0), timeout_s=5)
        client._socket.__class__ = Interrupted
        with pytest.raises(KeyboardInterrupt):
            client.send(Heartbeat(1), [np.zeros(1)], timeout_s=5)
        with pytest.raises(CommunicationError, match="interrupted within a message"):
            client.send(Heartbeat(2), timeout_s=5)
        until(lambda: received)
    assert len(received) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_channel_and_does_not_break_it() -> None:
    with open_server() as server, open_client(server.address) as client:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.send(Heartbeat(0), timeout_s=1)
            except CommunicationError as error:
                code = 0 if "opened before a fork" in str(error) else 2
            client.close()
            server.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with serving(server) as received:
            client.send(Heartbeat(0), timeout_s=5)
            until(lambda: received)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("inproc://x", "no address of a channel"),
        ("udp://127.0.0.1:1", "no address of a channel"),
        ("127.0.0.1:1", "no address of a channel"),
        ("tcp://", "no address of a channel"),
        ("tcp://127.0.0.1:99999", "no port from 0 to 65535"),
        ("ipc:///" + "x" * 200, "longer than the 107 bytes"),
        ("tcp://no-such-interface:*", "cannot listen at"),
        ("ipc:///no/such/folder/s", "cannot listen at"),
    ],
)
def test_addresses_that_are_none(address: str, message: str) -> None:
    with pytest.raises(CommunicationError, match=message):
        open_server(address)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.0.0.1", "eth0", "[::]", "128.0.0.1", "localhost.example.com"])
def test_without_encryption_nothing_leaves_the_host(host: str) -> None:
    with pytest.raises(CommunicationError, match="without encryption must not"):
        open_server(f"tcp://{host}:*", curve=False)
    with pytest.raises(CommunicationError, match="without encryption must not"):
        open_client(f"tcp://{host}:1234", curve=False)


def test_a_name_that_cannot_be_sent_is_an_error_at_once() -> None:
    with pytest.raises(CommunicationError, match="cannot speak on a channel"):
        open_client("tcp://127.0.0.1:1", "x" * 129)


def test_encryption_must_be_turned_off_on_purpose_and_a_port_in_use_is_an_error() -> None:
    with pytest.raises(CommunicationError, match="needs keys"):
        ServerChannel(LOOPBACK, Speaker(run="r", name="s", incarnation=1), CODEC, None)
    with (
        open_server() as server,
        pytest.raises(CommunicationError, match=f"cannot listen at {server.address}: .*in use"),
    ):
        open_server(server.address)


def test_the_transport_itself_has_the_limits() -> None:
    with open_server() as server:
        assert LIMITS.max_frame_bytes <= server._socket.maxmsgsize <= LIMITS.max_frame_bytes + 64
        assert server._socket.sndhwm == server._socket.rcvhwm == LIMITS.max_queued
        assert server._socket.get(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert Limits().max_frame_bytes == 1 << 20


def await_links(number: int) -> dict[str, int]:
    """Return the bytes to so many other ends; a reply may arrive before who sent it has counted it."""
    found: dict[str, int] = {}
    deadline = time.monotonic() + 5.0
    while len(found) < number and time.monotonic() < deadline:
        for name, num_bytes in SENT.take_links().items():
            found[name] = found.get(name, 0) + num_bytes
    return found


def test_what_is_sent_is_counted_by_the_name_of_the_other_end() -> None:
    SENT.take_links()
    server = open_server()
    with serving(server, lambda received: server.reply(received, Accepted())):
        client = open_client(server.address, "worker-3/9f-1")
        client.request(Heartbeat(step=1), timeout_s=5.0)
        first = await_links(1)
        client.request(Heartbeat(step=2), [np.zeros(1000)], timeout_s=5.0)
        second = await_links(2)
        client.close()
    server.close()
    assert first.keys() == {"worker-3"}  # the client did not know its server's name before the answer
    assert second.keys() == {"worker-3", "coordinator"}
    assert 8000 < second["coordinator"] < 9000
