"""Objects of the user's own that are called while a run trains: `[callbacks]` of a job.

An object has some of the methods of `Callback`. Every worker of a team has an object of its own and calls it at the
same steps, so that the methods may communicate with the others through `context.team`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from cordee.cluster import Team
from cordee.cluster.member_link import PeerError
from cordee.core import Job
from cordee.core.errors import JobError, TrainingError, nearest
from cordee.core.references import Use, bind, construct, resolve
from cordee.monitoring import AnyEvent, events
from cordee.monitoring.pictures import encode_png
from cordee.strategies.strategy import Strategy
from cordee.training.progress import Outcome

if TYPE_CHECKING:
    from cordee.training.components import Components

log = logging.getLogger("cordee.callbacks")

_SHARED_BYTES = 1024  # of a message that a team hears of


@dataclass
class Context:
    """What a callback sees of the run, from one worker."""

    job: Job
    team: Team
    step: int  # optimizer steps taken
    _strategy: Strategy | None
    _model: Callable[[], nn.Module]
    _emit: Callable[[AnyEvent], None]

    @property
    def model(self) -> nn.Module:
        """The model. Where workers have a part of it each, the whole is there in `on_evaluation` and `on_end` only."""
        return self._model()

    @property
    def optimizer(self) -> Optimizer | None:
        """What this worker's optimizer step is taken with; None where it has none, as the evaluator of servers."""
        found: Optimizer | None = getattr(self._strategy, "_optimizer", None)
        return found

    def log(self, **values: float) -> None:
        """Record numbers by name, for this step. What the first worker of a team logs is recorded."""
        plain: dict[str, float | None] = {name: _as_number(name, value) for name, value in values.items()}
        if plain and self.team.is_first:
            self._emit(events.Logged(step=self.step, values=plain))

    def log_image(self, name: str, picture: Any) -> None:
        """Record a picture: a tensor or array of height × width, or with 1, 3 or 4 channels first or last.

        Floating-point values are from 0 to 1, whole ones from 0 to 255. What the first worker of a team logs is
        recorded.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise TrainingError(f"log_image: {name!r} names a file: use letters, digits, '_', '-' and '.'")
        png = encode_png(picture)
        if self.team.is_first:
            self._emit(events.Picture(step=self.step, name=name, png=png))


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool | int | float) or (hasattr(value, "__float__") and not hasattr(value, "__len__")):
        return float(value)
    raise TrainingError(f"log: {name} = {type(value).__name__} is not one number")


class Callback:
    """What may be done while a run trains. An object need not be derived from this class."""

    def on_start(self, event: events.RunStarted, context: Context) -> None:
        """Before the first step of this worker."""

    def on_step(self, event: events.Step, context: Context) -> None:
        """After each optimizer step. Not with parameter servers, where no process takes whole steps."""

    def on_evaluation(self, event: events.Evaluation, context: Context) -> None:
        """After the model was measured on the test set."""

    def on_checkpoint(self, event: events.Checkpoint, context: Context) -> None:
        """After a checkpoint was written, on the worker that wrote it: the first."""

    def on_end(self, event: Outcome, context: Context) -> None:
        """After the last evaluation and checkpoint."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class NamedCallback(NamedTuple):
    """A callback of the job, not made yet: it may open files or connections."""

    name: str
    make: Callable[[], Any]


def find_callbacks(parts: Mapping[str, Use], python_path: Sequence[str]) -> tuple[NamedCallback, ...]:
    """Return the callbacks a job names. Raises JobError for what cannot be found or takes other settings."""
    found = []
    for name, part in parts.items():
        section = f"callbacks.{name}"
        if not isinstance(part.use, str) and not inspect.isclass(part.use) and not inspect.isroutine(part.use):
            if part.args:
                raise JobError(f"{section}: an object that is already made takes no settings; give its class instead")
            _methods_of(section, part.use)
            found.append(NamedCallback(name, functools.partial(_same, part.use)))
            continue
        try:
            target = resolve(section, part.use, {}, python_path=python_path)
        except JobError as error:
            raise JobError(str(error).replace(f"{section}.use", section, 1)) from error.__cause__
        build = bind(section, target, part.args)
        if inspect.isclass(target):
            _methods_of(section, target)
        found.append(NamedCallback(name, functools.partial(construct, section, part.use, build)))
    return tuple(found)


def _same(made: Any) -> Any:
    return made


def _methods_of(section: str, made: Any) -> list[str]:
    """Return the methods that an object, or a class, has of its own. Raises JobError if there are none."""
    names = [name for name in dir(made) if name.startswith("on_")]
    for name in names:
        if name not in METHODS:
            raise JobError(f"{section} has '{name}', which is never called{nearest(name, METHODS)}")
    own = [
        name
        for name in names
        if getattr(getattr(made, name), "__func__", getattr(made, name)) is not vars(Callback)[name]
    ]
    if not own:
        raise JobError(f"{section} has none of the methods {', '.join(METHODS)}")
    return own


