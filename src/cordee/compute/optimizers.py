"""Optimizers by name: everything in `torch.optim`, or the user's own."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cordee.compute.averaging import keep_averages
from cordee.compute.parameter_groups import GroupRule, divide, read_groups, require_matches
from cordee.compute.schedules import Factor, PlateauSchedule, Schedule, TorchSchedule
from cordee.core.errors import JobError, nearest
from cordee.core.references import Use, bind, first_parameters, name_of, resolve

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


@dataclasses.dataclass(frozen=True)
class OptimizerRecipe:
    """Makes optimizers and sets their rate: the strategy decides where one lives and over which parameters."""

    build: Callable[[list[tuple[str, Tensor]]], Optimizer]
    schedule: Schedule
    lr_factor: float  # from training.lr_scale
    rules: tuple[GroupRule, ...] = ()  # of optimizer.groups
    average_decay: float = 0.0  # of the moving average of the weights; 0: there is none
    groups: tuple[Mapping[str, Any], ...] = ()  # settings of the groups of the whole model, once it is known

    def make(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        optimizer = self.build(trainable)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        if self.average_decay:
            keep_averages(optimizer, self.average_decay)
        return optimizer

    def fit(self, model: nn.Module) -> OptimizerRecipe:
        """Return the recipe for optimizers of this model. Raises JobError for what does not fit its parameters."""
        require_matches(self.rules, model)
        groups = settings_of_groups(self.make(model.named_parameters()))
        if isinstance(self.schedule, TorchSchedule | PlateauSchedule):
            self.schedule.fit(groups)
        return dataclasses.replace(self, groups=groups)

    def for_parts_of(self, model: nn.Module) -> OptimizerRecipe:
        """Return a recipe for optimizers of some of the model's parameters, or of slices, by the same names.

        Each parameter has the group, and so the settings, that it has in the optimizer of the whole model: a function
        of the user's may tell parameters apart by their shape or their place among the others.
        """
        of_whole = self.make(model.named_parameters())

        def build(named_parameters: list[tuple[str, Tensor]]) -> Optimizer:
            optimizer = self.build(named_parameters)
            _group_as_whole(optimizer, named_parameters, of_whole, model)
            return optimizer

        return dataclasses.replace(self, build=build)

    def set_rate(self, optimizer: Optimizer, step: int) -> float:
        """Set the rate for `step` and return that of the first group."""
        if isinstance(self.schedule, TorchSchedule | PlateauSchedule):
            settings = self.schedule.settings(step)
            numbers = getattr(optimizer, _NUMBERS, None) or range(len(settings))
            for number, group in zip(numbers, optimizer.param_groups, strict=True):
                group.update(settings[number], lr=settings[number]["lr"] * self.lr_factor)
        else:
            factor = self._factor(self.schedule, step)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        return float(optimizer.param_groups[0]["lr"])  # which may be a tensor

    def first_rate(self, step: int) -> float:
        """Return the rate of the whole model's first group at `step`; this worker may hold nothing of it."""
        if isinstance(self.schedule, TorchSchedule | PlateauSchedule):
            return float(self.schedule.settings(step)[0]["lr"]) * self.lr_factor
        return float(self.groups[0]["initial_lr"]) * self._factor(self.schedule, step)

    def _factor(self, schedule: Factor, step: int) -> float:
        """Return what the rates are multiplied by at `step`."""
        factor = schedule(step)
        try:
            is_sound = math.isfinite(factor)
        except TypeError:  # no number at all
            is_sound = False
        if not is_sound:
            raise JobError(
                f"the schedule gives {factor!r} for step {step}: it must give a finite number, the factor of the rate"
            )
        return factor * self.lr_factor


_NUMBERS = "cordee_group_numbers"  # on an optimizer of parts: which groups of the whole model's it has


