"""How the kernels of a job compute: each way is measured on the job's own model, and the launcher chooses one for all.

Measuring is cheap against the run, or it is not done: a short run takes what the cache knows, or the plain way.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from cordee.compute import Computation, split_batch, usable_cores
from cordee.compute.compiling import Compiler, first_line
from cordee.compute.computation import is_image
from cordee.core import Batch, env, tree
from cordee.core.settings import Training
from cordee.data.datasets import IterableSource
from cordee.planner.amounts import in_time
from cordee.planner.measurements import describe_machine, is_busy, keep, key_of, read_kept
from cordee.planner.profiling import copy_of, estimate_step_s, first_batch
from cordee.strategies.choice import entry_of
from cordee.training.components import Components

log = logging.getLogger("cordee.planner")

MOST_SHARE = 0.02  # of a run's steps that may be spent on measuring before it
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
LEAST_SETTLED, SETTLED = 5, 0.005  # rounds, and how far a gain may still move, when no more rounds are taken
BUDGET_S = 4.0
MOST_SAMPLES = 64  # of a batch that are measured with: what a way gains hardly changes beyond
LEAST_COMPILED_S = 1800.0  # a run that is shorter is not worth trying to compile: that alone may take a minute
LEAST_GAIN = 1.03  # what is not faster by so much is not worth results that are rounded in another way
LEAST_GAIN_BUSY = 1.15  # measured beside other work: such ratios were off by up to a tenth
# How far the first batch's loss and the norm of its gradient may be from those of the plain way, relative.
TOLERANCES = {"fp32": (1e-4, 1e-2), "bf16": (5e-2, 5e-1), "fp16": (5e-2, 5e-1)}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute a model."""

    memory_format: str = "contiguous"
    precision: str = "fp32"
    compile: bool = False
    threads: int = 0  # 0: as many as the job says, or this worker's share of the cores

    @property
    def label(self) -> str:
        words = ["channels-last"] if self.memory_format == "channels_last" else []
        words += [self.precision] if self.precision != "fp32" else []
        words += ["compiled"] if self.compile else []
        words += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        return " and ".join(words) or "plain"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What one way takes; `problem` says why it cannot be taken."""

    kernels: Kernels
    gain: float = 0.0  # whole steps are so many times as fast as in the plain way, measured in turn with it
    compile_s: float = 0.0  # that compiling took
    problem: str = ""

    def gain_of(self, run_s: float | None) -> float:
        """Return what is gained in a run that takes `run_s` in the plain way, compiling included."""
        if run_s is None or not self.gain:
            return self.gain
        return run_s / (run_s / self.gain + self.compile_s)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The ways that were tried with a model, the plain one first."""

    trials: tuple[Trial, ...]
    was_busy: bool = False

    def find(self, kernels: Kernels) -> Trial | None:
        return next((trial for trial in self.trials if trial.kernels == kernels), None)

    def knows(self, wanted: Sequence[Kernels]) -> bool:
        return all(self.find(kernels) is not None for kernels in wanted)


class Choice(NamedTuple):
    """The settings that a run gets, and what is said of them; `text` is "" where nothing was looked at."""

    training: Training
    text: str = ""
    warning: str = ""
    trials: tuple[Trial, ...] = ()


def choose_kernels(
    asked: Training,
    parts: Components,
    *,
    may_always_measure: bool = False,
    tell: Callable[[str], None] = lambda doing: None,
) -> Choice:
    """Return the settings with which `parts`, of the same job without "auto", should be computed. Local.

    Measures where that takes next to nothing of the run, or if `may_always_measure`; `tell` is called before.
    """
    if parts.computation.device.type != "cpu":
        return Choice(parts.job.training)  # this process would hold memory of the GPU for the whole run
    run_s, is_compiling = None, asked.compile is True and not asked.reproducible
    if asked.compile == "auto":
        run_s = _run_s(parts)
    allowed = _allowed(asked, parts, may_compile=may_always_measure or (run_s or 0.0) >= LEAST_COMPILED_S)
    wanted = list(dict.fromkeys([Kernels(), *allowed]))
    if may_always_measure:
        wanted = list(dict.fromkeys([*wanted, *_shown(asked, parts)]))
    if asked.reproducible or len(wanted) < 2:
        return Choice(parts.job.training)
    # What is to be compiled is tried before it is sent to anybody: it may fail, or change results.
    measured = _measured(parts, wanted, may_always_measure=may_always_measure or is_compiling, tell=tell)
    if measured is None:
        return Choice(parts.job.training)
    while True:
        choice = decide(asked, parts.job.training, allowed, measured, run_s)
        chosen = Kernels(memory_format=choice.training.memory_format, precision=choice.training.precision)
        if chosen == Kernels() or not (problem := _try_out(parts, chosen)):
            return choice
        left = [trial for trial in measured.trials if not _computes_like(trial.kernels, chosen)]
        spoilt = [trial for trial in measured.trials if _computes_like(trial.kernels, chosen)]
        if not spoilt or all(trial.problem for trial in spoilt):
            return Choice(parts.job.training)
        failed = [Trial(kernels=trial.kernels, problem=problem) for trial in spoilt]
        measured = Measured(trials=(*left, *failed), was_busy=measured.was_busy)


