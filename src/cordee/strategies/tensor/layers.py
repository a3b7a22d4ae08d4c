"""Layers that are slices of a model's own: how they are made, with DTensor, and whether they compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from cordee.compute import Computation
from cordee.core.errors import JobError
from cordee.models.slicing import Style

_TOLERANCE = 1e-3  # of outputs, relative to the largest: in bf16 a sum in another order differs by as much

_PAIRS = (
    "a layer of the style 'column' gives slices, which only a layer of the style 'row' takes, with nothing but "
    "element-wise functions between them; use 'gather' and 'scatter' where whole activations are needed"
)


def working_copy(model: nn.Module, plan: Mapping[str, Style]) -> nn.Module:
    """Return a copy of the model to be sliced; it has the very weights of the layers that slices will replace."""
    replaced = [parameter for name in plan for parameter in model.get_submodule(name).parameters(recurse=False)]
    return copy.deepcopy(model, {id(parameter): parameter for parameter in replaced})


def slice_model(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> nn.Module:
    """Replace the parameters of the planned layers by slices; tied weights stay tied. Collective over the mesh."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = [aliases for aliases in names.values() if len(aliases) > 1]
    styles = {name: _style(model.get_submodule(name), plan[name]) for name in plan}
    for style in styles.values():
        style.src_data_rank = None  # everybody has the whole: nothing is sent
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, kept)
    return model


def check_same(model: nn.Module, sliced: nn.Module, inputs: Tensor, computation: Computation) -> None:
    """Raise JobError unless the sliced model computes what the whole one does. Collective."""
    expected = compute_whole(model, inputs, computation)
    try:
        found = compute_whole(sliced, inputs, computation)
    except Exception as error:  # shapes that do not fit: everybody has the same
        raise misfit(error) from error
    refuse_difference(expected, found, computation)


def compute_whole(model: nn.Module, inputs: Tensor, computation: Computation) -> Tensor:
    """Return what the model computes when it is evaluated; its mode stays what it is."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), computation.autocast():
            outputs: Tensor = model(inputs)
        return outputs.float()
    finally:
        model.train(was_training)


def misfit(error: Exception) -> JobError:
    """Return what to say of a sliced model that cannot compute."""
    problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    return JobError(f"strategy.plan does not fit the model ({problem}): {_PAIRS}")


def refuse_difference(expected: Tensor, found: Tensor, computation: Computation) -> None:
    """Raise JobError unless a sliced model's outputs are those of the whole one, up to rounding."""
    limit = _TOLERANCE if computation.precision == "fp32" else 30 * _TOLERANCE
    is_close = found.shape == expected.shape
    if not is_close or not (found - expected).abs().max() <= limit * expected.abs().max().clamp(min=1.0):
        raise JobError(f"strategy.plan changes what the model computes: {_PAIRS}")


def _style(layer: nn.Module, style: Style) -> ParallelStyle:
    is_embedding = isinstance(layer, nn.Embedding)
    if style in ("column", "gather"):
        gives = Replicate() if style == "gather" or is_embedding else Shard(-1)
        return ColwiseParallel(input_layouts=Replicate(), output_layouts=gives, use_local_output=True)
    takes = Replicate() if style == "scatter" or is_embedding else Shard(-1)
    return RowwiseParallel(input_layouts=takes, output_layouts=Replicate(), use_local_output=True)
