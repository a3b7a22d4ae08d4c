"""Optimizers by name (everything in `torch.optim`, or the user's own) and learning-rate schedules."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cordee.core.errors import JobError
from cordee.core.references import Use, bind, construct, first_parameters, name_of, resolve

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

    def make(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        optimizer = self.build(trainable)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return optimizer

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
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return float(optimizer.param_groups[0]["lr"])  # which may be a tensor

    def factor(self, step: int) -> float:
        """Return what the rates are multiplied by at `step`."""
        factor = self.schedule(step)
        try:
            is_sound = math.isfinite(factor)
        except TypeError:  # no number at all
            is_sound = False
        if not is_sound:
            raise JobError(
                f"the schedule gives {factor!r} for step {step}: it must give a finite number, the factor of the rate"
            )
        return factor * self.lr_factor


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
    optimizer.param_groups[:] = [
        {**group, "params": members}
        for number, group in enumerate(of_whole.param_groups)
        if (members := [parameter for name, parameter in own if number_of[name] == number])
    ]


def make_optimizer_recipe(
    part: Use, schedule: Schedule, *, lr_scale: str, num_shares: int, python_path: Sequence[str] = ()
) -> OptimizerRecipe:
    """Return the recipe for the optimizer a job names; its settings are checked here, before any model exists."""
    known = builtin_optimizers()
    use = part.use.lower() if isinstance(part.use, str) and ":" not in part.use else part.use
    target = resolve("optimizer", use, known, python_path=python_path)
    if target is torch.optim.LBFGS:
        raise JobError("optimizer.use = 'lbfgs' evaluates the model many times a step, which this trainer does not do")
    name, first = name_of(part.use), first_parameters(target, 1)
    bound = bind("optimizer", target, part.args, first)
    if target in known.values():
        _check_numbers(target, part)
    # A user's own may make groups by name: it asks for names by what it calls its first parameter.
    wants_names = target not in known.values() and list(first) == ["named_parameters"]
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
                    f"optimizer {name!r} takes none of {_some(named_parameters)}. Some strategies make an "
                    "optimizer for each part of a model: to leave parameters out, freeze them in the model "
                    "(requires_grad_(False))"
                ) from error
            raise JobError(f"optimizer {name!r} refused its settings {dict(part.args)}: {error}") from error
        if not isinstance(built, Optimizer):
            raise JobError(f"optimizer {name!r} makes a {type(built).__name__}, not a torch.optim.Optimizer")
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


# How the learning rate changes: factors of the optimizer's rate as pure functions of the step.
#
# Steps are optimizer steps, whatever the number of workers or accumulated parts. Being functions of the step
# alone, schedules have no state to save, to lose, or to run too fast.

Schedule = Callable[[int], float]  # the step about to be taken, from 0, to the factor of the rate


def constant(*, warmup_steps: int = 0) -> Schedule:
    return _warmed_up(lambda step: 1.0, warmup_steps)


def cosine(*, total_steps: int | None = None, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Fall along half a cosine from 1 to `final`, from the end of the warm-up to the end of the run.

    `final` is what a step after the last would have.
    """
    length = _horizon("cosine", total_steps, warmup_steps)

    def factor(step: int) -> float:
        done = min(1.0, (step - warmup_steps) / length)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))

    return _warmed_up(factor, warmup_steps)


def linear(*, total_steps: int | None = None, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Fall in a straight line from 1 to `final`, from the end of the warm-up to the end of the run."""
    length = _horizon("linear", total_steps, warmup_steps)
    return _warmed_up(lambda step: 1.0 + (final - 1.0) * min(1.0, (step - warmup_steps) / length), warmup_steps)


def step(*, every_steps: int, factor: float = 0.1, warmup_steps: int = 0) -> Schedule:
    """Multiply by `factor` after each `every_steps` steps."""
    if every_steps < 1:
        raise JobError(f"schedule.every_steps = {every_steps} must be at least 1")
    return _warmed_up(lambda now: factor ** (now // every_steps), warmup_steps)


BUILTIN_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": step,
}


def make_schedule(part: Use, total_steps: int | None, python_path: Sequence[str] = ()) -> Schedule:
    """Return the schedule a job names; a user's own is a callable with settings that returns a function of
    the step. `total_steps` is None where the end is not known in advance.
    """
    name, target = name_of(part.use), resolve("schedule", part.use, BUILTIN_SCHEDULES, python_path=python_path)
    if _wants_optimizer(target) and "optimizer" not in part.args:
        raise JobError(
            f"schedule.use = {name!r} changes an optimizer, as torch's schedulers do. A schedule here is made of its "
            f"settings alone and gives the factor of the rate for each step: use {', '.join(BUILTIN_SCHEDULES)}, or "
            "write one, such as def decay(gamma=0.9): return lambda step: gamma**step"
        )
    schedule = construct("schedule", part.use, bind("schedule", target, part.args, {"total_steps": total_steps}))
    if not callable(schedule):
        raise JobError(
            f"schedule.use = {name!r} gives a {type(schedule).__name__}; it must give a function of the step"
        )
    return typing.cast("Schedule", schedule)


def _wants_optimizer(target: Callable[..., object]) -> bool:
    try:
        parameter = inspect.signature(target).parameters.get("optimizer")
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def _warmed_up(schedule: Schedule, warmup_steps: int) -> Schedule:
    """Climb in a straight line to the schedule's own value over the first `warmup_steps` steps."""
    if warmup_steps < 0:
        raise JobError(f"schedule.warmup_steps = {warmup_steps} must be at least 0")
    if warmup_steps == 0:
        return schedule
    return lambda step: schedule(warmup_steps) * (step + 1) / warmup_steps if step < warmup_steps else schedule(step)


def _horizon(name: str, total_steps: int | None, warmup_steps: int) -> int:
    if total_steps is None:
        raise JobError(
            f"schedule.use = '{name}' must know the number of steps, and this data has no length: "
            "set training.steps or schedule.total_steps"
        )
    return max(1, total_steps - warmup_steps)
