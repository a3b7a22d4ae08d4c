"""The format of a checkpoint on the disk, without touching the disk.

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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from cordee.checkpoint.tensor_file import Written
from cordee.core.errors import CheckpointError
from cordee.version import __version__

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


def split_by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each part, named without it."""
    parts: dict[str, dict[str, Tensor]] = {}
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