def decide(
    asked: Training, plain: Training, allowed: Sequence[Kernels], measured: Measured, run_s: float | None = None
) -> Choice:
    """Return the fastest of the ways that are allowed, and what to say of it. Pure.

    `run_s` is how long the run would take in the plain way, where that matters.
    """
    usual = allowed[0]
    able = [trial for kernels in allowed if (trial := measured.find(kernels)) is not None and not trial.problem]
    base = measured.find(usual)
    best = max(able, key=lambda trial: trial.gain_of(run_s), default=None)
    least = LEAST_GAIN_BUSY if measured.was_busy else LEAST_GAIN
    if best is None or (base is not None and not base.problem and best.gain_of(run_s) < base.gain_of(run_s) * least):
        best = base
    chosen = best.kernels if best is not None else usual
    if best is not None and best.problem:
        chosen = msgspec.structs.replace(chosen, compile=False)
    training = msgspec.structs.replace(
        plain,
        memory_format=chosen.memory_format,
        precision=chosen.precision,
        compile=chosen.compile,
        threads=chosen.threads or plain.num_threads,
    )
    others = [trial for trial in measured.trials if trial.kernels in allowed and trial.kernels != chosen]
    text = "plain"
    if best is not None and not best.problem and best.gain != 1.0:
        text = f"{chosen.label}, {best.gain:.2f}× of plain (measured)"
        text += f", compiled in {in_time(best.compile_s)}" if best.compile_s else ""
    if text == "plain" and others:
        text += f" ({'; '.join(describe(trial) for trial in others)}; measured)"
    warning = ""
    if asked.compile is True and not chosen.compile:
        problem = next((trial.problem for trial in measured.trials if trial.kernels.compile and trial.problem), "")
        warning = f"training.compile = true is left out, and the model computed without it: {problem}"
    if asked.precision == "bf16" and best is not None and not best.problem:
        same = measured.find(msgspec.structs.replace(chosen, precision="fp32"))
        if same is not None and not same.problem and best.gain < same.gain:
            warning = (
                f"training.precision = 'bf16' is slower here than 'fp32': {best.gain / same.gain:.2f}× (measured). Set "
                "it to 'fp32', or to 'auto' to have the faster one taken"
            )
    return Choice(training, text, warning, measured.trials)


def describe(trial: Trial) -> str:
    """Return what one way would bring, in words."""
    if trial.problem:
        return f"{trial.kernels.label} is left out: {trial.problem}"
    return f"{trial.kernels.label} {trial.gain:.2f}×" + (
        f" (compiled in {in_time(trial.compile_s)})" if trial.compile_s else ""
    )


def _computes_like(kernels: Kernels, other: Kernels) -> bool:
    return (kernels.memory_format, kernels.precision) == (other.memory_format, other.precision)


@torch.no_grad()
def _try_out(parts: Components, kernels: Kernels) -> str:
    """Return why a model cannot be computed this way, "" where it can: it may have changed since it was measured."""
    model, was_training = parts.model, parts.model.training
    computation = dataclasses.replace(
        parts.computation, memory_format=kernels.memory_format, precision=kernels.precision, compiler=None
    )
    model.eval()
    try:
        batch = parts.example.map(lambda tensor: tensor.to(next((p.device for p in model.parameters()), "cpu")))
        with computation.autocast():
            computation.outputs(model, computation.to_device(batch))
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        return _in_words(error)
    finally:
        model.train(was_training)
    return ""


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _allowed(asked: Training, parts: Components, *, may_compile: bool) -> list[Kernels]:
    """Return the ways that the job leaves open, the plainest first."""
    formats = [parts.job.training.memory_format]
    if asked.memory_format == "auto" and _has_image_convolutions(parts):
        formats = ["contiguous", "channels_last"]
    precisions = ["fp32", "bf16"] if asked.precision == "auto" else [asked.precision]
    threads = _thread_counts(parts) if asked.threads == "auto" else [0]
    compiling = [asked.compile is True]
    if asked.compile == "auto" and may_compile and entry_of(parts.job).can_compile and env.cxx_compiler():
        compiling = [False, True]
    return [
        Kernels(memory_format=memory_format, precision=precision, threads=number, compile=compiled)
        for number, compiled, memory_format, precision in itertools.product(threads, compiling, formats, precisions)
    ]