def settings_of_groups(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """Return the settings of each group, plain values only."""
    plain = (bool, int, float, str, tuple, list, type(None))
    return tuple(
        {
            key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params" and isinstance(value, (*plain, Tensor))
        }
        for group in optimizer.param_groups
    )


def number_groups(optimizer: Optimizer, model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's group, by every name that the parameter has in the model."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = model.named_parameters(remove_duplicate=False)
    return {name: group_of[id(p)] for name, p in named if id(p) in group_of}


def _group_as_whole(
    optimizer: Optimizer, held: Iterable[tuple[str, Tensor]], of_whole: Optimizer, model: nn.Module
) -> None:
    number_of = number_groups(of_whole, model)
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in held:
        if (id(parameter) in taken) != (name in number_of):
            raise JobError(
                f"the optimizer chooses parameters by their shape or place, and takes '{name}' of the model and not of "
                "a part of it, or the other way round: freeze what is not to be trained (requires_grad_(False))"
            )
    own = [(name, parameter) for name, parameter in held if id(parameter) in taken]
    held_of = {
        number: members
        for number in range(len(of_whole.param_groups))
        if (members := [parameter for name, parameter in own if number_of[name] == number])
    }
    optimizer.param_groups[:] = [{**of_whole.param_groups[at], "params": held} for at, held in held_of.items()]
    setattr(optimizer, _NUMBERS, list(held_of))


def make_optimizer_recipe(
    part: Use,
    schedule: Schedule,
    *,
    lr_scale: str,
    num_shares: int,
    python_path: Sequence[str] = (),
    section: str = "optimizer",
    average_decay: float = 0.0,
) -> OptimizerRecipe:
    """Return the recipe for the optimizer a job names; its settings are checked here, before any model exists.

    `section` is where the job names it.
    """
    known = builtin_optimizers()
    use = part.use.lower() if isinstance(part.use, str) and ":" not in part.use else part.use
    target = resolve(section, use, known, python_path=python_path)
    if target is torch.optim.LBFGS:
        raise JobError(f"{section}.use = 'lbfgs' evaluates the model many times a step, which this trainer does not do")
    name, first = name_of(part.use), first_parameters(target, 1)
    args = {key: value for key, value in part.args.items() if key != "groups"}
    rules = read_groups(part.args["groups"]) if "groups" in part.args else ()
    bound = bind(section, target, args, first)
    if target in known.values():
        for key, settings in ((section, args), *((rule.key, rule.settings) for rule in rules)):
            _check_numbers(key, target, settings)
    # A user's own may make groups by name: it asks for names by what it calls its first parameter.
    wants_names = target not in known.values() and list(first) == ["named_parameters"]
    if wants_names and rules:
        raise JobError(f"optimizer {name!r} makes groups by the names that it gets: leave optimizer.groups out")
    can_fuse = target in known.values() and "fused" in inspect.signature(target).parameters
    # One kernel over all parameters instead of one per parameter and operation: LeNet with Adam takes
    # 226 instead of 1,246 µs in the optimizer (one thread, a busy 2-core host, 2026-11-15), with the same formula.
    wants_fused = can_fuse and not {"fused", "foreach", "capturable", "differentiable"} & set(args)

    def build(named_parameters: list[tuple[str, Tensor]]) -> Optimizer:
        parameters = [parameter for _, parameter in named_parameters]
        if not parameters:
            raise JobError("the model has no parameters to train")
        fused: dict[str, Any] = {}
        if wants_fused and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters):
            fused = {"fused": True}
        given: Any = named_parameters if wants_names else parameters
        if rules:
            given = [
                {"params": [parameter for _, parameter in members], **(rule.settings if rule else {})}
                for rule, members in divide(named_parameters, rules)
            ]
        try:
            built = bound(given, **fused)
        except Exception as error:
            if "empty parameter list" in str(error):
                raise JobError(
                    f"optimizer {name!r} takes none of {_some(named_parameters)}. Some strategies make an "
                    "optimizer for each part of a model: to leave parameters out, freeze them in the model "
                    "(requires_grad_(False))"
                ) from error
            raise JobError(f"optimizer {name!r} refused its settings {args}: {error}") from error
        if not isinstance(built, Optimizer):
            raise JobError(f"optimizer {name!r} makes a {type(built).__name__}, not a torch.optim.Optimizer")
        for rule in rules:
            _check_group(rule, built, bound)
        return built

    return OptimizerRecipe(build, schedule, LR_SCALES[lr_scale](num_shares), rules, average_decay)


def _check_group(rule: GroupRule, built: Optimizer, bound: Callable[..., Any]) -> None:
    """Raise JobError for settings of a group that the optimizer does not have, or would refuse for all parameters."""
    for key in rule.settings:
        if key not in built.defaults:
            known = [name for name in built.defaults if name != "params"]
            raise JobError(
                f"{rule.key} has no setting '{key}'{nearest(key, known)} (a group takes: {', '.join(sorted(known))})"
            )
    try:
        bound([torch.zeros(1, requires_grad=True)], **rule.settings)  # torch looks at no settings of groups
    except Exception as error:
        raise JobError(f"{rule.key} has settings that the optimizer refuses: {error}") from error


def _some(named_parameters: Sequence[tuple[str, Tensor]], num_shown: int = 3) -> str:
    shown = ", ".join(f"'{name}'" for name, _ in named_parameters[:num_shown])
    num_others = len(named_parameters) - num_shown
    return f"{shown} and {num_others} other parameters" if num_others > 0 else shown


def _check_numbers(section: str, target: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise JobError for text where torch's optimizer has a number; its own complaint names neither."""
    parameters = inspect.signature(target).parameters
    for key, value in args.items():
        has_number = key in parameters and type(parameters[key].default) in (int, float)
        if has_number and isinstance(value, (str, bool)):
            raise JobError(f"{section}.{key} = {value!r} does not fit: expected a number, got '{type(value).__name__}'")
