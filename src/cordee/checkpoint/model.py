"""A model's weights by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cordee.checkpoint.state import require_plain
from cordee.core.errors import CheckpointError


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
    problems = [f"'{name}' is missing" for name in own if name not in tensors]
    problems += [f"'{name}' is not in the model" for name in tensors if name not in own]
    for name, value in own.items():
        is_extra = name.rpartition(".")[2] == "_extra_state"  # its module decides what fits
        if name not in tensors or is_extra or is_lazy(value):
            continue
        given = tensors[name]
        if given.shape != value.shape:
            problems.append(f"'{name}' has shape {tuple(given.shape)}, the model needs {tuple(value.shape)}")
        elif given.dtype != value.dtype:
            problems.append(f"'{name}' is {given.dtype}, the model needs {value.dtype}")
    if problems:
        raise CheckpointError(f"the weights do not fit {type(model).__name__}: {shortened(problems)}")
    try:
        model.load_state_dict(dict(tensors), strict=True)
    except RuntimeError as error:  # from a module with its own way of loading
        raise CheckpointError(f"the weights cannot be loaded into {type(model).__name__}: {error}") from error


def shortened(problems: list[str], most: int = 8) -> str:
    """Return the problems as one text, without burying the first ones under hundreds."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
