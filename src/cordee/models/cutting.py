"""A model as a chain of blocks, and where the chain is cut into stages: by time, or by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from cordee.core.errors import JobError, ModelError, nearest
from cordee.models.effects import EffectError, refuse_python_state, unchanged
from cordee.models.tracing import trace_chain


def cut_by_time(times: Sequence[float], num_stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets, so that the slowest stage is as fast as it can be.

    Among the cuts that are equally good in this the most even one is taken. Every stage gets at least one block.
    """
    num_blocks = len(times)
    assert 1 <= num_stages <= num_blocks
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    # best[k][n]: the slowest stage, the sum of squares, and where the last of k stages over n blocks starts
    best = [[(float("inf"), float("inf"), 0)] * (num_blocks + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for k in range(1, num_stages + 1):
        for n in range(k, num_blocks - (num_stages - k) + 1):
            best[k][n] = min(
                (max(best[k - 1][m][0], sums[n] - sums[m]), best[k - 1][m][1] + (sums[n] - sums[m]) ** 2, m)
                for m in range(k - 1, n)
            )
    counts: list[int] = []
    end = num_blocks
    for k in range(num_stages, 0, -1):
        start = best[k][end][2]
        counts.append(end - start)
        end = start
    return counts[::-1]


def cut_by_hand(blocks: Sequence[Sequence[str]], placement: Sequence[Sequence[str]]) -> list[int]:
    """Return how many consecutive blocks each stage gets where its modules are named, by patterns like "layer[1-3]".

    `blocks` are the names of the modules of each. A name also stands for the modules inside it. Raises JobError for
    names that no module has, for modules that are in no stage or in two, for stages that are empty or not runs of
    consecutive blocks, and where a block would be cut apart.
    """
    names = [name for block in blocks for name in block]
    stage_of: dict[str, int] = {}
    unused = {pattern for patterns in placement for pattern in patterns}
    for name in names:
        found = [(k, p) for k, patterns in enumerate(placement) for p in patterns if _matches(name, p)]
        unused -= {pattern for _, pattern in found}
        stages = sorted({stage for stage, _ in found})
        if len(stages) != 1:
            where = f"in stages {', '.join(map(str, stages))}" if stages else "in no stage"
            raise JobError(
                f"strategy.placement puts block '{name}' {where}: it must be in one (blocks: {listed(names)})"
            )
        stage_of[name] = stages[0]
    if unused:
        pattern = sorted(unused)[0]
        raise JobError(f"strategy.placement names '{pattern}', which no block has{nearest(pattern, names)}")
    for stage in range(len(placement)):
        if stage not in stage_of.values():
            raise JobError(f"strategy.placement gives stage {stage} no blocks: name some, or remove it")
    for before, after in itertools.pairwise(names):
        if stage_of[after] not in (stage_of[before], stage_of[before] + 1):
            raise JobError(
                f"strategy.placement puts block '{after}' into stage {stage_of[after]} after one of stage "
                f"{stage_of[before]}: stages must be runs of consecutive blocks, in order (blocks: {listed(names)})"
            )
    for first, *others in blocks:
        for other in others:
            if stage_of[other] != stage_of[first]:
                raise JobError(
                    f"strategy.placement puts '{first}' and '{other}' into different stages, and they cannot be cut "
                    "apart, since one changes the other's output in place or takes slices of it: put them into one"
                )
    return [sum(stage_of[block[0]] == stage for block in blocks) for stage in range(len(placement))]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return the names as one text that is not too long."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


# A model as a chain of blocks: what may be cut apart, and what passes from one block to the next.
#
# A block takes one tensor and gives one. Residual skips are inside blocks. A plain `nn.Sequential` is a chain of its
# children, sequences inside it included; other models are traced (`tracing.py`).


@dataclass(frozen=True)
class Block:
    """Modules that are computed one after the other and are never cut apart."""

    names: tuple[str, ...]  # of its modules
    modules: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def __call__(self, inputs: Tensor) -> Tensor:
        for module in self.modules:
            inputs = module(inputs)
        return inputs

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def buffers(self) -> list[Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers()]

    def __add__(self, other: Block) -> Block:
        return Block(self.names + other.names, self.modules + other.modules)


@dataclass(frozen=True)
class Wire:
    """What a block gives for a batch of any size: each dimension is `base` + `per_sample` · samples."""

    base: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, num_samples: int) -> tuple[int, ...]:
        return tuple(base + slope * num_samples for base, slope in zip(self.base, self.per_sample, strict=True))


@dataclass(frozen=True)
class Chain:
    """Blocks in order; `wires[i]` is what block i gives."""

    blocks: tuple[Block, ...]
    wires: tuple[Wire, ...]
    bond: str = ""  # of a traced model: what keeps most of it together, in words


def make_chain(model: nn.Module, example: Tensor) -> Chain:
    """Return the model as a chain of as many blocks as possible. Local; the model is left as it was.

    Raises ModelError, with the operation and what to do, if the model is none.
    """
    with unchanged(model):
        bond = ""
        if type(model) is nn.Sequential:
            named = flatten_sequence(model)
        else:
            named, bond = trace_chain(model, example)
        blocks = [Block((name,), (module,)) for name, module in named]
        if not blocks:
            raise ModelError("the model has no layers: there is nothing to cut")
        _refuse_python_state(model, example)
        model.eval()
        return replace(_join_inseparable(blocks, example), bond=bond)


def _refuse_python_state(model: nn.Module, example: Tensor) -> None:
    try:
        refuse_python_state(model, repeat_to(example, 2))
    except EffectError as error:
        raise ModelError(f"the model {type(model).__name__} cannot be cut into stages: {error}") from error


def flatten_sequence(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules of a sequence by name, those of sequences inside it in their place."""
    flat: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():  # named_children() would leave out a module that is used again
        assert child is not None
        # A subclass may have a forward of its own.
        if type(child) is nn.Sequential:
            flat += flatten_sequence(child, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, child))
    return flat


def _join_inseparable(blocks: Sequence[Block], example: Tensor) -> Chain:
    """Join what cannot be cut: before a block that changes its input in place, after one that gives no tensor."""
    kept: list[Block] = []
    wires: list[Wire | None] = []
    small: Any = repeat_to(example, 2)
    large: Any = repeat_to(example, 3)
    for block in blocks:
        if kept and (wires[-1] is None or _changes_input(block, small)):
            kept[-1] = kept[-1] + block
            del wires[-1]
        else:
            kept.append(block)
        small, large = _output(block, small), _output(block, large)
        is_wire = isinstance(small, Tensor) and isinstance(large, Tensor) and small.ndim == large.ndim
        wires.append(_wire(small, large) if is_wire else None)
    complete = [wire for wire in wires if wire is not None]
    if len(complete) < len(wires):
        raise ModelError(f"block '{kept[-1].name}' at the end of the model does not give a tensor")
    return Chain(tuple(kept), tuple(complete))


def _changes_input(block: Block, inputs: Tensor) -> bool:
    """Whether the block changes its input in place, which the first block of a stage must not."""
    if getattr(block.modules[0], "inplace", False):
        return True
    if not inputs.is_floating_point():
        return False
    try:
        with torch.enable_grad():
            block(inputs.detach().clone().requires_grad_())
    except RuntimeError as error:
        return "in-place" in str(error)
    return False


def _output(block: Block, inputs: Any) -> Any:
    try:
        with torch.no_grad():
            return block(inputs)
    except Exception as error:
        raise ModelError(f"block '{block.name}' cannot be computed by itself: {error}") from error


def _wire(small: Tensor, large: Tensor) -> Wire:
    """Infer from batches of 2 and of 3 samples how a shape grows with the batch."""
    slopes = tuple(b - a for a, b in zip(small.shape, large.shape, strict=True))
    return Wire(tuple(a - 2 * slope for a, slope in zip(small.shape, slopes, strict=True)), slopes, small.dtype)


def repeat_to(example: Tensor, num_samples: int) -> Tensor:
    """Return a batch of `num_samples` made of the samples of `example`, over and over."""
    return example[torch.arange(num_samples) % len(example)]
