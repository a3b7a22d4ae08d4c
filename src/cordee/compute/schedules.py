"""How the learning rate changes: factors of the optimizer's rate as pure functions of the step.

Steps are optimizer steps, whatever the number of workers or accumulated parts. Being functions of the step
alone, schedules have no state to save, to lose, or to run too fast.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Sequence

from cordee.core.errors import JobError
from cordee.core.references import Use, bind, construct, name_of, resolve

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
    target = resolve("schedule", part.use, BUILTIN_SCHEDULES, python_path=python_path)
    if _wants_optimizer(target) and "optimizer" not in part.args:
        name = part.use if isinstance(part.use, str) else name_of(part.use)
        raise JobError(
            f"schedule.use = {name!r} changes an optimizer, as torch's schedulers do. A schedule here is made of its "
            f"settings alone and gives the factor of the rate for each step: use {', '.join(BUILTIN_SCHEDULES)}, or "
            "write one, such as def decay(gamma=0.9): return lambda step: gamma**step"
        )
    schedule = construct("schedule", part.use, bind("schedule", target, part.args, {"total_steps": total_steps}))
    if not callable(schedule):
        name = part.use if isinstance(part.use, str) else name_of(part.use)
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
