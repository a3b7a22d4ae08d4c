"""Safetensors files: written in one pass that also hashes, read from bytes that were already verified.

The library's own writer cannot hash while it writes: up to 100 MB that costs nothing, with 400 MB writing and hashing
took 1.6 times as long (docs/decisions/0030). Reading is left to the library, which checks the header.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cordee.checkpoint.state import chunks_of, require_plain
from cordee.core.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones


class Written(msgspec.Struct, frozen=True, rename={"num_bytes": "bytes"}, forbid_unknown_fields=True):
    """What a file must be when it is read again."""

    num_bytes: int
    sha256: str


class Layout(msgspec.Struct, frozen=True):
    """The header of a safetensors file, and the tensors in the order in which their bytes follow it."""

    header: bytes
    tensors: list[tuple[str, Tensor]]


def lay_out(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the file that holds `tensors`. Nothing is copied or written.

    A weight known by several names is stored once; the other names are in the metadata, each with the name
    it stands for, which is where `safetensors.torch.save_model` puts them.
    """
    metadata = {"format": "pt"}
    stored: dict[str, Tensor] = {}
    first_names: dict[object, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        require_plain(name, tensor)
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"'{name}' is of type {tensor.dtype}, which safetensors cannot hold")
        if name == _METADATA:
            raise CheckpointError(f"a tensor cannot be called '{_METADATA}': safetensors uses that name itself")
        first = first_names.setdefault(memory_of(tensor), name)
        if first == name or name == "format" or tensor.numel() == 0:
            stored[name] = tensor
        else:
            metadata[name] = first
    # Widest elements first keeps every tensor aligned to its element size.
    ordered = sorted(stored.items(), key=lambda item: (-item[1].element_size(), item[0]))
    table: dict[str, object] = {_METADATA: metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    try:
        header = msgspec.json.encode(table)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor's name is not valid text: {error}") from None
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors need a header of {len(header)} bytes, safetensors allows 10^8")
    return Layout(len(header).to_bytes(8, "little") + header, ordered)


def write_layout(path: Path, layout: Layout) -> Written:
    """Write a new file and bring it to the disk. OSError passes through."""

    def pieces() -> Iterable[bytes | memoryview]:
        yield layout.header
        for name, tensor in layout.tensors:
            yield from chunks_of(name, tensor)

    return write_file(path, pieces())


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write the pieces to a new file, hash them on the way, and bring the file to the disk."""
    digest = hashlib.sha256()
    num_bytes = 0
    # O_EXCL: the file is new, so no link that lies there can lead the writing elsewhere.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            digest.update(rest)
            num_bytes += len(rest)
            while len(rest):
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(num_bytes, digest.hexdigest())


def parse(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file, each with memory of its own except names of one weight, which share it.

    Raises CheckpointError, without the name of the file, if the content is not a well-formed file.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
        header = msgspec.json.decode(content[8 : 8 + int.from_bytes(content[:8], "little")], type=_Header)
    except (safetensors.SafetensorError, msgspec.DecodeError, ValueError, KeyError) as error:
        raise CheckpointError(f"is not a safetensors file: {error}") from None
    for name, first in header.metadata.items():
        if name == "format":
            continue
        if name in tensors or first not in tensors:
            raise CheckpointError(f"says that '{name}' is '{first}', which does not fit its tensors")
        tensors[name] = tensors[first]
    return tensors


class _Header(msgspec.Struct, frozen=True, rename={"metadata": _METADATA}):
    metadata: dict[str, str] = {}


def memory_of(tensor: Tensor) -> object:
    """Return what two names of one weight have in common."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
