"""Throws bytes at the decoders of the wire format: they return a message or raise `WireError`, nothing else.

    python tests/fuzz/fuzz_wire.py -max_total_time=60 -max_len=4096 -rss_limit_mb=2048

Half of the inputs are frames themselves, the other half are edits of valid messages: the MessagePack decoder
is compiled and shows the fuzzer no coverage that would lead it there. Needs `pip install atheris`. What it
finds goes into tests/unit/communication/test_wire.py as a case of its own.
"""

from __future__ import annotations

import sys

import atheris
import numpy as np

with atheris.instrument_imports(include=["cordee.communication"]):
    from cordee.cluster.messages import TEAM, Event, WorkerSummary
    from cordee.communication.messages import (
        Accepted,
        Directive,
        Failure,
        Join,
        Joined,
        Member,
        Message,
    )
    from cordee.communication.wire import ITEM_BYTES, PROTOCOL_VERSION, Codec, Envelope, Limits, WireError, outgoing
    from cordee.monitoring import Summary
    from cordee.monitoring.events import Commit, Recovery

LIMITS = Limits(max_header_bytes=2048, max_buffers=3, max_buffer_bytes=1024)
CODEC = Codec(TEAM, LIMITS)


def frames_of(data: bytes) -> list[bytes]:
    provider = atheris.FuzzedDataProvider(data)
    if provider.ConsumeBool():
        return [
            provider.ConsumeBytes(provider.ConsumeIntInRange(0, 1200)) for _ in range(provider.ConsumeIntInRange(1, 6))
        ]
    frames = list(provider.PickValueInList(VALID))
    for _ in range(provider.ConsumeIntInRange(0, 6)):
        chosen = provider.ConsumeIntInRange(0, len(frames) - 1)
        frame = frames[chosen]
        position = provider.ConsumeIntInRange(0, len(frame))
        num_removed = provider.ConsumeIntInRange(0, 6)
        frames[chosen] = frame[:position] + provider.ConsumeBytes(6) + frame[position + num_removed :]
    return frames


def decode_one(data: bytes) -> None:
    frames = frames_of(data)
    try:
        envelope = CODEC.decode_header(frames[0])
        buffers = CODEC.decode_buffers(envelope, [memoryview(frame) for frame in frames[1:]])
        message = CODEC.decode_message(envelope)
    except WireError:
        return
    assert isinstance(message, TEAM)
    assert len(buffers) <= LIMITS.max_buffers
    for buffer in buffers:
        assert buffer.spec.dtype in ITEM_BYTES
        assert buffer.data.nbytes <= LIMITS.max_buffer_bytes
        if buffer.spec.dtype != "bfloat16":
            assert buffer.numpy().shape == buffer.spec.shape
    # What was accepted can be said again.
    CODEC.decode_message(CODEC.decode_header(encode(message, envelope.buffers)))


def encode(message: Message, specs: tuple[object, ...] = ()) -> bytes:
    return CODEC.encode_header(
        Envelope(
            version=PROTOCOL_VERSION,
            run="run",
            sender="worker-0",
            incarnation=1,
            generation=1,
            sequence=1,
            reply_to=0,
            buffers=specs,  # type: ignore[arg-type]
            payload=CODEC.encode_message(message),
        )
    )


SEEDS: list[tuple[Message, list[object]]] = [
    (Join(1, "host"), []),
    (Joined(5.0, 1.0), []),
    (Accepted("b"), [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True, False])]),
    (Event(Commit(step=1, epoch=0, batch=1, samples=8, digest={"model": "x"})), []),
    (Event(Recovery(lost=[1, 2], seconds=0.5)), []),
    (WorkerSummary(Summary(status="completed", staleness={"0": 1})), []),
    (Failure(3, "error", "traceback"), [np.zeros((0, 2), np.int64)]),
    (Directive("new_generation", (Member("w", "worker", "host", 0),), "why"), []),
]

VALID = []
for message, arrays in SEEDS:
    specs, views, _, _ = outgoing(arrays)
    VALID.append([encode(message, specs), *map(bytes, views)])


if __name__ == "__main__":
    atheris.Setup(sys.argv, decode_one)
    atheris.Fuzz()
