"""How the learning rate changes from step to step.

Steps are optimizer steps, whatever the number of workers or accumulated parts. A schedule of this project is a pure
function of the step, so that it has no state to save, to lose, or to run too fast. Schedulers of torch are followed on
an optimizer without parameters, from the first step on: they too become functions of the step. What
`ReduceLROnPlateau` decides depends on what was measured, so its state is part of the progress of a run.
"""

from __future__ import annotations

import copy
import inspect
import math
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from cordee.compute.metrics import Direction
from cordee.core.errors import JobError, nearest
from cordee.core.references import Use, bind, construct, name_of, resolve

Factor = Callable[[int], float]  # the step about to be taken, from 0, to the factor of the rate
Groups = Sequence[Mapping[str, Any]]  # the settings of an optimizer's groups


# Factors of the optimizer's rate.


def constant(*, warmup_steps: int = 0) -> Factor:
    return _warmed_up(lambda step: 1.0, warmup_steps)


def cosine(*, total_steps: int | None = None, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """Fall along half a cosine from 1 to `final`, from the end of the warm-up to the end of the run.

    `final` is what a step after the last would have.
    """
    length = _horizon("cosine", total_steps, warmup_steps)

    def factor(step: int) -> float:
        done = min(1.0, (step - warmup_steps) / length)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))

    return _warmed_up(factor, warmup_steps)


