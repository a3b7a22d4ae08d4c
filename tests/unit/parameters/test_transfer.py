"""What travels of a push: how many bytes, and what of it is added to the next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cordee.communication.wire import ARRAY_KINDS, Parcel
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters import transfer
from cordee.parameters.calls import CHANNEL_PIECE_BYTES, StoreCalls, Task
from cordee.parameters.messages import Cut, Done, Push
from cordee.parameters.shard import Shard
from cordee.parameters.transfer import Entry

LENGTH = 200_000  # of float32: four pieces of a channel


class Wire(StoreCalls):
    """Servers in this process, each with a part."""

    def __init__(self, entry: Entry, updater: str = "add") -> None:
        self.shards = [Shard() for _ in entry.cuts]
        self.num_bytes = 0
        self.error: Exception | None = None
        for shard, cut in zip(self.shards, entry.cuts, strict=True):
            shard.set_updater(updater, {"lr": 1.0} if updater == "sgd" else {})
            shard.create(entry.number, entry.key, entry.kind, (cut.stop - cut.start,), len(entry.cuts) > 1)

    def run(self, tasks: Sequence[Task]) -> None:
        if self.error is not None:
            raise self.error
        for task in tasks:
            push, parcel, shard = task.message, task.parcel, self.shards[task.server]
            assert isinstance(push, Push) and isinstance(parcel, Parcel)
            self.num_bytes += sum(view.nbytes for view in parcel.views)
            received = [
                torch.frombuffer(bytearray(view), dtype=getattr(torch, spec.dtype))
                for spec, view in zip(parcel.specs, parcel.views, strict=True)
            ]
            values = received[0]
            if push.encoding is not None:
                values = shard.decode(push.number, push.start, push.encoding, received)
            part = shard.push(push.number, "client", 1, push.sequence, push.start, values)
            task.receive(Done(part.version), ())

    def value(self) -> torch.Tensor:
        return torch.cat([shard.part(0).flat for shard in self.shards])


def made(kind: str = "float32") -> Entry:
    cuts = (Cut(0, 0, LENGTH // 2), Cut(1, LENGTH // 2, LENGTH))
    return Entry("w", 0, kind, (LENGTH,), cuts, CHANNEL_PIECE_BYTES)


def push(wire: Wire, entry: Entry, values: torch.Tensor, sequence: int) -> int:
    view = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy().data.cast("B")
    return transfer.push(wire, entry, view, sequence)


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "topk"])
def test_fewer_bytes_travel_and_what_is_left_out_comes_later(kind: str, compression: str) -> None:
    if (kind, compression) == ("bfloat16", "fp16"):
        pytest.skip("refused: they have 16 bits already")
    entry, dtype = made(kind), getattr(torch, kind)
    entry.compress(compression, 0.01)  # type: ignore[arg-type]
    wire, meant = Wire(entry), torch.zeros(LENGTH, dtype=torch.float64)
    for sequence in range(1, 6):
        values = torch.randn(LENGTH, generator=torch.Generator().manual_seed(sequence)).to(dtype)
        meant += values
        assert push(wire, entry, values, sequence) == sequence
    item = dtype.itemsize
    num_bytes = {"none": item, "fp16": 2, "int8": 1 + 4 / 1024, "topk": 0.01 * (4 + item)}[compression]  # of a value
    assert wire.num_bytes == pytest.approx(5 * LENGTH * num_bytes, rel=0.01)
    left = torch.cat([one.left for one in entry.feedback if one.left is not None] or [torch.zeros(LENGTH)])
    rounding = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.15}[kind]
    assert float((wire.value().double() + left.double() - meant).abs().max()) < rounding


def test_a_push_that_is_refused_leaves_nothing_behind_and_one_whose_fate_is_unknown_counts_as_sent() -> None:
    entry = made()
    entry.compress("topk", 0.01)
    wire, ones = Wire(entry), torch.ones(LENGTH)
    push(wire, entry, ones, 1)
    left = [one.left for one in entry.feedback]
    wire.error = StoreError("no")
    with pytest.raises(StoreError):
        push(wire, entry, ones, 2)
    assert all(one.left is before for one, before in zip(entry.feedback, left, strict=True))
    wire.error = CommunicationError("gone")
    with pytest.raises(CommunicationError):
        push(wire, entry, ones, 3)
    assert not any(one.left is before for one, before in zip(entry.feedback, left, strict=True))


def test_without_compression_the_next_push_brings_what_is_left() -> None:
    entry = made()
    entry.compress("topk", 0.25)
    wire, ones = Wire(entry), torch.ones(LENGTH)
    push(wire, entry, ones, 1)
    assert int(wire.value().sum()) == LENGTH // 4
    entry.compress("none", 0.01)
    push(wire, entry, ones, 2)
    assert torch.equal(wire.value(), 2 * ones)


def test_what_makes_no_sense_is_refused() -> None:
    for kind in sorted({*ARRAY_KINDS.values()} - {"float16", "float32", "float64"}):
        with pytest.raises(StoreError, match=f"key 'w' is {kind}"):
            made(kind).compress("topk", 0.01)
    with pytest.raises(StoreError, match="fp16' is for float32, float64, and key 'w' is float16"):
        made("float16").compress("fp16", 0.01)
    entry = made()
    entry.compress("fp16", 0.01)
    with pytest.raises(StoreError, match="not finite, or too large for compression 'fp16'"):
        push(Wire(entry), entry, torch.full((LENGTH,), 1e6), 1)
    with pytest.raises(StoreError, match="updater 'assign' keeps the last push to key 'w'"):
        push(Wire(entry, "assign"), entry, torch.ones(LENGTH), 1)
    push(wire := Wire(entry, "sgd"), entry, torch.ones(LENGTH), 1)
    assert np.unique(wire.value()).tolist() == [-1]
