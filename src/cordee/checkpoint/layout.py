"""The format of a checkpoint on the disk, and of each of its files.

    checkpoints/
      step-200/
        model.safetensors      one file per part of the state; names inside are without the part
        optimizer.safetensors
        values.json            the plain values
        manifest.json          format version, step, and size and SHA-256 of every other file; written last
      step-200.previous        a checkpoint that was being replaced when the process died
      .step-400.HOST.1234.0.tmp    being written, or deleted, by process 1234

The manifest also carries its own SHA-256 and must be encoded exactly as it is written here, so that a change
of any bit of a checkpoint is noticed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cordee.checkpoint.state import State, chunks_of, require_plain
from cordee.core.errors import CheckpointError
from cordee.core.file_memory import give_back
from cordee.version import __version__

Named = TypeVar("Named")

FORMAT = 1
MANIFEST = "manifest.json"
VALUES = "values.json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_VALUES_BYTES = 256 << 20
MAX_FILES = 64

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})(\.previous)?", re.ASCII)
_PART = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FLOAT = "$float"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of manifest.json."""

    format: int = FORMAT
    cordee: str = __version__
    step: int
    files: dict[str, Written]
    sha256: str = ""  # of this manifest with this field empty


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None if it is not the name of one."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def is_previous(path: Path) -> bool:
    return path.name.endswith(".previous")


def encode_manifest(step: int, files: Mapping[str, Written]) -> bytes:
    return _encoded(_signed(Manifest(step=step, files=dict(sorted(files.items())))))


def decode_manifest(content: bytes) -> Manifest:
    """Return the manifest if it is exactly what `encode_manifest` wrote; CheckpointError, without a path, if not."""
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"is of format {version}, this Cordée ({__version__}) reads format {FORMAT}: "
                "it was written by another version, or is damaged"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"is not a manifest: {error}") from None
    for name in manifest.files:
        if name != VALUES and part_of(name) is None:
            outside = ", outside of the checkpoint" if "/" in name or ".." in name else ""
            raise CheckpointError(f"lists a file {name!r}{outside}, which no checkpoint has")
    if VALUES not in manifest.files or len(manifest.files) > MAX_FILES:
        raise CheckpointError(f"lists {len(manifest.files)} files; '{VALUES}' and at most {MAX_FILES} must be there")
    for name, file in manifest.files.items():
        if file.num_bytes < 0 or not _SHA256.fullmatch(file.sha256):
            raise CheckpointError(f"gives '{name}' an impossible size or SHA-256")
    if manifest != _signed(manifest) or _encoded(manifest) != content:
        raise CheckpointError("does not match its own SHA-256")
    return manifest


def file_of(part: str) -> str:
    return f"{part}.safetensors"


def part_of(file_name: str) -> str | None:
    """Return the part of the state that a file holds, or None for a name that no such file has."""
    part = file_name.removesuffix(".safetensors")
    return part if part != file_name and _PART.fullmatch(part) else None


