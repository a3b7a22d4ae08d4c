"""Calls through shared-memory channels and through channels, and what is refused in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cordee.communication.calls import Call, CallServer, Connection
from cordee.communication.calls.shm_channel import DATA_AT, REQUEST_LENGTH, ShmChannel
from cordee.communication.channel import RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import Message
from cordee.communication.shared_memory.segment import create_segment
from cordee.communication.wire import Limits, WireError, outgoing
from cordee.core.errors import CommunicationError

WAITING = 99  # for a call that takes as long as a test wants
LIMITS = Limits(max_buffers=4, max_buffer_bytes=1 << 24)


class Double(Message, frozen=True):
    is_generational = False

    number: int


gate = threading.Event()


def double(call: Call) -> None:
    assert isinstance(call.message, Double)
    if call.message.number == WAITING:
        gate.wait(10)
    if call.message.number < 0:
        call.refuse("negative", f"{call.message.number} is below zero")
        return
    call.reply(Double(2 * call.message.number), [2 * buffer.torch() for buffer in call.buffers])


@contextmanager
def connected(*, shared_memory: bool) -> Iterator[Connection]:
    server_keys, (client_keys,) = make_keys()
    is_over = threading.Event()
    server = CallServer(
        "tcp://127.0.0.1:*",
        Speaker(run="r", name="server", incarnation=1),
        [Double],
        server_keys,
        double,
        limits=LIMITS,
    )
    thread = threading.Thread(target=server.run, args=(is_over.is_set,))
    with server:
        thread.start()
        try:
            speaker = Speaker(run="r", name="client", incarnation=1)
            with Connection(
                server.address,
                speaker,
                [Double],
                client_keys,
                failure_timeout_s=5,
                limits=LIMITS,
                shared_memory=shared_memory,
            ) as connection:
                yield connection
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_calls_under_way_at_once_keep_their_own_replies(shared_memory: bool) -> None:
    with connected(shared_memory=shared_memory) as connection:
        assert connection.is_shared is shared_memory
        arrays = [np.full(50_000, number, np.float32) for number in range(4)]
        under_way = [
            connection.begin(Double(number), [array], reply_bytes=array.nbytes) for number, array in enumerate(arrays)
        ]
        for array in arrays:
            array.fill(-1)  # the buffers may change as soon as a call has begun
        for number in (2, 0, 3, 1):
            message, total = under_way[number].finish(lambda message, buffers: (message, buffers[0].numpy().sum()))
            assert message.number == 2 * number and total == 2 * number * 50_000
        with pytest.raises(RefusedError, match="-1 is below zero"):
            connection.call(Double(-1))
        assert connection.call(Double(4)).number == 8, "a refusal does no harm to the connection"


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_the_kinds_of_numbers_survive_a_channel_twice(dtype: torch.dtype) -> None:
    segment, _ = create_segment(DATA_AT + 4096, "a test")
    client, server = ShmChannel(segment, is_client=True), ShmChannel(segment, is_client=False)
    for sent in (torch.tensor([[1, 0, 1]]).to(dtype), torch.tensor([[0, 1, 1]]).to(dtype)):
        client.write(b"\x90", outgoing([sent]))
        _, (buffer,) = server.read()
        assert torch.equal(buffer.torch(), sent)


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    segment, _ = create_segment(DATA_AT + 4096, "a test")
    client, server = ShmChannel(segment, is_client=True), ShmChannel(segment, is_client=False)
    with pytest.raises(WireError, match="4160 bytes do not fit into a shared-memory channel of 4096"):
        client.write(b"\x90", outgoing([np.zeros(4097, np.uint8)]))
    client.write(b"\x90", outgoing([np.zeros(16, np.uint8)]))
    large = outgoing([np.zeros(1 << 20, np.uint8)])
    client.write(b"\x90", large._replace(views=[], extent=0))
    with pytest.raises(WireError, match="describes 1048576 bytes in a shared-memory channel of 4096"):
        server.read()
    client.words[REQUEST_LENGTH] = 1 << 40
    with pytest.raises(WireError, match="says that its header has 1099511627776 bytes"):
        server.read()
    client.words[REQUEST_LENGTH] = 3
    client.words[REQUEST_LENGTH + 1] = 7
    with pytest.raises(WireError, match="has 3 bytes, 7 of them for buffers"):
        server.read()


def test_a_closed_connection_says_so() -> None:
    with connected(shared_memory=True) as connection:
        connection.close()
        with pytest.raises(CommunicationError, match=r"the connection to tcp://.* is closed"):
            connection.call(Double(1))


def test_a_connection_that_another_thread_closes_ends_the_calls_under_way() -> None:
    """Of several threads that wait for a server that dies, the first to notice closes the connection of all."""
    gate.clear()
    with connected(shared_memory=True) as connection:
        under_way = connection.begin(Double(WAITING))
        closing = threading.Timer(0.3, connection.close)
        closing.start()
        try:
            with pytest.raises(CommunicationError, match="clos"):
                under_way.finish()
        finally:
            gate.set()
            closing.join()
