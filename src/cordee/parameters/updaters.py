"""What a server makes of pushes: adds them, keeps the last, or hands them to an optimizer or a user's function.

Functions come from modules that were named when the server started: clients name them, and never send code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from cordee.checkpoint import State, load_optimizer_state, optimizer_state
from cordee.communication.messages import Json
from cordee.compute import OptimizerRecipe
from cordee.compute.optimizers import builtin_optimizers, make_optimizer_recipe
from cordee.compute.schedules import PlateauSchedule, constant
from cordee.core.errors import JobError, StoreError, nearest
from cordee.core.importing import import_until_stopped
from cordee.core.references import Use, bind
from cordee.parameters.placement import ELEMENTWISE

if TYPE_CHECKING:
    from cordee.parameters.shard import Part

# Names of torch's optimizers that do the same on a part as on the whole.
_ON_PARTS = frozenset({"sparseadam", *map(str.lower, ELEMENTWISE)})

UpdateFunction = Callable[..., None]


class SliceOptimizer:
    """An optimizer of torch on slices of a server's values. Its state is by their names, as in checkpoints."""

    def __init__(self, recipe: OptimizerRecipe, slices: Iterable[tuple[str, Tensor]]) -> None:
        self._recipe = recipe
        self._parameters = [(name, nn.Parameter(values)) for name, values in slices]
        self._optimizer = recipe.make(self._parameters)
        self._fused = [group.get("fused") for group in self._optimizer.param_groups]

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The slices by their names, as a module would give them."""
        return iter(self._parameters)

    def set_rate(self, step: int, factor: float = 1.0, level: int = 0) -> None:
        """Use the rate of the schedule for `step`, times `factor`; `level` is that of one that follows a metric."""
        if isinstance(self._recipe.schedule, PlateauSchedule):
            self._recipe.schedule.level = level
        self._recipe.set_rate(self._optimizer, step)
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] *= factor

    def step(self, gradients: Iterable[Tensor | None], *, is_dense: bool = True) -> None:
        """Change the slices. One without a gradient is left alone: momentum and decay would move it."""
        for (_, parameter), gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, fused in zip(self._optimizer.param_groups, self._fused, strict=True):
            if fused:  # the fused kernels know no sparse gradients
                group["fused"] = is_dense
        try:
            # Said explicitly, or torch warns that sparse tensors, which some optimizers make of rows, are not checked.
            if not is_dense:
                torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        finally:
            for _, parameter in self._parameters:
                parameter.grad = None

    def dump(self) -> State:
        """Return the state of the optimizer; tensors share its memory."""
        return optimizer_state(self._optimizer, self)

    def restore(self, kept: State) -> None:
        load_optimizer_state(self._optimizer, self, kept)


class Updater(Protocol):
    """How pushes change a part. One serves many parts; what it keeps of a part is in `part.state`."""

    is_immediate: bool
    """Whether pieces of a push may be applied one by one as they come."""

    adds_up: bool
    """Whether what one push lacks may come with the next: compressed pushes are taken."""

    def check(self, part: Part) -> None:
        """Raise StoreError if this updater cannot work on the part."""

    def apply(self, part: Part, start: int, pushed: Tensor) -> None:
        """Apply elements from `start` of a push, flat; unless `is_immediate`, all of them in the part's shape."""

    def apply_rows(self, part: Part, rows: Tensor, pushed: Tensor) -> None:
        """Apply a push of some rows; a row that comes twice counts twice."""

    def dump(self, part: Part) -> State:
        """Return what is kept of the part, for a server that is to continue exactly here."""

    def restore(self, part: Part, kept: State) -> None:
        """Keep of the part what another did."""


class _Stateless:
    """Keeps nothing of a part, and can work on any."""

    is_immediate = True
    adds_up = True

    def check(self, part: Part) -> None:
        pass

    def dump(self, part: Part) -> State:
        return State({}, {})

    def restore(self, part: Part, kept: State) -> None:
        pass


class Add(_Stateless):
    """The default, as in ps-lite: values are summed."""

    def apply(self, part: Part, start: int, pushed: Tensor) -> None:
        if part.values.dtype == torch.bool:
            part.flat[start : start + pushed.numel()].logical_or_(pushed)
        elif pushed.numel() == part.length:
            part.flat.add_(pushed)
        else:
            part.flat[start : start + pushed.numel()].add_(pushed)

    def apply_rows(self, part: Part, rows: Tensor, pushed: Tensor) -> None:
        part.values.index_add_(0, rows, pushed)


class Assign(_Stateless):
    """The last push is the value."""

    adds_up = False

    def apply(self, part: Part, start: int, pushed: Tensor) -> None:
        part.flat[start : start + pushed.numel()].copy_(pushed)

    def apply_rows(self, part: Part, rows: Tensor, pushed: Tensor) -> None:
        part.values.index_copy_(0, rows, pushed)