def split_by_part(tensors: Mapping[str, Named]) -> dict[str, dict[str, Named]]:
    """Return what there is of each part (tensors, say) by its name without the part."""
    parts: dict[str, dict[str, Named]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if not rest or not _PART.fullmatch(part):
            raise CheckpointError(
                f"the tensor name {name!r} must start with its part of the state, in lower case, as in 'model.{name}'"
            )
        parts.setdefault(part, {})[rest] = tensor
    if len(parts) >= MAX_FILES:
        raise CheckpointError(f"the state has {len(parts)} parts, a checkpoint holds at most {MAX_FILES - 1}")
    return parts


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Return values.json; CheckpointError names a value that JSON cannot say."""
    plain = _to_json(values, "values")
    try:
        content = msgspec.json.format(msgspec.json.encode(plain), indent=1)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"values hold a text that is not valid: {error}") from None
    if len(content) > MAX_VALUES_BYTES:
        raise CheckpointError(f"values take {len(content)} bytes as JSON; keep large ones as tensors")
    return content


def decode_values(content: bytes) -> dict[str, Any]:
    try:
        plain = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"is not a JSON table: {error}") from None
    return {key: _from_json(value) for key, value in plain.items()}


class _Version(msgspec.Struct, frozen=True):
    format: int


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2)


def _signed(manifest: Manifest) -> Manifest:
    bare = msgspec.structs.replace(manifest, sha256="")
    return msgspec.structs.replace(bare, sha256=hashlib.sha256(_encoded(bare)).hexdigest())


def _to_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise CheckpointError(f"{where} = {value} does not fit into 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [_to_json(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _FLOAT:
                raise CheckpointError(f"{where} has the key {key!r}: keys must be texts other than '{_FLOAT}'")
        return {key: _to_json(inner, f"{where}.{key}") for key, inner in value.items()}
    raise CheckpointError(f"{where} is a {type(value).__name__}: only what JSON can say can be saved as a value")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(inner) for inner in value]
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            if value[_FLOAT] not in ("nan", "inf", "-inf"):
                raise CheckpointError(f"holds the number {value[_FLOAT]!r}, which is none")
            return float(value[_FLOAT])
        return {key: _from_json(inner) for key, inner in value.items()}
    return value


# Safetensors files: written in one pass that also hashes, read from bytes that were already verified.
#
# The library's own writer cannot hash while it writes: up to 100 MB that costs nothing, with 400 MB writing and hashing
# took 1.6 times as long (docs/decisions/0030). Reading is left to the library, which checks the header.

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
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
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
    aliases: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    first_names: dict[object, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        require_plain(name, tensor)
        first = first_names.setdefault(memory_of(tensor), name)
        if first == name or name == "format" or tensor.numel() == 0:
            stored[name] = tensor
        else:
            aliases[name] = first
    header, starts = make_header({name: Kind(tensor.dtype, tensor.shape) for name, tensor in stored.items()}, aliases)
    return Layout(header, [(name, stored[name]) for name in starts])


class Kind(NamedTuple):
    """What a tensor is beside its numbers."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def make_header(stored: Mapping[str, Kind], aliases: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return what a safetensors file of these tensors begins with, and where in the file each of them starts, in order.

    `aliases` are other names of tensors that are stored.
    """
    for name, kind in stored.items():
        if kind.dtype not in _DTYPES:
            raise CheckpointError(f"'{name}' is of type {kind.dtype}, which safetensors cannot hold")
    if _METADATA in (*stored, *aliases):
        raise CheckpointError(f"a tensor cannot be called '{_METADATA}': safetensors uses that name itself")
    # Widest elements first keeps every tensor aligned to its element size.
    ordered = sorted(stored, key=lambda name: (-stored[name].dtype.itemsize, name))
    table: dict[str, object] = {_METADATA: {"format": "pt", **dict(sorted(aliases.items()))}}
    starts: dict[str, int] = {}
    end = 0
    for name in ordered:
        kind = stored[name]
        starts[name], end = end, end + kind.num_bytes
        offsets = [starts[name], end]
        table[name] = {"dtype": _DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": offsets}
    try:
        header = msgspec.json.encode(table)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor's name is not valid text: {error}") from None
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(stored)} tensors need a header of {len(header)} bytes, safetensors allows 10^8")
    header = len(header).to_bytes(8, "little") + header
    return header, {name: len(header) + start for name, start in starts.items()}


def encode_files(state: State) -> dict[str, Iterable[bytes | memoryview]]:
    """Return the files of a checkpoint but the manifest, each in pieces that are views of the tensors where possible.

    Raises CheckpointError for a state that cannot be saved.
    """
    layouts = {file_of(part): lay_out(tensors) for part, tensors in split_by_part(state.tensors).items()}
    return {**{name: _pieces_of(layout) for name, layout in layouts.items()}, VALUES: [encode_values(state.values)]}


def _pieces_of(layout: Layout) -> Iterator[bytes | memoryview]:
    yield layout.header
    for name, tensor in layout.tensors:
        yield from chunks_of(name, tensor)
        give_back([tensor])


def write_layout(path: Path, layout: Layout) -> Written:
    """Write a new file and bring it to the disk. OSError passes through."""
    return write_file(path, _pieces_of(layout))


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write the pieces to a new file, hash them on the way, and bring the file to the disk."""
    file = NewFile(path)
    try:
        for piece in pieces:
            file.append(piece)
        return file.sync()
    finally:
        file.close()


class NewFile:
    """A file that is written piece by piece, and hashed on the way. OSError passes through."""

    def __init__(self, path: Path) -> None:
        self._digest, self._num_bytes = hashlib.sha256(), 0
        # O_EXCL: the file is new, so no link that lies there can lead the writing elsewhere.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        self._digest.update(rest)
        self._num_bytes += len(rest)
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> Written:
        """Bring the file to the disk; return what it must be when it is read again, if nothing is added."""
        os.fsync(self._descriptor)
        return Written(self._num_bytes, self._digest.hexdigest())

    def resize(self, num_bytes: int) -> None:
        """Give the file its size; what was not added is written by others."""
        os.ftruncate(self._descriptor, num_bytes)

    def close(self) -> None:
        """Close the file as it is."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def parse(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file, each with memory of its own except names of one weight, which share it.

    Raises CheckpointError, without the name of the file, if the content is not a well-formed file.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
        header = msgspec.json.decode(content[8 : 8 + int.from_bytes(content[:8], "little")], type=_Header)
    except (safetensors.SafetensorError, msgspec.DecodeError, ValueError, KeyError) as error:
        raise CheckpointError(f"is not a safetensors file: {error}") from None
    _add_aliases(tensors, header.metadata)
    return tensors


def _add_aliases(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    for name, first in metadata.items():
        if name == "format":
            continue
        if name in tensors or first not in tensors:
            raise CheckpointError(f"says that '{name}' is '{first}', which does not fit its tensors")
        tensors[name] = tensors[first]


def parse_mapped(content: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a file whose bytes are `content`, as views of it. Otherwise like `parse`."""
    try:
        num_bytes = int.from_bytes(bytes(content[:8].numpy()), "little")
        if num_bytes > min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError(f"a header of {num_bytes} bytes")
        table = msgspec.json.decode(bytes(content[8 : 8 + num_bytes].numpy()), type=dict[str, dict[str, Any]])
        metadata = table.pop(_METADATA, {})
        tensors: dict[str, Tensor] = {}
        for name, entry in table.items():
            start, end = (8 + num_bytes + int(offset) for offset in entry["data_offsets"])
            kind = Kind(_TYPES[entry["dtype"]], [int(size) for size in entry["shape"]])
            if not 8 + num_bytes <= start <= end <= len(content) or end - start != kind.num_bytes:
                raise ValueError(f"'{name}' does not fit its bytes")
            tensors[name] = content[start:end].view(kind.dtype).view(kind.shape)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"is not a safetensors file: {error}") from None
    _add_aliases(tensors, metadata)
    return tensors


class _Header(msgspec.Struct, frozen=True, rename={"metadata": _METADATA}):
    metadata: dict[str, str] = {}


def memory_of(tensor: Tensor) -> object:
    """Return what two names of one weight have in common."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
