"""The codec: what goes in comes out, and whatever else comes in is a WireError."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.communication.messages import COORDINATION, Accepted, Directive, Join, Member, Message, Refused
from cordee.communication.wire import PROTOCOL_VERSION, Codec, Envelope, Limits, WireError, outgoing
from cordee.core.errors import CommunicationError

LIMITS = Limits(max_header_bytes=4096, max_buffers=3, max_buffer_bytes=1024)
CODEC = Codec(COORDINATION, LIMITS)


def frames_of(message: Message, arrays: list[Any] | None = None, codec: Codec = CODEC, **fields: Any) -> list[bytes]:
    specs, views, _, _ = outgoing(arrays or [])
    values: dict[str, Any] = {
        "version": PROTOCOL_VERSION, "run": "run", "sender": "worker-0", "incarnation": 1, "generation": 1,
        "sequence": 1, "reply_to": 0, "buffers": specs, "payload": codec.encode_message(message),
    }  # fmt: skip
    return [codec.encode_header(Envelope(**(values | fields))), *map(bytes, views)]


def decode(frames: list[bytes], codec: Codec = CODEC) -> tuple[Envelope, Message, list[Any]]:
    envelope = codec.decode_header(frames[0])
    buffers = codec.decode_buffers(envelope, [memoryview(frame) for frame in frames[1:]])
    message = codec.decode_message(envelope)
    return envelope, message, [buffer.torch() for buffer in buffers]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_message_comes_back_as_it_was_sent(data: st.DataObject) -> None:
    message = data.draw(st.one_of([st.from_type(kind) for kind in COORDINATION]))
    try:
        frames = frames_of(message)
    except WireError as error:
        assert "bytes" in str(error) or "cannot be sent" in str(error)  # larger than the limits of this test
        return
    envelope, received, _ = decode(frames)
    assert msgspec.msgpack.encode(received) == msgspec.msgpack.encode(message)
    assert (envelope.sender, envelope.sequence) == ("worker-0", 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6))
def test_random_bytes_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_changed_messages_are_messages_or_a_wire_error(edits: list[tuple[int, bytes, int]], target: int) -> None:
    frames = frames_of(
        Directive("new_generation", (Member("worker-0", "worker", "host", 0),), "joined"),
        [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True, False])],
    )
    for position, replacement, num_removed in edits:
        frame = frames[target]
        position %= len(frame) + 1
        frames[target] = frame[:position] + replacement + frame[position + num_removed :]
    try:
        envelope, message, tensors = decode(frames)
    except WireError:
        return
    assert isinstance(message, COORDINATION)
    assert [tuple(tensor.shape) for tensor in tensors] == [spec.shape for spec in envelope.buffers]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b""], id="empty"),
        pytest.param([b"\x99"], id="one byte"),
        pytest.param([bytes([0x99, PROTOCOL_VERSION]) + b"\x91" * 4000], id="nested deeply"),
        pytest.param([bytes([0x99, PROTOCOL_VERSION]) + b"\xdb\xff\xff\xff\xff"], id="text of 4 GB"),
        pytest.param([frames_of(Accepted("b"))[0] + b"\0"], id="trailing byte"),
        pytest.param([frames_of(Accepted("b"))[0][:-1]], id="cut"),
        pytest.param([frames_of(Accepted("b"))[0], b"1234"], id="a buffer nobody described"),
        pytest.param(frames_of(Accepted("b"), [np.zeros(4)])[:1], id="a buffer that is missing"),
        pytest.param([frames_of(Accepted("b"), [np.zeros(4)])[0], b"1234"], id="a buffer that is short"),
        pytest.param([msgspec.msgpack.encode([1, "r", "s", 1, 1, 1, 0, [], ["pickle", "x"]])], id="unknown type"),
        pytest.param([msgspec.msgpack.encode([1, "r", "s", -1, 1, 1, 0, [], ["goodbye", "x"]])], id="negative"),
        pytest.param([msgspec.msgpack.encode([1, "r", "", 1, 1, 1, 0, [], ["goodbye", "x"]])], id="no name"),
        pytest.param([msgspec.msgpack.encode([1, "r", "s", 1, 1, 1, 0, [], ["accepted", "x", 1]])], id="extra field"),
        pytest.param([b"\x99\x01\xa1r\xa1s\x01\x01\x01\x00\xdd\xff\xff\xff\xff\x92\xa7goodbye\xa1x"], id="4 G buffers"),
        pytest.param([b"\x99\x01\xa1r\xa1\xff\x01\x01\x01\x00\x90\x92\xa7goodbye\xa1x"], id="bad UTF-8"),
    ],
)
def test_broken_headers_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", [2**62, 2**62]),
        ("float32", [-1]),
        ("float32", [0, 2**40]),
        ("float32", [1] * 9),
        ("float32", [2**70]),
        ("float32", [1.5]),
        ("object", [1]),
        ("O", [1]),
        (5, [1]),
        ("float64", [129]),
    ],
)
def test_buffers_that_cannot_be_are_refused_from_their_description(dtype: Any, shape: list[Any]) -> None:
    header = [1, "r", "s", 1, 1, 1, 0, [[dtype, shape]], ["goodbye", "x"]]
    try:
        encoded = msgspec.msgpack.encode(header)
    except OverflowError:
        encoded = msgspec.msgpack.encode([*header[:7], [[dtype, [2**64 - 1]]], header[8]])
    with pytest.raises(WireError):
        CODEC.decode_header(encoded)


def test_a_header_of_another_version_says_so() -> None:
    header = bytearray(frames_of(Accepted("b"))[0])
    assert header[1] == PROTOCOL_VERSION  # where every version keeps it
    header[1] = PROTOCOL_VERSION + 1
    with pytest.raises(WireError, match=r"version 2: this side speaks version 1"):
        CODEC.decode_header(bytes(header))


def test_the_sender_learns_of_limits_and_types() -> None:
    with pytest.raises(WireError, match=r"at most 4096"):
        frames_of(Refused("r", "x" * 5000))
    with pytest.raises(WireError, match=r"4 buffers: at most 3"):
        frames_of(Accepted("b"), [np.zeros(1)] * 4)
    with pytest.raises(WireError, match=r"at most 1024"):
        frames_of(Accepted("b"), [np.zeros(1000)])
    with pytest.raises(WireError, match="Refused cannot be sent"):
        CODEC.encode_message(Refused("r", object()))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="Join cannot be sent"):
        CODEC.encode_message(Join(-1, "host"))
    with pytest.raises(WireError, match="Accepted does not belong"):
        Codec((Join,)).encode_message(Accepted("b"))


def test_another_service_brings_its_own_messages() -> None:
    class Push(Message, frozen=True):
        key: str

    codec = Codec((Push,), LIMITS)
    frames = frames_of(Push("weights"), [np.arange(4)], codec)
    assert decode(frames, codec)[1] == Push("weights")
    assert decode(frames_of(Refused("no"), codec=codec), codec)[1] == Refused("no")
    with pytest.raises(WireError):
        decode(frames)


def test_the_failure_type_is_a_communication_error() -> None:
    assert issubclass(WireError, CommunicationError)
