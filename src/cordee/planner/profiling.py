"""Measures a job's model in this process: blocks, memory, and whole steps on its real data."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import sys
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import torch
from torch import nn

from cordee.cluster import Team
from cordee.compute import split_batch
from cordee.compute.devices import MemoryWatch
from cordee.core import Batch, Job, tree
from cordee.core.errors import ModelError
from cordee.core.references import texts_in
from cordee.planner.measurements import ModelProfile, Timing, describe_machine, key_of
from cordee.planner.measuring import (
    describe_blocks,
    measure_pass_memory,
    name_blocks,
    time_blocks,
    time_call,
    time_steps,
)
from cordee.strategies.table import usual_strategy
from cordee.training.components import Components, assemble

BUDGET_S = 4.0  # for each number of processes; a slow model takes three steps of each kind, whatever they take
PASSES_AT_ONCE = 4  # of a small part of a batch, that are measured one after the other
DESCRIBED_SAMPLES = 16  # of which the memory is counted


def sharing(job: Job, num_workers: int) -> Job:
    """Return the job as one of so many workers would compute it, each with its share of the batch."""
    name = usual_strategy(num_workers)
    strategy = msgspec.structs.replace(job.strategy, name=name, workers=num_workers, settings={})
    return msgspec.structs.replace(job, strategy=strategy)


def profile_key(parts: Components) -> str:
    """Return what a profile depends on: the model, its data and optimizer, the threads, the machine."""
    job, training = parts.job, parts.job.training.plain()
    model = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in parts.model.named_parameters()]
    settings = job.to_dict()
    return key_of(
        describe_machine(),
        str(parts.model),
        *model,
        str(parts.splits.input_shape),
        str(settings["data"]),
        str(settings["loss"]),
        str(settings["optimizer"]),
        f"{training.batch_size} {training.accumulate} {training.precision} {training.clip_norm}",
        f"{training.threads} {training.memory_format} {training.compile} {parts.computation.device}",
        f"{training.recompute}",
        *code_of(parts),
    )


def code_of(parts: Components) -> list[str]:
    """Return the modules of the user's own that a job is made of, each with what its file says now."""
    names = {type(module).__module__ for module in parts.model.modules()}
    names |= {text.partition(":")[0] for text in texts_in(parts.job.to_dict()) if ":" in text}
    described = []
    for name in sorted(names):
        if name.partition(".")[0] in ("torch", "cordee", "builtins"):
            continue  # whose versions are part of every key
        path = Path(name) if name.endswith(".py") else Path(getattr(sys.modules.get(name), "__file__", None) or "")
        with contextlib.suppress(OSError):
            described.append(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return described


def take_profile(parts: Components, *, budget_s: float = BUDGET_S) -> ModelProfile:
    """Measure one process. `parts` stay as they are: a copy of the model is trained, and thrown away."""
    model = copy_of(parts)
    batch = first_batch(parts)
    few = batch.rows(0, DESCRIBED_SAMPLES)

    def take_pass(samples: int) -> None:
        _fill_gradients(parts, model, batch.rows(0, samples))
        model.zero_grad()  # as after a step: gradients that are there would be added to, beside the new ones

    at_once = math.ceil(batch.num_samples / parts.job.training.accumulate)
    pass_bytes, fixed_bytes = measure_pass_memory(take_pass, at_once)
    timings, state_bytes = take_timings(parts, num_processes=1, budget_s=budget_s)
    blocks = describe_blocks(model, parts.computation, few)
    _, is_chain = name_blocks(model)
    return ModelProfile(
        blocks=blocks,
        timings=tuple(timings),
        optimizer_state_bytes=state_bytes,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=sum(leaf.element_size() * leaf[0].numel() for leaf in tree.leaves(few.inputs)),
        is_chain=is_chain,
        precision=parts.job.training.precision,
        pass_bytes=pass_bytes,
        fixed_bytes=max(0.0, fixed_bytes - sum(block.parameter_bytes for block in blocks)),  # less the gradients
    )


def take_memory(parts: Components, watch: MemoryWatch) -> tuple[float, float]:
    """Return the bytes of a pass per sample, and all else that this process took since `watch` but the model's own.

    For a process that has computed nothing yet. The model, its gradients and the optimizer's state are not counted.
    """
    model = parts.model.to(parts.computation.device)
    batch = first_batch(parts)
    at_once = math.ceil(batch.num_samples / parts.job.training.accumulate)
    few = at_once // 4
    if few < 1 or not watch.peak_bytes():
        return 0.0, 0.0
    peaks = []
    for count in (few, at_once):
        for _ in range(2):
            _fill_gradients(parts, model, batch.rows(0, count))
            model.zero_grad()
        peaks.append(watch.peak_bytes())
    with contextlib.closing(_endless(parts)) as batches:  # what the loader reads ahead
        for _, loaded in zip(range(2), batches, strict=False):
            _fill_gradients(parts, model, split_batch(loaded, parts.job.training.accumulate)[0])
            model.zero_grad()
    per_sample = max(0.0, (peaks[1] - peaks[0]) / (at_once - few))
    own = 2 * sum(p.numel() * p.element_size() for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    return per_sample, max(0.0, watch.peak_bytes() - watch.start_bytes - own - per_sample * at_once)


def take_timings(parts: Components, *, num_processes: int, budget_s: float) -> tuple[list[Timing], int]:
    """Return timings at this worker's share of the batch and at small parts of it, and the optimizer's bytes.

    `num_processes` is how many processes do this at the same time. Whole steps are taken as the trainer takes them,
    on batches from the loader, and passes over small parts as micro-batches are; the blocks' times are then scaled so
    that their sum is the step's or the pass's.
    """
    model = copy_of(parts)
    optimizer = parts.recipe.make(model.named_parameters())
    accumulate = parts.job.training.accumulate
    count = parts.computation.loss.count_batch

    def take_step(batch: Batch) -> None:
        pieces = split_batch(batch, accumulate)
        total = sum(count(piece) for piece in pieces)
        parts.computation.forward_backward(model, pieces, total_count=total, measure=False)
        optimizer.step()
        optimizer.zero_grad()

    with contextlib.closing(_endless(parts)) as batches:
        step_s = time_steps(batches, take_step, budget_s=budget_s * 0.5)
    whole = first_batch(parts)
    _fill_gradients(parts, model, whole)
    optimizer_s = time_call(optimizer.step, budget_s=budget_s * 0.05)
    state_bytes = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    optimizer.zero_grad()
    piece = split_batch(whole, accumulate)[0]
    # Micro-batches are small, and small batches take longer than their share: three sizes, a quarter each.
    sizes = [piece.num_samples // part for part in (1, 4, 16) if piece.num_samples // part >= (2 if part > 1 else 1)]
    timings: list[Timing] = []
    for samples in sizes:
        some = piece.rows(0, samples)
        times = time_blocks(model, parts.computation, some, budget_s * 0.08)
        is_whole = not timings
        if is_whole:
            pass_s = (step_s - optimizer_s) / accumulate
        else:
            pass_s = _pass_s(parts, model, piece, samples, budget_s * 0.07)
        in_blocks = sum(times.forward_s) + sum(times.backward_s)
        if is_whole:  # the rest is the loader's and the loop's
            scale = min(1.0, pass_s / in_blocks) if pass_s > 0 else 1.0
        else:
            scale = max(0.0, pass_s - times.loss_s) / in_blocks
        timings.append(
            Timing(
                num_processes=num_processes,
                num_threads=parts.num_threads,
                samples=samples,
                forward_s=tuple(seconds * scale for seconds in times.forward_s),
                backward_s=tuple(seconds * scale for seconds in times.backward_s),
                optimizer_s=optimizer_s,
                # The loss, and the batch's way into the step, which grows with the samples.
                other_s=max(0.0, pass_s - scale * in_blocks)
                if is_whole
                else max(times.loss_s, timings[0].other_s * samples / sizes[0]),
            )
        )
    return timings, state_bytes


def _pass_s(parts: Components, model: nn.Module, piece: Batch, samples: int, budget_s: float) -> float:
    """Return the seconds of a pass over `samples`, as one of several whose gradients add up."""
    pieces = [piece.rows(start, start + samples) for start in range(0, piece.num_samples - samples + 1, samples)][
        :PASSES_AT_ONCE
    ]

    def take() -> None:
        parts.computation.forward_backward(model, pieces, total_count=piece.num_samples, measure=False)
        model.zero_grad()

    return time_call(take, budget_s=budget_s) / len(pieces)


def estimate_step_s(parts: Components) -> float:
    """Return about how long a step takes, by taking one twice."""
    model = copy_of(parts)
    batch = first_batch(parts)
    spent = math.inf
    for _ in range(2):
        started = time.perf_counter()
        _fill_gradients(parts, model, batch)
        spent = min(spent, time.perf_counter() - started)
    return spent


def assemble_alone(job: Job) -> Components:
    return assemble(sharing(job, 1), Team())


def first_batch(parts: Components) -> Batch:
    with contextlib.closing(parts.train.in_one_piece().batches(0)) as batches:
        first = next(iter(batches))
    assert isinstance(first, Batch)
    return first


def copy_of(parts: Components) -> nn.Module:
    try:
        model = copy.deepcopy(parts.model)
    except Exception as error:
        raise ModelError(f"the model cannot be copied, so it cannot be profiled: {error}") from error
    return model.train().to(parts.computation.device)


def _endless(parts: Components) -> Generator[Batch]:
    epoch = 0
    while True:
        num_batches = 0
        with contextlib.closing(parts.train.in_one_piece().batches(epoch)) as batches:
            for batch in batches:
                assert isinstance(batch, Batch)
                num_batches += 1
                yield batch
        if not num_batches:
            return
        epoch += 1


def _fill_gradients(parts: Components, model: nn.Module, batch: Batch) -> None:
    total = parts.computation.loss.count_batch(batch)
    parts.computation.forward_backward(model, [batch], total_count=total, measure=False)
