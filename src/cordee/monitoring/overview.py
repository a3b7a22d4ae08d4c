"""One run in a few lines, while it is under way or afterwards."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import events
from cordee.monitoring.jsonl import follow
from cordee.monitoring.run_list import RunInfo, inspect_run
from cordee.monitoring.wording import clock, number, percent, plural, quantity

CHUNK_BYTES = 1 << 20  # of events that are in memory at a time


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What `cordee show` says; what is not known is None."""

    run: RunInfo
    model: str = ""
    data: str = ""
    total_steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    test_loss: float | None = None
    samples_per_second: float | None = None
    checkpoints: int = 0  # that were saved
    last_checkpoint: int | None = None  # its step
    losses: dict[str, int] = {}  # members that were lost, by what happened
    recoveries: int = 0
    warnings: int = 0
    last_warning: str = ""
    unreadable_lines: int = 0
    newer_schema: int | None = None  # of the events, where this version does not know it


class OverviewBuilder:
    """Takes the events of a run one by one."""

    def __init__(self) -> None:
        self._started: events.RunStarted | None = None
        self._step: events.Step | None = None
        self._round: events.Round | None = None  # of clients
        self._tested: events.Evaluation | None = None
        self._losses: Counter[str] = Counter()
        self._saved: list[int] = [0, 0]  # how many, and the step of the last
        self._recoveries = self._warnings = self._unreadable = 0
        self._last_warning = ""

    def take(self, event: events.AnyEvent | events.UnreadableLine) -> None:
        match event:
            case events.Step():
                self._step = event
            case events.Round():
                self._round = event
            case events.Evaluation():
                self._tested = event
            case events.RunStarted():
                self._started = event
            case events.Checkpoint():
                self._saved = [self._saved[0] + 1, event.step]
            case events.Warned():
                self._warnings, self._last_warning = self._warnings + 1, event.message
            case events.WorkerLost():
                self._losses[event.reason] += 1
            case events.Recovery():
                self._recoveries += 1
            case events.UnreadableLine():
                self._unreadable += 1

    def build(self, info: RunInfo) -> Overview:
        """Return what the events so far say of the run."""
        started, step = self._started, self._step
        now = step.samples_per_second if step else None
        is_under_way = info.state in ("running", "died")  # an ended run has the speed of all its steps
        return Overview(
            run=info,
            model=started.model if started else "",
            data=started.data if started else "",
            total_steps=started.total_steps if started else None,
            epoch=step.epoch if step else None,
            epochs=started.epochs if started else None,
            loss=step.loss if step else self._round.loss if self._round else None,
            test_loss=self._tested.test_loss if self._tested else None,
            samples_per_second=now if is_under_way else info.samples_per_second or now,
            checkpoints=self._saved[0],
            last_checkpoint=self._saved[1] if self._saved[0] else None,
            losses=dict(self._losses),
            recoveries=self._recoveries,
            warnings=self._warnings,
            last_warning=self._last_warning,
            unreadable_lines=self._unreadable,
            newer_schema=started.schema_version
            if started is not None and started.schema_version > events.SCHEMA_VERSION
            else None,
        )


def read_overview(path: Path) -> Overview:
    """Return what the events of a run say. Raises RunDirectoryError if `path` holds no run."""
    if not path.is_dir():
        raise RunDirectoryError(f"there is no run directory {path}")
    info = inspect_run(path)
    if info is None:
        raise RunDirectoryError(f"{path} is not a run directory: it has no job.toml")
    builder = OverviewBuilder()
    before, offset = -1, 0
    while offset != before:
        before = offset
        found, offset = follow(path, offset, CHUNK_BYTES)
        for event in found:
            builder.take(event)
    return builder.build(info)


def describe_overview(overview: Overview) -> list[tuple[str, str]]:
    """Return the lines of `cordee show`: a label and what is known."""
    run = overview.run
    steps = f"{run.steps or 0:,}" + (f" of {overview.total_steps:,}" if overview.total_steps else "")
    share = f" ({100 * (run.steps or 0) / overview.total_steps:.0f} %)" if overview.total_steps else ""
    epoch = (
        f", epoch {overview.epoch}" + (f" of {overview.epochs}" if overview.epochs else "") if overview.epoch else ""
    )
    saved = (
        f"{overview.checkpoints}, the last after step {overview.last_checkpoint:,}" if overview.checkpoints else "none"
    )
    rows = [
        ("run", run.path.name),
        ("state", run.state + (f": {run.problem}" if run.problem else "")),
        ("newer", _newer(overview.newer_schema) if overview.newer_schema is not None else ""),
        ("job", ", ".join(part for part in (run.name, overview.model, overview.data) if part)),
        ("strategy", f"{run.strategy or ''}, {plural(run.workers, 'worker')}" if run.workers else run.strategy or ""),
        ("steps", steps + share + epoch),
        ("loss", number(overview.loss)),
        ("test", ", ".join(filter(None, (percent(run.test_accuracy), _loss(overview.test_loss))))),
        ("speed", f"{quantity(overview.samples_per_second)} samples/s" if overview.samples_per_second else ""),
        ("time", clock(run.wall_seconds) if run.wall_seconds is not None else ""),
        ("checkpoints", saved),
        ("lost", ", ".join(f"{count} {_happened(what)}" for what, count in overview.losses.items())),
        ("recoveries", str(overview.recoveries) if overview.recoveries else ""),
        ("warnings", f"{overview.warnings}, the last: {overview.last_warning}" if overview.warnings else ""),
        ("unreadable", plural(overview.unreadable_lines, "line") if overview.unreadable_lines else ""),
        ("files", str(run.path)),
    ]
    return [(label, value) for label, value in rows if value]


def next_commands(run: RunInfo) -> list[str]:
    """Return what a person may want to do with a run in its state."""
    name = shlex.quote(run.path.name)
    if run.state == "running":
        return [f"cordee logs {name} -f", f"cordee stop {name}"]
    if run.state in ("died", "interrupted", "failed"):
        return [f"cordee resume {name}", f"cordee logs {name}"]
    return [f"cordee export {name}", f"cordee logs {name}"]


def _newer(schema: int) -> str:
    return (
        f"made by a newer version of Cordée (events of version {schema}, this one knows {events.SCHEMA_VERSION}): "
        "what is shown may be incomplete; update Cordée"
    )


def _happened(reason: str) -> str:
    """Return a reason as a part of a count: "was killed by SIGKILL" happened to 1, which is "1 killed by SIGKILL"."""
    return reason.removeprefix("was ").removeprefix("is ")


def _loss(value: float | None) -> str:
    return f"loss {number(value)}" if value is not None else ""