class OptimizerUpdater:
    """Any optimizer of torch: a push is a gradient, and the optimizer's state stays on the server."""

    is_immediate = False
    adds_up = True

    def __init__(self, name: str, settings: Mapping[str, Json]) -> None:
        self._name = name
        try:
            self._recipe = make_optimizer_recipe(Use(name, **settings), constant(), lr_scale="none", num_shares=1)
            self._recipe.make([("probe", torch.zeros(1, 1, requires_grad=True))])
        except JobError as error:
            raise StoreError(f"set_updater: {error}") from error

    def check(self, part: Part) -> None:
        if not part.values.is_floating_point():
            raise StoreError(
                f"updater '{self._name}' needs floating-point values, and key '{part.key}' is "
                f"{str(part.values.dtype).removeprefix('torch.')}: give it one of its own first, "
                f"set_updater('add', keys='{part.key}') or 'assign'"
            )
        if part.is_cut and self._name not in _ON_PARTS:
            raise StoreError(
                f"updater '{self._name}' may look at whole arrays, and key '{part.key}' is cut over several servers: "
                f"use one server, or one of {', '.join(sorted(_ON_PARTS))}"
            )

    def apply(self, part: Part, start: int, pushed: Tensor) -> None:
        self._step(part, pushed, is_dense=True)

    def apply_rows(self, part: Part, rows: Tensor, pushed: Tensor) -> None:
        gradient = torch.sparse_coo_tensor(rows.unsqueeze(0), pushed, part.values.shape, check_invariants=True)
        self._step(part, gradient, is_dense=False)

    def dump(self, part: Part) -> State:
        return part.state["optimizer"].dump() if part.state else State({}, {})

    def restore(self, part: Part, kept: State) -> None:
        if kept.values:
            self._optimizer(part).restore(kept)

    def _optimizer(self, part: Part) -> SliceOptimizer:
        if not part.state:
            part.state["optimizer"] = SliceOptimizer(self._recipe, [(part.key, part.values)])
        optimizer: SliceOptimizer = part.state["optimizer"]
        return optimizer

    def _step(self, part: Part, gradient: Tensor, *, is_dense: bool) -> None:
        try:
            self._optimizer(part).step([gradient], is_dense=is_dense)
        except RuntimeError as error:
            raise StoreError(f"updater '{self._name}' cannot apply the push to key '{part.key}': {error}") from error


class FunctionUpdater:
    """A user's function: `update(value, pushed, state, **settings)` changes `value` in place."""

    is_immediate = False
    adds_up = True  # as far as can be told

    def __init__(self, name: str, function: UpdateFunction, settings: Mapping[str, Json]) -> None:
        self._name = name
        try:
            given = dict.fromkeys(list(inspect.signature(function).parameters)[:3], inspect.Parameter.empty)
            self._function = bind(f"updater '{name}'", function, settings, given)
        except JobError as error:
            raise StoreError(f"set_updater: {error}") from error
        except (TypeError, ValueError):  # a builtin without a signature
            self._function = functools.partial(function, **settings)

    def check(self, part: Part) -> None:
        pass

    def apply(self, part: Part, start: int, pushed: Tensor) -> None:
        try:
            self._function(part.values, pushed, part.state)
        except Exception as error:
            raise StoreError(
                f"updater '{self._name}' raised {type(error).__name__} on key '{part.key}': {error}"
            ) from error

    def dump(self, part: Part) -> State:
        tensors: dict[str, Tensor] = {}
        for name, value in part.state.items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif not isinstance(name, str) or not isinstance(value, (bool, int, float, str, type(None))):
                raise StoreError(
                    f"updater '{self._name}' keeps {name!r}, a {type(value).__name__}, of key '{part.key}': a follower "
                    "can be given numbers, texts and tensors only"
                )
        return State(tensors, {name: value for name, value in part.state.items() if name not in tensors})

    def restore(self, part: Part, kept: State) -> None:
        part.state = {**kept.values, **{name: tensor.clone() for name, tensor in kept.tensors.items()}}

    def apply_rows(self, part: Part, rows: Tensor, pushed: Tensor) -> None:
        whole = torch.zeros_like(part.values)
        whole.index_add_(0, rows, pushed)
        self.apply(part, 0, whole)


def load_functions(modules: Sequence[str]) -> dict[str, UpdateFunction]:
    """Import modules with update functions; return the functions by "module:name". Raises StoreError."""
    functions: dict[str, UpdateFunction] = {}
    for name in modules:
        try:
            module = import_until_stopped(name)
        except Exception as error:
            raise StoreError(f"--updaters {name}: importing it raised {type(error).__name__}: {error}") from error
        found = {
            f"{name}:{attribute}": value
            for attribute, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not attribute.startswith("_")
        }
        if not found:
            raise StoreError(f"--updaters {name}: the module has no functions of its own")
        functions |= found
    return functions


def make_updater(name: str, settings: Mapping[str, Json], functions: Mapping[str, UpdateFunction]) -> Updater:
    """Return the updater of this name. Raises StoreError for an unknown name or setting."""
    if name in ("add", "assign"):
        if settings:
            raise StoreError(f"set_updater: '{name}' has no settings, and got {', '.join(map(repr, settings))}")
        return Add() if name == "add" else Assign()
    if ":" in name:
        if name not in functions:
            known = f" (known: {', '.join(functions)})" if functions else ""
            raise StoreError(
                f"set_updater: the servers do not know {name!r}{nearest(name, functions)}{known}: start them with "
                f"--updaters {name.partition(':')[0]}"
            )
        return FunctionUpdater(name, functions[name], settings)
    optimizers = builtin_optimizers()
    if name.lower() not in optimizers:
        names = ["add", "assign", *optimizers]
        raise StoreError(
            f"set_updater: {name!r} is not known{nearest(name, names)} (known: {', '.join(names)}, 'module:function')"
        )
    return OptimizerUpdater(name.lower(), settings)