def linear(*, total_steps: int | None = None, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """Fall in a straight line from 1 to `final`, from the end of the warm-up to the end of the run."""
    length = _horizon("linear", total_steps, warmup_steps)
    return _warmed_up(lambda step: 1.0 + (final - 1.0) * min(1.0, (step - warmup_steps) / length), warmup_steps)


def step(*, every_steps: int, factor: float = 0.1, warmup_steps: int = 0) -> Factor:
    """Multiply by `factor` after each `every_steps` steps."""
    if every_steps < 1:
        raise JobError(f"schedule.every_steps = {every_steps} must be at least 1")
    return _warmed_up(lambda now: factor ** (now // every_steps), warmup_steps)


BUILTIN_SCHEDULES: dict[str, Callable[..., Factor]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": step,
}


def _warmed_up(schedule: Factor, warmup_steps: int) -> Factor:
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


# Schedulers of torch, and of the user's own that are derived from them.


class TorchSchedule:
    """What a scheduler makes of each group of the optimizer, step by step: rates, and momenta where it cycles them."""

    _CHANGED = ("lr", "momentum", "betas")

    def __init__(self, build: Callable[[Optimizer], Any], num_batches: int | None) -> None:
        """`num_batches` are the steps of an epoch where the scheduler counts epochs; None where it counts steps."""
        self._build, self._num_batches = build, num_batches
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._fixed: list[dict[str, Any]] = []  # settings of the groups that a schedule leaves as they are
        self._history: list[list[dict[str, Any]]] = []  # by steps, or epochs; servers ask for earlier ones, too

    def fit(self, groups: Groups) -> None:
        """Begin with the groups of the whole model's optimizer. Raises JobError for settings that torch refuses."""
        self._optimizer = _without_parameters(groups)
        kept = {"params", "initial_lr", *self._CHANGED}
        self._fixed = [{k: copy.copy(v) for k, v in g.items() if k not in kept} for g in self._optimizer.param_groups]
        self._scheduler = self._build(self._optimizer)
        self._history = [self._settings()]

    def settings(self, step: int) -> list[dict[str, Any]]:
        """Return what is set in each group for `step`."""
        assert self._optimizer is not None
        count = step if self._num_batches is None else step // self._num_batches
        while len(self._history) <= count:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns that no step was taken
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # SequentialLR calls its own schedulers in a deprecated way
                    self._scheduler.step()
            except Exception as error:
                raise JobError(f"the schedule cannot continue after step {step}: {error}") from error
            self._history.append(self._settings())
        return self._history[count]

    def _settings(self) -> list[dict[str, Any]]:
        assert self._optimizer is not None
        found = []
        for group, fixed in zip(self._optimizer.param_groups, self._fixed, strict=True):
            if changed := [key for key, value in fixed.items() if group[key] != value]:
                raise JobError(
                    f"the schedule changes '{changed[0]}' of the optimizer, and only {', '.join(self._CHANGED)} are "
                    "taken from a schedule: leave the others as they are"
                )
            settings = {key: group[key] for key in self._CHANGED if key in group}
            settings["lr"] = float(settings["lr"])
            if not math.isfinite(settings["lr"]):
                raise JobError(f"the schedule gives the rate {settings['lr']}: it must be a finite number")
            found.append(settings)
        return found


class PlateauSchedule:
    """Rates that fall when a metric does not get better any more, as torch's `ReduceLROnPlateau` has it.

    All groups are reduced at the same evaluations, so that `level`, the number of reductions, says the rate of each.
    """

    _SAVED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")

    def __init__(self, metric: str, settings: Mapping[str, Any]) -> None:
        self.metric = metric
        self.mode: str | None = settings.get("mode")
        self.level = 0
        self._settings = dict(settings)
        self._groups: Groups = ()
        self._scheduler: Any = None

    def fit(self, groups: Groups) -> None:
        """Begin with the groups of the whole model's optimizer. Raises JobError for settings that torch refuses."""
        self._groups = [dict(group) for group in groups]
        _construct_torch(lr_scheduler.ReduceLROnPlateau, self._settings, _without_parameters(groups))
        # Decides when to reduce; by a rate that never gets too small, which is put back each time.
        decides = {**self._settings, "factor": 0.5, "min_lr": 0.0, "eps": 0.0}
        self._scheduler = lr_scheduler.ReduceLROnPlateau(_without_parameters([{"lr": 1.0}]), **decides)
        self.level = 0

    def settings(self, step: int) -> list[dict[str, Any]]:
        """Return the rate of each group at the present level."""
        factor, eps = self._settings.get("factor", 0.1), self._settings.get("eps", 1e-8)
        lowest = self._settings.get("min_lr", 0.0)
        found = []
        for number, group in enumerate(self._groups):
            rate, least = float(group["lr"]), lowest[number] if isinstance(lowest, list | tuple) else lowest
            for _ in range(self.level):
                lower = max(rate * factor, least)
                rate = lower if rate - lower > eps else rate
            found.append({"lr": rate})
        return found

    def record(self, value: float | None) -> None:
        """Take what an evaluation measured; no value is no improvement."""
        group = self._scheduler.optimizer.param_groups[0]
        self._scheduler.step(math.nan if value is None else value)
        if group["lr"] != 1.0:
            group["lr"] = 1.0
            self.level += 1

    def dump(self) -> dict[str, float]:
        """Return all that `load` needs to continue here."""
        state = self._scheduler.state_dict()
        return {"level": self.level, **{key: state[key] for key in self._SAVED}}

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue where another was; from the start where nothing is saved."""
        if not saved:
            self.fit(self._groups)
            return
        self.level = int(saved["level"])
        kept = {key: saved[key] if key == "best" else int(saved[key]) for key in self._SAVED}
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **kept})


Schedule = Factor | TorchSchedule | PlateauSchedule


def _without_parameters(groups: Groups) -> Optimizer:
    """Return an optimizer with these groups that trains nothing."""
    tables = [{"params": [torch.zeros(1)], **{k: v for k, v in g.items() if k != "params"}} for g in groups]
    return Optimizer(tables, {key: value for key, value in tables[0].items() if key != "params"})


_PER_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)  # torch counts their steps in batches, others' in epochs


_BASES = (lr_scheduler.LRScheduler, lr_scheduler._LRScheduler)


def torch_schedulers() -> dict[str, type]:
    """Return all schedulers of this torch by their names."""
    return {
        name: cls
        for name, cls in vars(lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, lr_scheduler.LRScheduler) and cls not in _BASES
    }


def find_scheduler(part: Use, python_path: Sequence[str] = ()) -> type | None:
    """Return the class, if a job names one of torch's or one that is derived from them."""
    use = part.use
    if isinstance(use, str) and ":" not in use and use not in BUILTIN_SCHEDULES:
        by_case = {name.lower(): name for name in torch_schedulers()}
        use = by_case.get(use.lower(), use)
    target = resolve("schedule", use, {**BUILTIN_SCHEDULES, **torch_schedulers()}, python_path=python_path)
    is_scheduler = inspect.isclass(target) and issubclass(target, lr_scheduler.LRScheduler)
    return typing.cast("type", target) if is_scheduler else None


def follows_metric(part: Use, python_path: Sequence[str] = ()) -> bool:
    """Whether the job's schedule depends on what evaluations find."""
    found = find_scheduler(part, python_path)
    return found is not None and issubclass(found, lr_scheduler.ReduceLROnPlateau)


def make_schedule(
    part: Use,
    total_steps: int | None,
    python_path: Sequence[str] = (),
    *,
    num_batches: int | None = None,
    better: Callable[[str], Direction] = lambda metric: "lower",
) -> Schedule:
    """Return the schedule a job names.

    A user's own is a callable with settings that returns a function of the step, or a scheduler in the sense of torch.
    `total_steps`, and the steps of an epoch, `num_batches`, are None where the end is not known in advance. `better`
    says of a metric whether higher or lower is better, and raises JobError for one that is not known.
    """
    scheduler = find_scheduler(part, python_path)
    if scheduler is not None:
        return _make_torch(part, scheduler, total_steps, num_batches, python_path, better)
    name, target = name_of(part.use), resolve("schedule", part.use, BUILTIN_SCHEDULES, python_path=python_path)
    schedule = construct("schedule", part.use, bind("schedule", target, part.args, {"total_steps": total_steps}))
    if not callable(schedule):
        raise JobError(
            f"schedule.use = {name!r} gives a {type(schedule).__name__}; it must give a function of the step"
        )
    return typing.cast("Factor", schedule)


def _make_torch(
    part: Use,
    scheduler: type,
    total_steps: int | None,
    num_batches: int | None,
    python_path: Sequence[str],
    better: Callable[[str], Direction],
) -> Schedule:
    args = dict(part.args)
    if issubclass(scheduler, lr_scheduler.ReduceLROnPlateau):
        return _make_plateau(scheduler, args, better)
    per = args.pop("per", "step" if issubclass(scheduler, _PER_STEP) else "epoch")
    if per not in ("step", "epoch"):
        raise JobError(f"schedule.per = {per!r} must be 'step' or 'epoch'")
    if per == "epoch" and num_batches is None:
        raise JobError(
            f"schedule.use = '{scheduler.__name__}' counts epochs, and this data has no length: set schedule.per = "
            "'step', and its settings in steps"
        )
    total = total_steps
    if per == "epoch":
        assert num_batches is not None
        total = None if total_steps is None else -(-total_steps // num_batches)
    # Looked at before there is an optimizer, so that a missing setting is named.
    _bind_torch("schedule", scheduler, args, total, python_path)
    return TorchSchedule(
        lambda optimizer: _build_torch("schedule", scheduler, args, total, python_path, optimizer),
        num_batches if per == "epoch" else None,
    )


def _make_plateau(scheduler: type, args: dict[str, Any], better: Callable[[str], Direction]) -> PlateauSchedule:
    if scheduler is not lr_scheduler.ReduceLROnPlateau:
        raise JobError("schedule: a scheduler derived from ReduceLROnPlateau is not followed: use torch's own")
    metric = args.pop("metric", "loss")
    mode = {"lower": "min", "higher": "max"}[better(metric)]
    if args.get("mode", mode) != mode:
        raise JobError(
            f"schedule.mode = {args['mode']!r} contradicts the metric '{metric}', of which {better(metric)} is better: "
            "leave schedule.mode out"
        )
    bind("schedule", scheduler, args, {"optimizer": inspect.Parameter.empty})
    return PlateauSchedule(metric, {**args, "mode": mode})


def _bind_torch(
    section: str, scheduler: type, args: Mapping[str, Any], total: int | None, python_path: Sequence[str]
) -> Callable[..., Any]:
    given = {key: _resolved(section, key, value, python_path) for key, value in args.items() if key != "schedulers"}
    provided: dict[str, Any] = {"optimizer": inspect.Parameter.empty, "schedulers": inspect.Parameter.empty}
    if not {"epochs", "steps_per_epoch"} & given.keys():
        provided["total_steps"] = total
    if "schedulers" in inspect.signature(scheduler).parameters and not isinstance(args.get("schedulers"), list | tuple):
        raise JobError(f"{section} needs 'schedulers': a list of tables, each with use and its settings")
    return bind(section, scheduler, given, provided)


def _build_torch(
    section: str,
    scheduler: type,
    args: Mapping[str, Any],
    total: int | None,
    python_path: Sequence[str],
    optimizer: Optimizer,
) -> Any:
    build = _bind_torch(section, scheduler, args, total, python_path)
    own: dict[str, Any] = {"optimizer": optimizer}
    if "schedulers" in args:
        own["schedulers"] = [
            _build_inner(f"{section}.schedulers[{number}]", table, total, python_path, optimizer)
            for number, table in enumerate(args["schedulers"])
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return construct(section, scheduler, lambda: build(**own))


def _build_inner(section: str, table: Any, total: int | None, python_path: Sequence[str], optimizer: Optimizer) -> Any:
    part = Use.coerce(section, table)
    inner = find_scheduler(part, python_path)
    if inner is None or issubclass(inner, lr_scheduler.ReduceLROnPlateau):
        names = torch_schedulers()
        raise JobError(f"{section}.use = {name_of(part.use)!r} is none of torch's{nearest(str(part.use), names)}")
    return _build_torch(section, inner, part.args, total, python_path, optimizer)


def _resolved(section: str, key: str, value: Any, python_path: Sequence[str]) -> Any:
    """Return the function that 'module:callable' names where torch wants one: LambdaLR's lr_lambda, say."""
    if isinstance(value, list):
        return [_resolved(section, key, inner, python_path) for inner in value]
    if key in ("lr_lambda", "scale_fn") and isinstance(value, str):
        return resolve(f"{section}.{key}", value, {}, python_path=python_path)
    return value


def _construct_torch(scheduler: type, settings: Mapping[str, Any], optimizer: Optimizer) -> Any:
    return construct("schedule", scheduler, lambda: scheduler(optimizer, **settings))