def _shown(asked: Training, parts: Components) -> list[Kernels]:
    """Return the ways that a plan tells of as well, whether or not the job allows them."""
    if asked.precision == "fp16":
        return []
    formats = ["contiguous", "channels_last"] if _has_image_convolutions(parts) else ["contiguous"]
    return [
        Kernels(memory_format=memory_format, precision=precision)
        for memory_format, precision in itertools.product(formats, ["fp32", "bf16"])
    ]


def _thread_counts(parts: Components) -> list[int]:
    """Return 0, which is the worker's share of the cores, and smaller numbers."""
    share = max(1, usable_cores() // parts.team.num_local_workers)
    return [0, *sorted({number for number in (1, share // 2) if 1 <= number < share}, reverse=True)]


def _has_image_convolutions(parts: Components) -> bool:
    has_images = any(map(is_image, tree.leaves(parts.example.inputs)))
    return has_images and any(isinstance(module, _CONVOLUTIONS) for module in parts.model.modules())


def kernels_key(parts: Components) -> str:
    """Return what measurements depend on. The workers are none of it: the same way is taken for any number of them."""
    job = parts.job
    model = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in parts.model.named_parameters()]
    settings = job.to_dict()
    return key_of(
        describe_machine(),
        str(settings["model"]),
        str(parts.model),
        *model,
        str(parts.splits.input_shape),
        str(settings["loss"]),
        str(settings["optimizer"]),
        f"{job.training.batch_size} {job.training.accumulate} {job.training.threads} {parts.computation.device}",
    )


def _measured(
    parts: Components, wanted: Sequence[Kernels], *, may_always_measure: bool, tell: Callable[[str], None]
) -> Measured | None:
    """Return what is known of these ways, from the cache or measured; None where that is not worth it."""
    key = kernels_key(parts)
    known = read_kept("kernels", key, Measured)
    if known is not None and known.knows(wanted) and not (may_always_measure and known.was_busy):
        return known
    if isinstance(parts.splits.train, IterableSource) or parts.is_online:
        return None  # reading ahead would lose samples
    if not may_always_measure and not _is_worth_it(parts, len(wanted)):
        log.info("kernels were not measured: the run is too short for it")
        return None
    busy = is_busy()
    tell("measuring how kernels compute the model")
    trials = measure(parts, wanted)
    kept = () if known is None else tuple(t for t in known.trials if t.kernels not in wanted)
    found = Measured(trials=(*trials, *kept), was_busy=busy)
    keep("kernels", key, found)
    return found


def _is_worth_it(parts: Components, num_ways: int) -> bool:
    """Return whether the run is so long that measuring is a small share of it."""
    steps: list[float] = [number for number in (parts.total_steps, parts.job.stop.steps) if number is not None]
    needed = num_ways * (LEAST_ROUNDS + 2)
    if not steps or needed > MOST_SHARE * min(steps):
        return False
    limit_s = parts.job.stop.time_s
    return limit_s is None or needed * estimate_step_s(parts) <= MOST_SHARE * limit_s


def _run_s(parts: Components) -> float:
    """Return about how long the run takes in the plain way; 0 where its length is not known."""
    steps = [number for number in (parts.total_steps, parts.job.stop.steps) if number is not None]
    if not steps or isinstance(parts.splits.train, IterableSource) or parts.is_online:
        return 0.0
    return min(min(steps) * estimate_step_s(parts), parts.job.stop.time_s or math.inf)


def measure(parts: Components, wanted: Sequence[Kernels], *, budget_s: float = BUDGET_S) -> list[Trial]:
    """Take passes of each way in turn, on a copy of the model. The first way is what others are compared with."""
    model = copy_of(parts)
    whole = first_batch(parts)
    batch = split_batch(whole, parts.job.training.accumulate)[0]
    if not any(kernels.compile for kernels in wanted):  # compiled code is for one size, and kept for the workers
        batch = batch.rows(0, MOST_SAMPLES)
    num_threads = torch.get_num_threads()
    ways = {kernels: _Way(parts.computation, kernels, num_threads, batch.num_samples) for kernels in wanted}
    plain = wanted[0]
    try:
        expected = ways[plain].first(model, batch)
        problems = dict.fromkeys(wanted, "")
        compile_s = dict.fromkeys(wanted, 0.0)
        for kernels, way in ways.items():
            started = time.perf_counter()
            try:
                problems[kernels] = _difference(expected, way.first(model, batch), kernels.precision)
            except Exception as error:  # noqa: BLE001 - whatever the model raises
                problems[kernels] = _in_words(error)
            compile_s[kernels] = time.perf_counter() - started if kernels.compile else 0.0
        able = [kernels for kernels in wanted if not problems[kernels]]
        times: dict[Kernels, list[float]] = {kernels: [] for kernels in able}
        deadline = time.perf_counter() + budget_s
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and (time.perf_counter() > deadline or is_settled(list(times.values()))):
                break
            for kernels in able:
                times[kernels].append(ways[kernels].timed(model, batch))
    finally:
        torch.set_num_threads(num_threads)
    optimizer_s = _optimizer_s(parts, model)
    num_passes = whole.num_samples / batch.num_samples  # of a step, as far as time goes
    trials = []
    for kernels in wanted:
        if problems[kernels] or plain not in times:
            trials.append(Trial(kernels=kernels, problem=problems[kernels] or "the plain way failed"))
            continue
        pairs = zip(times[plain], times[kernels], strict=True)
        gain = statistics.median(
            (usual * num_passes + optimizer_s) / (own * num_passes + optimizer_s) for usual, own in pairs
        )
        trials.append(Trial(kernels=kernels, gain=gain, compile_s=compile_s[kernels]))
    return trials


def is_settled(times: Sequence[Sequence[float]]) -> bool:
    """Return whether more rounds would hardly move the median ratio of any way to the first. Pure.

    By `SETTLED` of it, in two of three cases: the deviation of a median is that of what it is taken of times 1.25,
    over the root of their number.
    """
    if min(map(len, times), default=0) < LEAST_SETTLED:
        return False
    for own in times[1:]:
        ratios = [usual / each for usual, each in zip(times[0], own, strict=True)]
        middle = statistics.median(ratios)
        deviation = 1.48 * statistics.median(abs(ratio - middle) for ratio in ratios)
        if 1.25 * deviation / math.sqrt(len(ratios)) > SETTLED * middle:
            return False
    return True


class _Way:
    """Computes passes in one way."""

    def __init__(self, computation: Computation, kernels: Kernels, num_threads: int, num_samples: int) -> None:
        compiler = Compiler(falls_back=False) if kernels.compile else None
        if compiler is not None:
            compiler.expect(num_samples, 1)
        self._computation = dataclasses.replace(
            computation, memory_format=kernels.memory_format, precision=kernels.precision, compiler=compiler
        )
        self._num_threads = kernels.threads or num_threads

    def first(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """Return the loss and the norm of the gradient. Every way draws the same random numbers."""
        torch.manual_seed(0)
        loss = self._pass(model, batch)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        model.zero_grad()
        return loss, norm

    def timed(self, model: nn.Module, batch: Batch) -> float:
        started = time.perf_counter()
        self._pass(model, batch)
        if self._computation.device.type == "cuda":
            torch.cuda.synchronize(self._computation.device)
        seconds = time.perf_counter() - started
        model.zero_grad()
        return seconds

    def _pass(self, model: nn.Module, batch: Batch) -> float:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        total = self._computation.loss.count_batch(batch)
        return self._computation.forward_backward(model, [batch], total_count=total, measure=False).mean


def _difference(expected: tuple[float, float], found: tuple[float, float], precision: str) -> str:
    """Return how far what was found is from what was expected, in words; "" where that is rounding."""
    limits = TOLERANCES[precision]
    for what, usual, own, limit in zip(("loss", "norm of the gradient"), expected, found, limits, strict=True):
        if not abs(own - usual) <= limit * max(abs(usual), 1e-6):
            return (
                f"it changes the {what} of the first batch from {usual:.6g} to {own:.6g}, which is more than rounding"
            )
    return ""


def _optimizer_s(parts: Components, model: nn.Module) -> float:
    """Return what the optimizer takes, which no way changes."""
    optimizer = parts.recipe.make(model.named_parameters())
    times = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        started = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - started)
    model.zero_grad()
    return min(times)
