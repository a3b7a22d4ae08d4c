"""`cordee profile`: torch's profiler on one worker of a job for some steps, and in words where the time goes."""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from cordee.core.errors import JobError
from cordee.monitoring import events
from cordee.monitoring.diagnosis import add_up
from cordee.monitoring.files import write_atomically
from cordee.monitoring.timeline import Phase, follow_member
from cordee.training.callbacks import Callback, Context

PROFILE_FILE, TRACE_FILE = "profile.json", "profile.trace.json.gz"
CALLBACK = "cordee.tools.profiling:StepProfiler"
_NUM_OPERATIONS = 8  # that are listed one by one

# What an operation of torch belongs to, by the beginning of its name; the first that fits counts.
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("optimizer", ("Optimizer.", "aten::_foreach", "aten::_fused", "aten::lerp", "aten::addcdiv", "aten::addcmul")),
    ("exchange", ("c10d::", "gloo:", "nccl:", "record_param_comms", "cordee::")),
    ("convolutions", ("aten::conv", "aten::mkldnn_conv", "aten::convolution", "aten::_conv", "aten::thnn_conv")),
    ("matrix products", ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear", "aten::matmul", "aten::baddbmm")),
    ("attention", ("aten::scaled_dot", "aten::_scaled_dot", "aten::_flash", "aten::_efficient")),
    ("normalisation", ("aten::native_batch", "aten::batch_norm", "aten::native_layer", "aten::layer_norm")),
    ("pooling", ("aten::max_pool", "aten::avg_pool", "aten::adaptive", "aten::_adaptive")),
    ("loss", ("aten::nll", "aten::cross_entropy", "aten::_log_softmax", "aten::log_softmax", "aten::mse")),
    ("random numbers", ("aten::bernoulli", "aten::native_dropout", "aten::dropout", "aten::uniform", "aten::normal")),
    ("copies", ("aten::copy", "aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat")),
)
_OTHER, _OUTSIDE = "other operations", "outside of torch's operations"
_ADVICE = {
    "optimizer": "a larger training.batch_size takes fewer updates",
    "exchange": "a larger training.batch_size exchanges less often; see docs/how-to/slow-links.md",
    "copies": "look for .to() and .contiguous() in the model",
    _OUTSIDE: "Python, data and waiting. A larger training.batch_size makes this part smaller; data.processes load "
    "the next batch meanwhile",
}


class Operation(msgspec.Struct, frozen=True):
    """One operation of torch."""

    name: str
    calls: int
    seconds: float  # its own, without those that it calls


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What the profiler saw of one worker."""

    worker: int
    steps: int
    seconds: float  # of these steps
    operations: list[Operation]  # the longest first


class StepProfiler(Callback):
    """Profiles `steps` steps of worker `worker` after `warmup` steps, and writes the result into a folder."""

    def __init__(self, folder: str, worker: int = 0, warmup: int = 5, steps: int = 20) -> None:
        self._folder, self._worker = Path(folder), worker
        self._warmup, self._steps = warmup, steps
        self._profiler: Any = None
        self._first = 0
        self._begun_s = 0.0

    def on_step(self, event: events.Step, context: Context) -> None:
        """Start behind the warm-up, and stop after so many steps."""
        if context.team.worker_index != self._worker:
            return
        if self._profiler is None and event.step == self._warmup:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profiler.start()
            self._begun_s = time.perf_counter()
        elif self._profiler is not None and event.step == self._warmup + self._steps:
            seconds = time.perf_counter() - self._begun_s
            self._profiler.stop()
            self._write(seconds)

    def _write(self, seconds: float) -> None:
        averages = self._profiler.key_averages()
        found = [Operation(each.key, each.count, each.self_cpu_time_total / 1e6) for each in averages]
        found.sort(key=lambda each: -each.seconds)
        made = Profile(worker=self._worker, steps=self._steps, seconds=seconds, operations=found)
        plain = self._folder / "profile.trace.json"
        self._profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(self._folder / TRACE_FILE, "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
        write_atomically(self._folder / PROFILE_FILE, msgspec.json.encode(made))


def profile_overrides(folder: Path, worker: int, warmup: int, steps: int) -> list[str]:
    """Return the settings with which `cordee train` profiles a job. Raises JobError for numbers that make no sense."""
    if steps < 1 or warmup < 1:
        raise JobError(f"--steps {steps} and --warmup {warmup} must be at least 1")
    called = f'{{use = "{CALLBACK}", folder = {msgspec.json.encode(str(folder)).decode()}, worker = {worker}'
    return [
        f"callbacks.cordee_profile={called}, warmup = {warmup}, steps = {steps}}}",
        f"stop.steps={warmup + steps}",
        "evaluation.every_epochs=0",
        "checkpoint.every_steps=0",
    ]


def read_profile(folder: Path) -> Profile:
    """Return what was profiled. Raises JobError if no step was."""
    try:
        return msgspec.json.decode((folder / PROFILE_FILE).read_bytes(), type=Profile)
    except FileNotFoundError:
        raise JobError(
            "no step was profiled: the job has fewer steps than --warmup and --steps together, fewer workers than "
            "--worker, or a strategy in which no worker takes whole steps (parameter servers)"
        ) from None


def group_operations(found: Profile) -> dict[str, float]:
    """Return the seconds of each group, the longest first, and what is outside of operations. Pure."""
    groups: dict[str, float] = {}
    for operation in found.operations:
        name = next((group for group, begins in _GROUPS if operation.name.startswith(begins)), _OTHER)
        groups[name] = groups.get(name, 0.0) + operation.seconds
    groups[_OUTSIDE] = max(found.seconds - sum(groups.values()), 0.0)
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def describe_profile(found: Profile, phases: Sequence[int] = ()) -> list[str]:
    """Return where the time goes, in lines. `phases` are the microseconds of the worker's timeline. Pure."""
    groups = group_operations(found)
    total = max(found.seconds, 1e-9)
    lines = [
        f"worker {found.worker}, {found.steps} steps: {1e3 * total / found.steps:.3g} ms a step with the profiler on"
    ]
    widest = max(len(name) for name in groups)
    for name, seconds in groups.items():
        if seconds >= 0.005 * total:
            lines.append(
                f"  {name:<{widest}}  {100 * seconds / total:5.1f} %  {1e3 * seconds / found.steps:.3g} ms a step"
            )
    lines.append("the longest operations:")
    for each in found.operations[:_NUM_OPERATIONS]:
        calls = each.calls / found.steps
        lines.append(f"  {each.name:<36} {100 * each.seconds / total:5.1f} %  {calls:.3g} calls a step")
    lines += _describe_phases(phases)
    first, seconds = next(iter(groups.items()))
    advice = f": {_ADVICE[first]}" if first in _ADVICE else ""
    lines.append(f"The largest part of a step, {100 * seconds / total:.0f} %, is {first}{advice}.")
    return lines


def _describe_phases(phases: Iterable[int]) -> list[str]:
    spent = list(phases)
    total = sum(spent)
    if not total:
        return []
    shares = [
        f"{phase.name.lower()} {100 * spent[phase] / total:.1f} %" for phase in Phase if spent[phase] >= 0.005 * total
    ]
    return [f"phases of the whole run, the first steps included: {', '.join(shares)}"]


def phases_of(folder: Path, worker: int) -> list[int]:
    """Return the microseconds of each phase that the timeline of a worker has."""
    if not (folder / "timeline" / f"worker-{worker}.jsonl").is_file():
        return []
    lines, _ = follow_member(folder, f"worker-{worker}")
    return add_up(lines)
