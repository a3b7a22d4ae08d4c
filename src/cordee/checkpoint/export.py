"""Weights for others to use: safetensors, a PyTorch state dict, or ONNX."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cordee.checkpoint.layout import lay_out, memory_of, write_layout
from cordee.checkpoint.reading import map_verified
from cordee.checkpoint.state import State, load_model_state
from cordee.checkpoint.writing import fsync_directory, reason_of
from cordee.core.errors import CheckpointError, JobError, MissingExtraError, ModelError, StorageError, nearest
from cordee.core.file_memory import FileMemory, give_back, zeros_strided

SUFFIXES = (".safetensors", ".pt", ".onnx")


def export(
    source: State | Path, target: Path, *, model: nn.Module | None = None, example: Tensor | None = None
) -> Path:
    """Write the model of a state, or of the checkpoint at a path, to `target`, in the format its suffix says.

    `.safetensors`  the weights by name; a tied weight once, as `safetensors.torch.load_model` expects it
    `.pt`           the state dict, for `model.load_state_dict(torch.load(target, weights_only=True))`
    `.onnx`         weights and computation; needs the `model` they belong to, which is left as it is, and an
                    `example` input, whose first dimension is the batch and stays free

    Local. A file that was there is replaced at once when the new one is complete, and stays on failure:
    JobError for another suffix, StorageError when it cannot be written, CheckpointError for a damaged
    checkpoint or one of another model, ModelError for a model that ONNX cannot express.
    """
    write = _writer(target, model, example)
    state = source if isinstance(source, State) else map_verified(source)
    weights = state.part("model").tensors
    if not weights:
        raise CheckpointError("there is no model in this state: none of its tensors is called 'model.…'")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            write(temporary, weights)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(target.parent)
    except OSError as error:
        raise StorageError(f"cannot export to {target}: {reason_of(error)}") from error
    return target


def _writer(
    target: Path, model: nn.Module | None, example: Tensor | None
) -> Callable[[Path, dict[str, Tensor]], object]:
    if target.suffix == ".safetensors":
        return lambda path, weights: write_layout(path, lay_out(weights))
    if target.suffix == ".pt":
        return _write_state_dict
    if target.suffix == ".onnx":
        if model is None or example is None:
            raise ModelError("ONNX holds the computation as well: export to it needs the model and an example input")
        return lambda path, weights: write_onnx(path, weights, model, example)
    raise JobError(
        f"cannot export to '{target.name}': the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        f"{nearest(target.suffix, SUFFIXES)}"
    )


def _write_state_dict(path: Path, weights: dict[str, Tensor]) -> None:
    # torch.save writes the whole storage behind a view; a copy, in a file if it is large, keeps the rest of it out.
    memory, copies = FileMemory(), dict[object, Tensor]()
    table = {}
    for name, tensor in weights.items():
        own = copies.get(memory_of(tensor), tensor.detach())
        if own.untyped_storage().nbytes() > own.nbytes:
            own = copies[memory_of(tensor)] = zeros_strided(tensor.shape, tensor.stride(), tensor, memory).copy_(own)
            give_back([tensor, own])
        table[name] = own
    with path.open("xb") as file:
        try:
            torch.save(table, file)
        except RuntimeError as error:  # torch's zip writer hides a full disk behind its own error
            raise OSError(None, f"torch.save failed: {error}") from error
        file.flush()
        os.fsync(file.fileno())


# ONNX export through torch's exporter, quietly.

_MAX_BYTES = (1 << 31) - (1 << 20)  # protobuf's limit, less what the graph takes


def write_onnx(path: Path, weights: Mapping[str, Tensor], model: nn.Module, example: Tensor) -> None:
    """Write the model with these weights, in evaluation mode, as one file with a free batch dimension.

    The graph has one input called "input" and one output called "output". `model` itself is not changed.
    Raises MissingExtraError without the packages, ModelError if the model cannot be expressed in ONNX.
    """
    if not all(importlib.util.find_spec(package) for package in ("onnx", "onnxscript")):
        raise MissingExtraError("ONNX export", "onnx")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    if num_bytes > _MAX_BYTES:
        raise ModelError(f"an ONNX file holds at most 2 GB, the weights have {num_bytes} bytes: use .safetensors")
    replica = copy.deepcopy(model).cpu().eval()
    load_model_state(replica, weights)
    # A batch of one would be taken for a constant.
    batch = example.detach().cpu()
    batch = batch if len(batch) > 1 else torch.cat([batch, batch])
    with _quiet():
        try:
            program = torch.onnx.export(
                replica,
                (batch,),
                dynamo=True,
                verbose=False,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
        except torch.onnx.OnnxExporterError as error:
            raise ModelError(f"{type(model).__name__} cannot be exported to ONNX: {_summary(error)}") from error
        assert program is not None
        program.save(path, external_data=False)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the exporter prints, logs and warns of about its own insides; errors pass."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


def _summary(error: BaseException) -> str:
    """Return the reason at the root of the exporter's stack of errors, in one line without colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
