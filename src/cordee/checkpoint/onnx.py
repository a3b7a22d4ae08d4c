"""ONNX export through torch's exporter, quietly."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cordee.checkpoint.model import load_model_state
from cordee.core.errors import MissingExtraError, ModelError

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
