"""An optimizer's state by parameter name, so that order and grouping of the parameters may change.

Tensors are called "<parameter>.<key>". The values are:

    optimizer    the class
    groups       for each group its settings and its parameters, each with its shape
    state        for each parameter its state, with {"$tensor": name} where a tensor belongs
    extra        what an optimizer of the user's adds to its state dict
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cordee.checkpoint.state import State, shortened
from cordee.core.errors import CheckpointError
from cordee.core.file_memory import give_back

# How the arithmetic is carried out on this machine's device, not what it computes: the optimizer at hand decides.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "param_names")


class HasParameters(Protocol):
    """A model, or what a worker holds of one."""

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...


def optimizer_state(optimizer: torch.optim.Optimizer, model: HasParameters) -> State:
    """Return the optimizer's state and settings by parameter name; tensors share the optimizer's memory.

    Raises CheckpointError for a parameter that is not the model's, and for state that cannot be saved.
    """
    names = _names_by_index(optimizer, model)
    table = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    groups = []
    for index, (group, live) in enumerate(zip(table["param_groups"], optimizer.param_groups)):
        settings = {key: value for key, value in group.items() if key not in ("params", *_IMPLEMENTATION)}
        shapes = {names[i]: list(p.shape) for i, p in zip(group["params"], live["params"])}
        groups.append({"parameters": shapes, "settings": pack_values(settings, f"$groups.{index}", tensors)})
    state = {}
    for index, inner in table["state"].items():
        if index not in names:
            raise CheckpointError(f"{_class(optimizer)} keeps state for {index!r}, which is not a parameter")
        state[names[index]] = pack_values(inner, names[index], tensors)
    extra = {key: value for key, value in table.items() if key not in ("state", "param_groups")}
    return State(
        tensors,
        {
            "optimizer": _class(optimizer),
            "groups": groups,
            "state": state,
            "extra": pack_values(extra, "$extra", tensors),
        },
    )


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: HasParameters, state: State) -> None:
    """Make the optimizer continue exactly where the saved one was. Its own parameters, order and groups stay.

    Raises CheckpointError, with the optimizer unchanged, if the saved state is of another optimizer, of
    other parameters, or of groups whose settings cannot be distinguished in the optimizer's groups.
    """
    values = state.values
    if not values:
        raise CheckpointError(
            "the checkpoint has no state of an optimizer: it is of rounds of clients, and only rounds continue from it"
        )
    try:
        if values["optimizer"] != _class(optimizer):
            raise CheckpointError(f"the optimizer state is of {values['optimizer']}, the job uses {_class(optimizer)}")
        saved_groups = [
            (dict(group["parameters"]), unpack_values(group["settings"], state.tensors)) for group in values["groups"]
        ]
        saved_state = {name: unpack_values(inner, state.tensors) for name, inner in values["state"].items()}
        extra = unpack_values(values["extra"], state.tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {type(error).__name__}: {error}") from error
    _check_parameters(optimizer, model, [shapes for shapes, _ in saved_groups])

    names = _names_by_index(optimizer, model)
    aliases = _aliases(model)
    settings_of = {aliases[name]: settings for shapes, settings in saved_groups for name in shapes}
    state_of = {aliases[name]: inner for name, inner in saved_state.items() if name in aliases}
    table = optimizer.state_dict()
    for group in table["param_groups"]:
        members = [names[index] for index in group["params"]]
        if not members:
            continue
        for other in members[1:]:
            if not _is_same(settings_of[other], settings_of[members[0]]):
                raise CheckpointError(
                    f"'{members[0]}' and '{other}' had different optimizer settings when the checkpoint was saved, "
                    "and are in one parameter group now"
                )
        group.update({key: _copied(value) for key, value in settings_of[members[0]].items()})
    table["state"] = {index: _copied(state_of[name]) for index, name in names.items() if name in state_of}
    table.update(extra)
    optimizer.load_state_dict(table)
    _restore_types(optimizer, {index: state_of[name] for index, name in names.items() if name in state_of})


def find_in_state(state: State, key: str) -> dict[str, Tensor]:
    """Return what an optimizer's state has under `key`, by the name of the parameter."""
    found = {name: inner[key] for name, inner in state.values["state"].items() if key in inner}
    return {name: state.tensors[packed["$tensor"]] for name, packed in found.items()}


