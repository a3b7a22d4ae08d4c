"""Measures a model: blocks one by one, and whole steps as the trainer takes them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from cordee.compute import Computation
from cordee.compute.devices import forget_peak, peak_bytes, release_unused
from cordee.core import Batch
from cordee.core.batch import tensors_in
from cordee.planner.measurements import Block

# Layers whose weights `tensor` can slice over workers.
_SPLITTABLE = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
WARM_UP_STEPS = 2
LEAST_STEPS = 3


class BlockTimes(NamedTuple):
    """Seconds of each block, and of the loss."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    loss_s: float


def name_blocks(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], bool]:
    """Return the blocks with their names, and whether they are a chain: each gets what the one before it gave.

    A chain is an `nn.Sequential`. Of any other model the blocks are the modules that have no parts, and those that
    have parameters of their own.
    """
    if type(model).forward is nn.Sequential.forward and len(list(model.children())) > 1:
        return list(model.named_children()), True
    leaves = [
        (name or type(model).__name__.lower(), module)
        for name, module in model.named_modules()
        if not list(module.children()) or list(module.parameters(recurse=False))
    ]
    return leaves, False


def describe_blocks(model: nn.Module, computation: Computation, batch: Batch) -> tuple[Block, ...]:
    """Return the blocks of `model`, with the memory they take for the samples of `batch`."""
    named, is_chain = name_blocks(model)
    kept = dict.fromkeys(range(len(named)), 0.0)
    outputs = dict.fromkeys(range(len(named)), 0.0)
    batch = computation.to_device(batch)
    # What is there in any case is not kept by a block: parameters, and the batch, a view of several gathered at once.
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch.leaves())}
    current = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:  # a tensor that two operations keep is one tensor
            seen.add(storage.data_ptr())
            kept[current[0]] += storage.nbytes()
        return tensor

    def enter(index: int) -> Callable[..., None]:
        return lambda *_: current.__setitem__(0, index)

    def leave(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            outputs[index] = float(sum(one.numel() * one.element_size() for one in tensors_in(output)))

        return hook

    handles = [module.register_forward_pre_hook(enter(i)) for i, (_, module) in enumerate(named)]
    handles += [module.register_forward_hook(leave(i)) for i, (_, module) in enumerate(named)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), computation.autocast():
            kept_alive = computation.outputs(
                model, batch
            )  # the storages must live until the end, or an address would be seen twice
    finally:
        for handle in handles:
            handle.remove()
    del kept_alive
    counted: set[int] = set()
    blocks = []
    for index, (name, module) in enumerate(named):
        own = [p for p in module.parameters(recurse=is_chain) if p.requires_grad and id(p) not in counted]
        counted |= {id(p) for p in own}
        sliced = {
            id(p) for part in module.modules() if isinstance(part, _SPLITTABLE) for p in part.parameters(recurse=False)
        }
        size = sum(p.numel() for p in own)
        blocks.append(
            Block(
                name=name,
                parameters=size,
                parameter_bytes=sum(p.numel() * p.element_size() for p in own),
                tensors=len(own),
                activation_bytes=kept[index] / batch.num_samples,
                output_bytes=outputs[index] / batch.num_samples,
                sliceable=sum(isinstance(part, _SPLITTABLE) for part in module.modules()),
                splittable=sum(p.numel() for p in own if id(p) in sliced) / size if size else 0.0,
            )
        )
    return tuple(blocks)


def measure_pass_memory(take_pass: Callable[[int], None], samples: int) -> tuple[float, float]:
    """Return the bytes per sample, and beside that, by which a pass raises this process's peak; zeros where unknown.

    From the peaks after passes over a quarter of `samples` and over all of them, by Linux's own books. Memory that the
    process had and does not use hides some of it: this is best asked early.
    """
    few = samples // 4
    release_unused()
    if few < 1 or not forget_peak():
        return 0.0, 0.0
    before = psutil.Process().memory_info().rss
    peaks = []
    for count in (few, samples):
        for _ in range(2):
            take_pass(count)
        peaks.append(peak_bytes())
    # Where the first passes fitted into memory that was there already, the difference alone would be too much.
    per_sample = max(0.0, min((peaks[1] - peaks[0]) / (samples - few), (peaks[1] - before) / samples))
    return per_sample, max(0.0, peaks[0] - before - per_sample * few)


def time_blocks(model: nn.Module, computation: Computation, batch: Batch, budget_s: float) -> BlockTimes:
    """Return the median time of each block over as many passes as `budget_s` allows, three at least.

    The blocks of a chain are computed one by one, forward and backward. Of other models the forward pass is timed
    by hooks; the backward pass as a whole, and shared out as the forward pass is.
    """
    named, is_chain = name_blocks(model)
    modules = [module for _, module in named]
    take = _time_chain if is_chain and _gives_tensors(modules, computation, batch) else _time_leaves
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    losses: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(losses) < LEAST_STEPS or (time.perf_counter() < deadline and len(losses) < 50):
        times = take(model, modules, computation, batch)
        forward.append(list(times.forward_s))
        backward.append(list(times.backward_s))
        losses.append(times.loss_s)
    model.zero_grad()
    return BlockTimes(_medians(forward), _medians(backward), statistics.median(losses))


def time_steps(
    batches: Iterator[Batch], take_step: Callable[[Batch], None], *, budget_s: float, most_steps: int = 200
) -> float:
    """Return the typical seconds from one step to the next, waiting for the batch included."""
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    before = 0.0
    for index, batch in enumerate(batches):
        take_step(batch)
        now = time.perf_counter()
        if index >= WARM_UP_STEPS:
            times.append(now - before)
        before = now
        if len(times) >= most_steps or (len(times) >= LEAST_STEPS and now > deadline):
            break
    return typical_s(times) if times else 0.0


def typical_s(times: Sequence[float]) -> float:
    """Return the median of the means of eight windows: as the windows of a run are looked at.

    Means, for what happens once in several steps counts (batches are gathered several at a time, processes that share
    a core take turns); a median, so that a moment in which the machine did something else does not.
    """
    num_windows = min(8, len(times))
    bounds = [len(times) * index // num_windows for index in range(num_windows + 1)]
    return statistics.median(statistics.fmean(times[a:b]) for a, b in itertools.pairwise(bounds))


def time_call(call: Callable[[], object], *, budget_s: float, most_calls: int = 50) -> float:
    """Return the typical seconds of a call, after one that does not count."""
    return typical_s(_times(call, budget_s, most_calls))


def median_s(call: Callable[[], object], *, budget_s: float) -> float:
    """Return the median seconds of a call that always does the same, after one that does not count."""
    return statistics.median(_times(call, budget_s, math.inf))


def _times(call: Callable[[], object], budget_s: float, most_calls: float) -> list[float]:
    call()
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < LEAST_STEPS or (time.perf_counter() < deadline and len(times) < most_calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


@torch.no_grad()
def _gives_tensors(modules: Sequence[nn.Module], computation: Computation, batch: Batch) -> bool:
    """Whether the modules of a chain take and give one tensor each."""
    x = computation.to_device(batch).inputs
    with computation.autocast():
        for module in modules:
            if not isinstance(x, Tensor):
                return False
            x = module(x)
    return isinstance(x, Tensor) and computation.loss.argument is None


def _time_chain(model: nn.Module, modules: Sequence[nn.Module], computation: Computation, batch: Batch) -> BlockTimes:
    x, targets = computation.to_device(batch)
    forward, stages = [], []
    for module in modules:
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        started = time.perf_counter()
        with computation.autocast():
            output = module(x.clone() if x.requires_grad else x)  # a leaf may not be changed in place
        forward.append(time.perf_counter() - started)
        stages.append((x, output))
        x = output
    last = x.detach().requires_grad_()
    started = time.perf_counter()
    with computation.autocast():
        loss = computation.loss.mean(last, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    loss_s = time.perf_counter() - started
    gradient, backward = last.grad, []
    for x, output in reversed(stages):
        started = time.perf_counter()
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        backward.append(time.perf_counter() - started)
        gradient = x.grad if x.requires_grad else None
    return BlockTimes(tuple(forward), tuple(reversed(backward)), loss_s)


def _time_leaves(model: nn.Module, modules: Sequence[nn.Module], computation: Computation, batch: Batch) -> BlockTimes:
    spent = [0.0] * len(modules)
    began = [0.0] * len(modules)

    def enter(index: int) -> Callable[..., None]:
        return lambda *_: began.__setitem__(index, time.perf_counter())

    def leave(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            spent[index] += time.perf_counter() - began[index]

        return hook

    handles = [module.register_forward_pre_hook(enter(i)) for i, module in enumerate(modules)]
    handles += [module.register_forward_hook(leave(i)) for i, module in enumerate(modules)]
    batch = computation.to_device(batch)
    try:
        started = time.perf_counter()
        with computation.autocast():
            outputs = computation.outputs(model, batch)
        forward_s = time.perf_counter() - started
        started = time.perf_counter()
        with computation.autocast():
            loss = computation.loss.of(outputs, batch.targets)
        loss_s = time.perf_counter() - started
        started = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward_s = time.perf_counter() - started
    finally:
        for handle in handles:
            handle.remove()
    total = sum(spent) or 1.0  # what the model does between its parts is theirs as well
    shares = [seconds / total for seconds in spent]
    return BlockTimes(tuple(s * forward_s for s in shares), tuple(s * backward_s for s in shares), loss_s)


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