def _function(made: Any, name: str) -> Any:
    found = getattr(made, name)
    return getattr(found, "__func__", found)


def refuse_on_step(callbacks: Sequence[NamedCallback], strategy: str) -> None:
    """Raise JobError for callbacks that want to be called after each step, where no process takes steps."""
    for name, make in callbacks:
        if "on_step" in _methods_of(f"callbacks.{name}", make()):
            raise JobError(
                f"callbacks.{name} has on_step, and no process of strategy '{strategy}' takes whole steps: leave "
                "on_step out, or use another strategy"
            )


class Callbacks:
    """The callbacks of one process, made and called."""

    def __init__(self, found: Sequence[NamedCallback]) -> None:
        self._made = [(name, make()) for name, make in found]
        self._methods = [set(_methods_of(f"callbacks.{name}", made)) for name, made in self._made]

    def __bool__(self) -> bool:
        return bool(self._made)

    def has(self, method: str) -> bool:
        """Whether any of them wants to be called."""
        return any(method in methods for methods in self._methods)

    def call(self, method: str, event: Any, context: Context) -> str:
        """Call a method of all that have it; return what went wrong, in words, or nothing. Local."""
        for (name, made), methods in zip(self._made, self._methods, strict=True):
            if method not in methods:
                continue
            try:
                getattr(made, method)(event, context)
            except Exception as error:
                log.exception("callback '%s' failed", name)
                return f"callback '{name}' raised {type(error).__name__} in {method} at step {context.step}: {error}"
        return ""


def share_problem(problem: str, team: Team) -> Exception | None:
    """Return the first problem that any member has as an error, which each member is to raise. Collective."""
    if team.num_workers == 1 or not team.any(bool(problem)):
        return TrainingError(problem) if problem else None
    content = problem.encode()[:_SHARED_BYTES].ljust(_SHARED_BYTES, b"\0")
    rows = team.gather_rows(struct.unpack(f"<{_SHARED_BYTES // 8}q", content))
    for number, row in zip(team.numbers, rows, strict=True):
        text = struct.pack(f"<{len(row)}q", *row).rstrip(b"\0").decode(errors="ignore")
        if text:
            is_own = number == team.numbers[team.worker_index]
            return TrainingError(text) if is_own else PeerError(f"{text} (on worker {number})")
    raise AssertionError("a member has a problem")


class RunCallbacks:
    """The callbacks of a worker on its way through a run. Collective, where there are any.

    What one raises on any worker ends all of them, after `save` was called.
    """

    def __init__(
        self, found: Sequence[NamedCallback], emit: Callable[[AnyEvent], None], save: Callable[[], None]
    ) -> None:
        self._callbacks = Callbacks(found)
        self._emit, self._save = emit, save
        self._has_started = False
        self._written: list[events.Checkpoint] = []  # by another thread, and not reported yet

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def has(self, method: str) -> bool:
        """Whether any of them wants to be called."""
        return self._callbacks.has(method)

    @property
    def on_written(self) -> Callable[[events.Checkpoint], None] | None:
        """What takes the event of a checkpoint that was written, from any thread; None if nobody wants it."""
        return self._written.append if self._callbacks.has("on_checkpoint") else None

    def start(self, components: Components, step: int) -> None:
        """Tell that training begins, once on each worker."""
        if not self._callbacks:
            return
        problem = ""
        if not self._has_started:
            self._has_started = True
            problem = self._call("on_start", components.describe(start_step=step), components, step)
        self._end_by(problem, components.team, step)

    def notify(self, method: str, event: Any, components: Components, step: int) -> None:
        """Call a method of all callbacks that have it."""
        if self._callbacks.has(method):
            self._end_by(self._call(method, event, components, step), components.team, step)

    def tell_of_checkpoints(self, components: Components, step: int) -> None:
        """Call `on_checkpoint` for what was written meanwhile."""
        if not self._callbacks.has("on_checkpoint"):
            return
        problems = []
        while self._written:
            problems.append(self._call("on_checkpoint", self._written.pop(0), components, step))
        self._end_by("; ".join(filter(None, problems)), components.team, step)

    def _call(self, method: str, event: Any, components: Components, step: int) -> str:
        is_whole = components.is_whole or method in ("on_evaluation", "on_end")

        def model() -> nn.Module:
            if not is_whole:
                raise TrainingError(
                    f"context.model: workers of strategy '{components.job.strategy.name}' have a part of the model "
                    f"each; the whole is there in on_evaluation and on_end, not in {method}"
                )
            return components.strategy.model

        context = Context(components.job, components.team, step, components.strategy, model, self._emit)
        return self._callbacks.call(method, event, context)

    def _end_by(self, problem: str, team: Team, step: int) -> None:
        if (error := share_problem(problem, team)) is not None:
            self._save()
            team.any(False)  # nobody ends before the first has written
            raise type(error)(f"{error}. Step {step} is saved: --resume continues from it")
