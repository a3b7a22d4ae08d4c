from __future__ import annotations

import contextlib
import gzip
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.errors import DataError
from cordee.data.mnist import read_idx


def idx_bytes(array: torch.Tensor) -> bytes:
    header = bytes([0, 0, 8, array.dim()]) + struct.pack(f">{array.dim()}I", *array.shape)
    return header + array.numpy().tobytes()


IMAGES = torch.arange(5 * 4 * 3, dtype=torch.uint8).view(5, 4, 3)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_plain_and_gzipped(tmp_path, pack):
    path = tmp_path / "images"
    path.write_bytes(pack(idx_bytes(IMAGES)))
    assert torch.equal(read_idx(path, 3), IMAGES)


def test_no_items_are_an_empty_array(tmp_path):
    (tmp_path / "f").write_bytes(idx_bytes(torch.empty(0, 28, 28, dtype=torch.uint8)))
    assert read_idx(tmp_path / "f", 3).shape == (0, 28, 28)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(IMAGES)[:-1], r"truncated: expected 76 bytes \(16 of header and 5 × 4 × 3\), found 75"),
        (idx_bytes(IMAGES) + b"!", r"too long: expected 76 bytes .*, found more"),
        (idx_bytes(IMAGES)[:10], "truncated: expected 16 bytes of header, found 10"),
        (idx_bytes(IMAGES[0]), "starts with 00 00 08 02, expected 00 00 08 03"),
        (b"<html>not found</html>", "starts with 3c 68 74 6d"),
        (b"", "starts with nothing"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, r"truncated: expected \d+ bytes"),
        (gzip.compress(idx_bytes(IMAGES), mtime=0)[:-12], "is damaged"),
        (gzip.compress(idx_bytes(IMAGES)[:-1], mtime=0), "expected 76 bytes .* found 75"),
        (b"\x1f\x8bgarbage", "is damaged"),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*: No such file"):
        read_idx(tmp_path / "missing", 3)
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
        read_idx(tmp_path, 3)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\0\0\x08\x01", b"\0\0\x08\x03", b"\x1f\x8b\x08\0"]))
def test_random_bytes_give_an_array_or_a_data_error(tmp_path_factory, content, start):
    path = tmp_path_factory.mktemp("idx", numbered=True) / "f"
    path.write_bytes(start + content)
    for num_dimensions in (1, 3):
        with contextlib.suppress(DataError):
            assert read_idx(path, num_dimensions).dim() == num_dimensions
