"""Two stages on one host: `pipeline` against torch.distributed.pipelining on gloo, written by hand, with the same cut.

One kernel thread per process for everybody; samples per second. The share of their time in which stages idle is what is
left when their forward and backward passes are taken off: waiting for each other, messages, the optimizer, the loop. In
theory, with equal stages and free messages, it is (stages - 1) / (micro-batches + stages - 1). `one worker` computes
the same micro-batches one after the other; `two alone` are two such workers at the same time, each with a model of its
own, which is what these cores do when both are busy all the time.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from cordee.bench.contest import Contestant, Loop
from cordee.bench.pipeline_loops import MODELS, Work, alone_loop, cordee_loop, measure_cut, torch_loop
from cordee.bench.report import Report, describe_machine, interleave, median_ratio, medians

NUM_STAGES = 2
NUM_MICROBATCHES = 8
ALONE = "two alone"
LEAST_RATIO = 1.0
LARGEST_GAP = 0.10  # between the idle share and theory


class _Heat(NamedTuple):
    model: str
    schedule: str
    num_steps: int  # per round: one to three seconds


HEATS = (_Heat("resnet20", "1f1b", 5), _Heat("gpt", "1f1b", 6), _Heat("gpt", "gpipe", 6))


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    cuts: dict[str, list[int]] = {}
    for heat in HEATS:
        if heat.model not in cuts:
            cuts[heat.model] = _cut(heat.model)
        label = f"{heat.model}, {heat.schedule}"
        say(f"{label}: {cuts[heat.model]} blocks on the stages, {heat.num_steps} steps a round")
        work = Work(heat.model, heat.schedule, NUM_MICROBATCHES, tuple(cuts[heat.model]))
        loops: dict[str, Loop] = {
            "cordee": partial(cordee_loop, work=work),
            "torch on gloo": partial(torch_loop, work=work, backend="gloo"),
            "torch on cordee": partial(torch_loop, work=work, backend="cordee"),
            "one worker": partial(alone_loop, work=work),
            ALONE: partial(alone_loop, work=work),
        }
        with contextlib.ExitStack() as stack:
            running = {
                name: stack.enter_context(contextlib.closing(_start(name, loop, heat))) for name, loop in loops.items()
            }
            shares: dict[str, list[float]] = {name: [] for name in running}
            figures = interleave({name: _noting(one, shares[name]) for name, one in running.items()}, rounds, say)
        idle = {name: [1 - share for share in noted[1:]] for name, noted in shares.items() if _is_split(name)}
        raw |= {f"{label}, {name}": values for name, values in figures.items()}
        raw |= {f"{label}, {name}, idle share": values for name, values in idle.items()}
        rows += _rows(label, figures, idle)
    settings = {
        "stages": NUM_STAGES,
        "microbatches": NUM_MICROBATCHES,
        "batch_size": {name: model.batch_size for name, model in MODELS.items()},
        "blocks_per_stage": cuts,
        "threads_per_worker": 1,
        "rounds": rounds,
        "steps_per_round": {f"{heat.model}, {heat.schedule}": heat.num_steps for heat in HEATS},
    }
    return Report("pipeline", describe_machine(), settings, raw, "samples/s", rows)


def _cut(model: str) -> list[int]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the contestants have
    try:
        return measure_cut(model, NUM_STAGES, NUM_MICROBATCHES)
    finally:
        torch.set_num_threads(num_threads)


def _start(name: str, loop: Loop, heat: _Heat) -> Contestant:
    size = 1 if name == "one worker" else NUM_STAGES
    # A contestant counts the samples of all its processes; those of a pipeline have one batch between them.
    num_sharing = size if _is_split(name) else 1
    batch_size = MODELS[heat.model].batch_size // num_sharing
    return Contestant(loop, size=size, num_steps=heat.num_steps, batch_size=batch_size)


def _is_split(name: str) -> bool:
    return name not in ("one worker", ALONE)


def _noting(contestant: Contestant, shares: list[float]) -> Callable[[], float]:
    """Return a call of the contestant that also keeps the share of its time that it computed; the first warms up."""

    def call() -> float:
        figure = contestant()
        shares.append(contestant.busy_share)
        return figure

    return call


def _rows(
    label: str, figures: Mapping[str, list[float]], idle_shares: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    middle = medians(figures)
    theory = (NUM_STAGES - 1) / (NUM_MICROBATCHES + NUM_STAGES - 1)
    rows = []
    for name in figures:
        ratio = median_ratio(figures["cordee"], figures[name])
        idle = statistics.median(idle_shares[name]) if name in idle_shares else None
        outcome = ""
        if name == "torch on gloo":
            outcome = "reached" if ratio >= LEAST_RATIO else "MISSED"
        elif name == "cordee":
            outcome = "reached" if idle is not None and idle - theory <= LARGEST_GAP else "MISSED"
        rows.append(
            {
                "model": label,
                "contestant": name,
                "samples_per_second": middle[name],
                "cordee_is_times": ratio,
                "idle_share": idle,
                "idle_in_theory": theory if _is_split(name) else None,
                "outcome": outcome,
            }
        )
    return rows
