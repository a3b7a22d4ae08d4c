"""The IDX format of MNIST and Fashion-MNIST: a header with the dimensions, then unsigned bytes.

A file must be exactly as long as its header says. Anything else is an error that names the file and both
lengths: a truncated download must not become a smaller training set.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from cordee.core.errors import DataError

_UNSIGNED_BYTES = 0x08
_CHUNK_BYTES = 1 << 20
_ADVICE = "get the file again, or delete it and set data.download = true"


def read_idx(path: Path, num_dimensions: int) -> Tensor:
    """Return the uint8 array of an IDX file, plain or gzipped (told by its first bytes, not by its name).

    Raises DataError for anything that is not a whole IDX file of unsigned bytes with so many dimensions.
    """
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not is_gzipped:
                return _decode(file, path, num_dimensions)
            with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
                return _decode(unzipped, path, num_dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {_plain(error)}; {_ADVICE}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(file: BinaryIO | gzip.GzipFile, path: Path, num_dimensions: int) -> Tensor:
    header_bytes = 4 + 4 * num_dimensions
    header = file.read(header_bytes)
    magic = bytes([0, 0, _UNSIGNED_BYTES, num_dimensions])
    if header[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of {num_dimensions} dimension{'s' * (num_dimensions > 1)}: it starts with "
            f"{header[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')}; {_ADVICE}"
        )
    if len(header) < header_bytes:
        raise DataError(f"{path} is truncated: expected {header_bytes} bytes of header, found {len(header)}; {_ADVICE}")
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    num_bytes = math.prod(shape)
    content = _read_at_most(file, num_bytes + 1)
    if len(content) != num_bytes:
        expected = f"expected {header_bytes + num_bytes} bytes ({header_bytes} of header and {_times(shape)})"
        if len(content) > num_bytes:
            raise DataError(f"{path} is too long: {expected}, found more; {_ADVICE}")
        raise DataError(f"{path} is truncated: {expected}, found {header_bytes + len(content)}; {_ADVICE}")
    if num_bytes == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_at_most(file: BinaryIO | gzip.GzipFile, num_bytes: int) -> bytearray:
    # In chunks: what a header claims may be terabytes, and `read` would allocate them before reading.
    content = bytearray()
    while len(content) < num_bytes:
        chunk = file.read(min(_CHUNK_BYTES, num_bytes - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape)


def _plain(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__
