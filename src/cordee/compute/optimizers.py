"""Optimizers by name: everything in `torch.optim`, or the user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cordee.compute.schedules import Schedule
from cordee.core.errors import JobError
from cordee.core.references import Use, bind, name_of, resolve

LR_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda num_shares: 1.0,
    "linear": lambda num_shares: float(num_shares),
    "sqrt": lambda num_shares: num_shares**0.5,
}


def builtin_optimizers() -> dict[str, Callable[..., Optimizer]]:
    """Return all optimizers of this torch by their lower-case name."""
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }


@dataclass(frozen=True)
class OptimizerRecipe:
    """Makes optimizers and sets their rate: the strategy decides where one lives and over which parameters."""

    build: Callable[[list[tuple[str, Tensor]]], Optimizer]
    schedule: Schedule
    lr_factor: float  # from training.lr_scale

    def make(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        optimizer = self.build(trainable)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return optimizer

    def set_rate(self, optimizer: Optimizer, step: int) -> float:
        """Set the rate for `step` and return that of the first group."""
        factor = self._factor(step) * self.lr_factor
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        rate: float = optimizer.param_groups[0]["lr"]
        return rate

    def _factor(self, step: int) -> float:
        factor = self.schedule(step)
        try:
            is_sound = math.isfinite(factor)
        except TypeError:  # no number at all
            is_sound = False
        if not is_sound:
            raise JobError(
                f"the schedule gives {factor!r} for step {step}: it must give a finite number, the factor of the rate"
            )
        return factor


def make_optimizer_recipe(
    part: Use, schedule: Schedule, *, lr_scale: str, num_shares: int, python_path: Sequence[str] = ()
) -> OptimizerRecipe:
    """Return the recipe for the optimizer a job names; its settings are checked here, before any model exists."""
    known = builtin_optimizers()
    use = part.use.lower() if isinstance(part.use, str) and ":" not in part.use else part.use
    target = resolve("optimizer", use, known, python_path=python_path)
    if target is torch.optim.LBFGS:
        raise JobError("optimizer.use = 'lbfgs' evaluates the model many times a step, which this trainer does not do")
    bound = bind("optimizer", target, part.args, _first(target))
    if target in known.values():
        _check_numbers(target, part)
    # A user's own may make groups by name: it asks for names by what it calls its first parameter.
    wants_names = target not in known.values() and list(_first(target)) == ["named_parameters"]
    can_fuse = target in known.values() and "fused" in inspect.signature(target).parameters
    # One kernel over all parameters instead of one per parameter and operation: LeNet with Adam takes
    # 226 instead of 1,246 µs in the optimizer (one thread, a busy 2-core host, 2026-11-15), with the same formula.
    wants_fused = can_fuse and not {"fused", "foreach", "capturable", "differentiable"} & set(part.args)

    def build(named_parameters: list[tuple[str, Tensor]]) -> Optimizer:
        parameters = [parameter for _, parameter in named_parameters]
        if not parameters:
            raise JobError("the model has no parameters to train")
        fused: dict[str, Any] = {}
        if wants_fused and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters):
            fused = {"fused": True}
        try:
            built = bound(named_parameters if wants_names else parameters, **fused)
        except Exception as error:
            if "empty parameter list" in str(error):
                raise JobError(
                    f"optimizer {_name(part)!r} takes none of {_some(named_parameters)}. Some strategies make an "
                    "optimizer for each part of a model: to leave parameters out, freeze them in the model "
                    "(requires_grad_(False))"
                ) from error
            raise JobError(f"optimizer {_name(part)!r} refused its settings {dict(part.args)}: {error}") from error
        if not isinstance(built, Optimizer):
            raise JobError(f"optimizer {_name(part)!r} makes a {type(built).__name__}, not a torch.optim.Optimizer")
        return built

    return OptimizerRecipe(build, schedule, LR_SCALES[lr_scale](num_shares))


def _some(named_parameters: Sequence[tuple[str, Tensor]], num_shown: int = 3) -> str:
    shown = ", ".join(f"'{name}'" for name, _ in named_parameters[:num_shown])
    num_others = len(named_parameters) - num_shown
    return f"{shown} and {num_others} other parameters" if num_others > 0 else shown


def _check_numbers(target: Callable[..., Any], part: Use) -> None:
    """Raise JobError for text where torch's optimizer has a number; its own complaint names neither."""
    parameters = inspect.signature(target).parameters
    for key, value in part.args.items():
        has_number = key in parameters and type(parameters[key].default) in (int, float)
        if has_number and isinstance(value, (str, bool)):
            raise JobError(f"optimizer.{key} = {value!r} does not fit: expected a number, got '{type(value).__name__}'")


def _first(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the name of the parameter that the model's parameters are passed to, marked as given by us."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    return dict.fromkeys(names[:1], inspect.Parameter.empty)


def _name(part: Use) -> str:
    return part.use if isinstance(part.use, str) else name_of(part.use)
