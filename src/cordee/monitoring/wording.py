"""Progress in words: the bar, the lines above it, and the header, fitted to the width of the screen."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.text import Text

from cordee.core.durations import format_duration
from cordee.monitoring.events import (
    AnyEvent,
    Evaluation,
    Generation,
    Logged,
    Plan,
    RunStarted,
    Scale,
    Uploading,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)

_DONE, _LEFT = "cyan", "bright_black"
_WIDEST_BAR = 40


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a progress bar shows at one moment; None is not known (yet)."""

    step: int
    total_steps: int | None
    epoch: int | None  # counted from 1
    epochs: int | None
    loss: float | None
    test_accuracy: float | None  # of the latest evaluation
    samples_per_second: float | None
    left_s: float | None
    elapsed_s: float
    team: str = ""  # how many workers there are of how many, where there are several
    has_rounds: bool = False  # the steps are rounds of federated learning


def bar(view: View, width: int, *, is_ascii: bool = False) -> Text:
    """Return one line of at most `width` columns: the most detailed layout that fits."""
    dot = " | " if is_ascii else " · "
    epoch, steps = _place(view.has_rounds, view.epoch, view.epochs, view.step, view.total_steps)
    if view.total_steps and not view.has_rounds:
        steps = steps.removeprefix("step ")
    share = f"{_percentage(view.step, view.total_steps)}%" if view.total_steps else ""
    full_team, team = (f"workers {view.team}", view.team.partition(",")[0]) if view.team else ("", "")
    team = f"workers {team}" if team else ""
    loss = _some("loss {}", number(view.loss))
    long_accuracy = _some("test accuracy {}", percent(view.test_accuracy))
    accuracy = _some("test {}", percent(view.test_accuracy, digits=1).replace(" ", ""))
    long_rate = _some("{} samples/s", quantity(view.samples_per_second))
    rate = _some("{}/s", quantity(view.samples_per_second))
    time = f"{clock(view.left_s)} left" if view.left_s is not None else clock(view.elapsed_s)
    layouts: list[tuple[int, str, str, list[str]]] = [
        (20, dot, epoch, [share, steps, loss, long_accuracy, long_rate, full_team, time]),
        (8, " ", epoch, [share, steps, loss, accuracy, long_rate, full_team, time]),
        (8, " ", epoch, [share, steps, loss, accuracy, rate, full_team, time]),
        (8, " ", epoch, [share, steps, loss, accuracy, rate, team, time]),
        (8, " ", epoch, [share, steps, loss, accuracy, team, time]),
        (8, " ", epoch, [share, steps, loss, accuracy, time]),
        (6, " ", epoch, [share, steps, loss, time]),
        (4, " ", "", [share, steps, loss, time]),
        (4, " ", "", [steps, loss, time]),
        (4, " ", "", [steps, time]),
        (0, " ", "", [steps]),
    ]
    for narrowest, separator, before, after in layouts:
        tail = separator.join(part for part in after if part)
        room = width - len(tail) - len(before) - (1 if before else 0) - 1
        if room >= narrowest or not narrowest:
            break
    text = Text(no_wrap=True, overflow="crop", end="")
    if before:
        text.append(before + " ")
    if narrowest and view.total_steps:
        done, left = _strokes(view.step / view.total_steps, min(room, _WIDEST_BAR), is_ascii)
        text.append(done, _DONE).append(left, _LEFT).append(" ")
    text.append(tail)
    text.truncate(width)
    return text


def step_line(view: View) -> str:
    """Return progress as a line of a log."""
    epoch, steps = _place(view.has_rounds, view.epoch, view.epochs, view.step, view.total_steps)
    share = f"{_percentage(view.step, view.total_steps)}%" if view.total_steps else ""
    parts = [
        epoch,
        _some(f"{steps} ({{}})", share) or steps,
        _some("loss {}", number(view.loss)),
        _some("{} samples/s", quantity(view.samples_per_second)),
        _some("workers {}", view.team),
        f"{clock(view.left_s)} left" if view.left_s is not None else "",
    ]
    return "  ".join(part for part in parts if part)