def _class(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _names_by_index(optimizer: torch.optim.Optimizer, model: HasParameters) -> dict[int, str]:
    """Return the name of each parameter, by its number in the optimizer's state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        if id(parameter) not in names:
            raise CheckpointError(
                f"{_class(optimizer)} has a parameter of shape {tuple(parameter.shape)} "
                f"that is not one of {type(model).__name__}: its state cannot be saved by name"
            )
        found[index] = names[id(parameter)]
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _aliases(model: HasParameters) -> dict[str, str]:
    """Return for every name of a parameter, tied ones included, the name that `named_parameters` gives it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _check_parameters(
    optimizer: torch.optim.Optimizer, model: HasParameters, saved_groups: list[dict[str, list[int]]]
) -> None:
    aliases = _aliases(model)
    names = _names_by_index(optimizer, model)
    shapes = {name: list(parameter.shape) for name, parameter in zip(names.values(), _parameters(optimizer))}
    saved = {aliases.get(name, name): shape for group in saved_groups for name, shape in group.items()}
    problems = [f"'{name}' is missing" for name in shapes if name not in saved]
    problems += [f"'{name}' is not optimized" for name in saved if name not in shapes]
    problems += [
        f"'{name}' had shape {tuple(saved[name])}, has {tuple(shape)}"
        for name, shape in shapes.items()
        if saved.get(name, shape) != shape
    ]
    # Its curvature history is one vector over all parameters in their order.
    if isinstance(optimizer, torch.optim.LBFGS) and list(saved) != list(shapes):
        problems.append("LBFGS needs the parameters in the order in which they were saved")
    if problems:
        raise CheckpointError(f"the optimizer state does not fit the optimizer: {shortened(problems)}")


def _restore_types(optimizer: torch.optim.Optimizer, saved: dict[int, Any]) -> None:
    # load_state_dict casts state to the parameter's dtype. For a bfloat16 parameter that rounds what the
    # optimizer keeps in float32 (NAdam's mu_product, ASGD's eta), and the run continues with other numbers.
    for index, parameter in enumerate(_parameters(optimizer)):
        if index in saved:
            inner = optimizer.state[parameter]
            for key, value in saved[index].items():
                inner[key] = tree_map(_with_type_of, value, inner[key])


def _with_type_of(saved: Any, loaded: Any) -> Any:
    is_cast = isinstance(saved, Tensor) and loaded.dtype != saved.dtype
    return saved.to(loaded.device, copy=True) if is_cast else loaded


def pack_values(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON can say it, its tensors moved into `tensors` under names that start with `name`."""
    if isinstance(value, Tensor):
        if name in tensors:
            raise CheckpointError(f"two tensors are called '{name}'")
        tensors[name] = value.detach()
        return {"$tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [pack_values(inner, f"{name}.{index}", tensors) for index, inner in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Counter) and all(isinstance(key, int) for key in value):  # milestones of a MultiStepLR
        return {"$counter": sorted(value.elements())}
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: pack_values(inner, f"{name}.{key}", tensors) for key, inner in value.items()}
    raise CheckpointError(f"'{name}' is a {type(value).__name__}, which cannot be saved")


def unpack_values(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [unpack_values(inner, tensors) for inner in value]
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return tensors[value["$tensor"]]
        if value.keys() == {"$tuple"}:
            return tuple(unpack_values(inner, tensors) for inner in value["$tuple"])
        if value.keys() == {"$counter"}:
            return Counter(value["$counter"])
        return {key: unpack_values(inner, tensors) for key, inner in value.items()}
    return value


def _copied(value: Any) -> Any:
    """Return `value` with tensors of its own: the optimizer changes them in place."""
    return tree_map(lambda leaf: _copied_tensor(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _copied_tensor(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    give_back([tensor])
    return copied


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)
