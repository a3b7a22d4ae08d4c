"""A model as a chain of blocks: what may be cut apart, and what passes from one block to the next.

A block takes one tensor and gives one. Residual skips are inside blocks. A plain `nn.Sequential` is a chain of its
children, sequences inside it included; other models are traced (`tracing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.effects import EffectError, refuse_python_state, unchanged
from cordee.models.tracing import trace_chain


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