class TeamCount:
    """Which workers of a run are there, by its events. Pure."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._present: set[int] = set()
        self._lost: set[int] = set()

    def take(self, event: AnyEvent) -> None:
        match event:
            case Generation():
                # Those who are in the team are there; a lost worker that is not in it is on its way back.
                self._present = set(event.members)
                self._lost -= self._present
            case WorkerStarted(role="worker"):
                self._present.add(event.worker)
                self._lost.discard(event.worker)
            case WorkerLost(role="worker"):
                self._present.discard(event.worker)
                self._lost.add(event.worker)
            case WorkerLeft(role="worker"):
                self._present.discard(event.worker)
                self._lost.discard(event.worker)
            case Scale():
                self._wanted = event.workers

    def describe(self) -> str:
        """Return "3/4, 1 rejoining"; nothing for a run of one worker."""
        if self._wanted < 2 and len(self._present) < 2:
            return ""
        rejoining = min(len(self._lost), max(self._wanted - len(self._present), 0))
        known = len(self._present) or self._wanted
        return f"{known}/{self._wanted}" + (f", {rejoining} rejoining" if rejoining else "")


def evaluation_line(
    found: Evaluation, train_loss: float | None, elapsed_s: float, width: int | None, *, has_rounds: bool = False
) -> str:
    """Return what an evaluation found, as one line that fits `width` if one is given."""
    epoch, step = _place(has_rounds, found.epoch, None, found.step, None)
    if has_rounds:
        epoch, step = step, ""
    # The mean of the epoch, if it is known.
    loss = _some("loss {}", number(train_loss if found.train_loss is None else found.train_loss))
    test_loss = number(found.test_loss)
    accuracy, top5 = percent(found.test_accuracy), percent(found.test_top5_accuracy)
    full = _some("test loss {}", test_loss), _some("test accuracy {}", accuracy)
    elapsed = format_duration(elapsed_s)
    own = [_some(f"{name} {{}}", number(value)) for name, value in found.metrics.items()]
    variants = [
        [epoch, step, loss, *full, _some("top-5 {}", top5), *own, elapsed],
        [epoch, step, loss, *full, *own, elapsed],
        [epoch, step, *full, *own, elapsed],
        [epoch, step, *full, *own],
        [epoch, *full, *own],
        [epoch, step, *full],
        [epoch, _some("test loss {}", test_loss), _some("accuracy {}", accuracy)],
        [epoch, _some("accuracy {}", accuracy) or _some("test loss {}", test_loss)],
    ]
    line = ""
    for variant in variants:
        line = "  ".join(part for part in variant if part)
        if width is None or len(line) <= width:
            break
    return line


def logged_line(event: Logged) -> str:
    """Return what a callback logged."""
    values = [f"{name} {number(value) or 'nan'}" for name, value in event.values.items()]
    return "  ".join([f"step {event.step}", *values])


def plan_line(plan: Plan) -> str:
    """Return what a team of another size is predicted to take."""
    team = f"{plural(plan.workers, 'worker')} now"
    if plan.predicted_step_seconds is None:
        return f"{team}; nothing is predicted: {plan.reason}"
    return f"{team}: {plan.strategy} is predicted to take {1e3 * plan.predicted_step_seconds:.3g} ms a step"


def uploading_line(event: Uploading) -> str:
    """Return what a run whose training is over waits for."""
    names = ", ".join(f"step-{step}" for step in event.steps) or "what was removed"
    place = ""
    if event.step is not None and event.total_bytes:
        done, total = event.done_bytes / 1e6, event.total_bytes / 1e6
        place = f" (step-{event.step}: {done:.1f} of {total:.1f} MB)"
    return f"training is over; waiting for {event.path} to have {names}{place}; Ctrl-C leaves without"


def header_lines(run: RunStarted) -> list[str]:
    """Return what is trained, on what, and where."""
    on = f"on {run.device or 'cpu'}" + (f" with {plural(run.threads, 'thread')} each" if run.threads else "")
    if run.workers == 1:
        on = on.removesuffix(" each")
    model = f"{run.name}: "
    if run.parameters:
        trained = run.parameters if run.trainable_parameters is None else run.trainable_parameters
        only = f" ({trained:,} of them trained)" if trained != run.parameters else ""
        model += f"{run.parameters:,} parameters{only}, "
    servers = f", {plural(run.servers, 'server')}" if run.servers else ""
    workers = plural(run.workers, "worker")
    if run.clients:  # of real sites the processes are not known
        workers = plural(run.clients, "client") + (f", {workers}" if run.threads else "")
    lines = [f"{model}{run.strategy}, {workers} {on}{servers}"]
    data = []
    if run.train_samples:
        tests = f" and {run.test_samples:,} test" if run.test_samples else ""
        data.append(f"{run.train_samples:,} training{tests} samples")
    if run.batch_size:
        data.append(f"batches of {run.batch_size:,}")
    if run.epochs:
        data.append(plural(run.epochs, "epoch"))
    if run.total_steps:
        data.append(plural(run.total_steps, "round" if run.clients else "step"))
    if data:
        lines.append(", ".join(data))
    if run.start_step:
        lines.append(f"continues after {'round' if run.clients else 'step'} {run.start_step:,}")
    if run.run_dir:
        lines.append(f"run directory: {_seen_from_here(run.run_dir)}")
    return lines


def _seen_from_here(path: str) -> str:
    """Return a path as a person would type it: relative where it is below the working directory."""
    with contextlib.suppress(ValueError, OSError):  # it is elsewhere, or the working directory is gone
        return str(Path(path).relative_to(Path.cwd()))
    return path


def number(value: float | None) -> str:
    """Return a loss or the like with four digits that matter; nothing for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share of 1 as '84.31 %'; nothing for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def quantity(value: float | None) -> str:
    """Return three digits and a unit: '950', '12.3k', '1.05M'; nothing for None."""
    if value is None or not math.isfinite(value):
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def clock(seconds: float) -> str:
    """Return '0:34', '12:03' or '1:02:03'; days from two on."""
    whole = max(round(seconds), 0)
    if whole >= 172_800:
        return f"{whole // 86_400} days"
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _percentage(step: int, total_steps: int) -> int:
    return min(100, 100 * step // total_steps)  # 100 only at the end


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _place(
    has_rounds: bool, epoch: int | None, epochs: int | None, step: int, total_steps: int | None
) -> tuple[str, str]:
    """Return how far a run is: the epoch, and the step. A round is both, and is said once."""
    if has_rounds:
        return "", _of("round", step, total_steps)
    return _of("epoch", epoch, epochs), _of("step", step, total_steps)


def _of(noun: str, count: int | None, total: int | None) -> str:
    if count is None:
        return ""
    return f"{noun} {count}/{total}" if total else f"{noun} {count}"


def _some(form: str, value: object) -> str:
    return form.format(value) if value not in (None, "") else ""


def _strokes(share: float, width: int, is_ascii: bool) -> Sequence[str]:
    full, half, empty = ("#", "#", "-") if is_ascii else ("━", "╸", "─")
    halves = round(2 * width * min(max(share, 0.0), 1.0))
    done = full * (halves // 2) + half * (halves % 2)
    return done, empty * (width - len(done))
