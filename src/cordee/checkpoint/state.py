"""What a checkpoint holds: named tensors and plain values, independent of workers and strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cordee.core.errors import CheckpointError
from cordee.core.file_memory import give_back


class State(NamedTuple):
    """Everything needed to continue training.

    A checkpoint's tensor names start with the part they belong to: "model.conv1.weight",
    "optimizer.conv1.weight.exp_avg". Each part becomes a file of its own. `values` holds whatever JSON can
    say; tuples come back as lists, and numbers that JSON lacks (NaN, infinity) come back as they were.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @classmethod
    def join(cls, **parts: State) -> State:
        """Return one state of several: tensor "x" of part "model" becomes "model.x", its values `values["model"]`."""
        tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.tensors.items()}
        return cls(tensors, {part: state.values for part, state in parts.items() if state.values})

    def part(self, name: str) -> State:
        """Return what `join` took in under `name`; empty if there is no such part."""
        prefix = f"{name}."
        tensors = {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}
        values = self.values.get(name, {})
        if not isinstance(values, dict):
            raise CheckpointError(f"the values of '{name}' are a {type(values).__name__}, not a table")
        return State(tensors, values)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the raw little-endian bytes of each tensor, in sorted order of the names.

    Names, shapes and dtypes are not hashed, only the bytes in row-major order; a weight that is known by two
    names counts twice. Equal digests of one model's weights mean equal weights, bit for bit.
    """
    digest = WeightsDigest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


class WeightsDigest:
    """The same, of tensors that are added one by one, in sorted order of their names."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        for chunk in chunks_of(name, tensor):
            self._digest.update(chunk)
        give_back([tensor])

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


# Small enough to stay in the cache between hashing and writing; on a 2-core host writing and hashing
# 400 MB was as fast with 1 to 8 MB.
CHUNK_BYTES = 4 << 20


def chunks_of(name: str, tensor: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's row-major bytes in pieces that are views of its memory where possible.

    Raises CheckpointError for a tensor that has no such bytes (sparse, quantized, meta, spread over workers).
    """
    raw = bytes_of(name, tensor)
    for start in range(0, len(raw), CHUNK_BYTES):
        yield raw[start : start + CHUNK_BYTES]


def bytes_of(name: str, tensor: Tensor) -> memoryview:
    """Return the same in one piece."""
    require_plain(name, tensor)
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # NumPy knows no bfloat16 or float8, hence the view as bytes.
    return dense.view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")


# Of a floating-point type: the mask that removes the sign, the first bits that are not finite, and the first of a NaN.
_NOT_FINITE = {
    torch.float64: (np.uint64, (1 << 63) - 1, 0x7FF << 52, (0x7FF << 52) + 1),
    torch.float32: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000, 0x7F80_0001),
    torch.complex64: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000, 0x7F80_0001),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00, 0x7C01),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80, 0x7F81),
    torch.float8_e5m2: (np.uint8, 0x7F, 0x7C, 0x7D),
    torch.float8_e4m3fn: (np.uint8, 0x7F, 0x7F, 0x7F),  # has no infinity
}


def is_sound(chunk: memoryview, dtype: torch.dtype, *, is_parameter: bool) -> bool:
    """Return whether these bytes of a tensor may be saved: numbers of a parameter are finite, others are no NaN.

    A mask of minus infinities is an ordinary buffer, and observers start from infinity. Computed without torch, whose
    kernels would bring their own threads to a thread that saves beside the training.
    """
    if dtype not in _NOT_FINITE:
        return True
    number, mask, not_finite, nan = _NOT_FINITE[dtype]
    bits = np.frombuffer(chunk, number)
    return bool((bits & number(mask)).max() < (not_finite if is_parameter else nan))


def require_plain(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError unless the tensor is dense, has its values here and all of them."""
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"'{name}' has no shape yet: pass one batch through the model first")
    if hasattr(tensor, "full_tensor"):
        raise CheckpointError(f"'{name}' is spread over several workers (a DTensor): gather it first")
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(f"'{name}' is a {kind} tensor: only dense tensors can be saved")


# A model's weights by name.


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name, detached; they share the model's memory.

    A tied weight is there under each of its names, as in `model.state_dict()`.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"'{name}' of {type(model).__name__} is a {type(value).__name__}: "
                "only tensors are saved, so get_extra_state must return one"
            )
        require_plain(name, value)
        tensors[name] = value.detach()
    return tensors


def buffer_names(model: nn.Module) -> set[str]:
    """Return the names in `model_state` that are not of parameters."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the model's parameters and buffers, in place.

    Raises CheckpointError, with the model unchanged, if a name is missing or unexpected or a shape or type differs.
    """
    own = model.state_dict()
    # Of an extra state its module decides what fits.
    is_open = {name for name, value in own.items() if name.rpartition(".")[2] == "_extra_state" or is_lazy(value)}
    kinds = {name: None if name in is_open else (value.dtype, value.shape) for name, value in own.items()}
    require_fit(kinds, tensors, type(model).__name__)
    try:
        model.load_state_dict(dict(tensors), strict=True)
    except RuntimeError as error:  # from a module with its own way of loading
        raise CheckpointError(f"the weights cannot be loaded into {type(model).__name__}: {error}") from error


def require_fit(
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]] | None], tensors: Mapping[str, Tensor], model: str
) -> None:
    """Raise CheckpointError unless there is a tensor for each name, of its type and shape where these are given."""
    problems = [f"'{name}' is missing" for name in kinds if name not in tensors]
    problems += [f"'{name}' is not in the model" for name in tensors if name not in kinds]
    for name, kind in kinds.items():
        if kind is None or name not in tensors:
            continue
        (dtype, shape), given = kind, tensors[name]
        if tuple(given.shape) != tuple(shape):
            problems.append(f"'{name}' has shape {tuple(given.shape)}, the model needs {tuple(shape)}")
        elif given.dtype != dtype:
            problems.append(f"'{name}' is {given.dtype}, the model needs {dtype}")
    if problems:
        raise CheckpointError(f"the weights do not fit {model}: {shortened(problems)}")


def shortened(problems: list[str], most: int = 8) -> str:
    """Return the problems as one text, without burying the first ones under hundreds."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
