"""Activation recomputation: parts of a model are computed again in the backward pass instead of kept.

The second time a part computes what it computed the first time: with the same random numbers, with its buffers as they
were, and counting nothing twice.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cordee.core.errors import ModelError
from cordee.models.effects import own_attributes


def recomputed(module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `run` computes with the modules in `module`; the backward pass computes it again."""
    start = _ModuleState(module)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = _ModuleState(module)
        start.load_copies()
        try:
            yield
        finally:
            now.restore()

    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), again()),
        # A pass that ended in the middle would leave behind what its hooks had begun (slices' random numbers).
        early_stop=False,
        **kwargs,
    )


class _ModuleState:
    """What modules hold beside parameters, and the random numbers torch does not keep itself."""

    def __init__(self, outer: nn.Module) -> None:
        modules = list(outer.modules())
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        tensors = {id(t): t for _, buffers in self._buffers for t in buffers.values() if t is not None}
        self._values = {key: tensor.clone() for key, tensor in tensors.items()}
        self._attributes = [(module, own_attributes(module)) for module in modules]
        self._random = random.getstate(), np.random.get_state()

    def load_copies(self) -> None:
        """Let the modules compute with copies of what they held; these may be changed."""
        for module, buffers in self._buffers:
            for name, tensor in buffers.items():
                module._buffers[name] = None if tensor is None else self._values[id(tensor)]
        self._put_rest()

    def restore(self) -> None:
        """Give the modules their own tensors again."""
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        self._put_rest()

    def _put_rest(self) -> None:
        for module, attributes in self._attributes:
            vars(module).update(attributes)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])


# Which parts of a model are computed again, where the strategy does not cut it into stages.


def recompute_blocks(model: nn.Module) -> None:
    """Let the blocks of a model be computed again in the backward pass. A second call changes nothing.

    Blocks are the outermost elements of an nn.Sequential or nn.ModuleList that have modules inside. Of a model that is
    a plain sequence of layers, runs of layers are: about as many as each has layers. Raises ModelError if there are
    neither.
    """
    if blocks := _blocks(model):
        for block in blocks:
            if not isinstance(vars(block).get("forward"), _Recomputing):
                block.forward = _Recomputing(block)
        return
    flat = [module for module in model.modules() if isinstance(module, nn.Sequential) and len(module) >= 4]
    if not flat:
        raise ModelError(
            f"training.recompute = true: the model {type(model).__name__} has no blocks, elements of an nn.Sequential "
            "or nn.ModuleList that have modules inside, nor a sequence of four layers: use "
            "torch.utils.checkpoint in the model itself"
        )
    for sequence in flat:
        if not isinstance(vars(sequence).get("forward"), _RecomputingRuns):
            sequence.forward = _RecomputingRuns(sequence)  # type: ignore[method-assign]


def _blocks(module: nn.Module) -> list[nn.Module]:
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList))
    found: list[nn.Module] = []
    for child in module.children():
        has_inner = next(child.children(), None) is not None
        if is_list and has_inner and not isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            found.append(child)
        elif has_inner:
            found += _blocks(child)
    return found


class _Recomputing:
    """The forward pass of a block. An object, so that it is copied with the model."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return recomputed(self._block, self._forward, *args, **kwargs)


class _RecomputingRuns:
    """The forward pass of a sequence, in runs of layers."""

    def __init__(self, sequence: nn.Sequential) -> None:
        self._sequence = sequence
        self._run_length = math.isqrt(len(sequence))

    def __call__(self, inputs: Any) -> Any:
        layers = list(self._sequence)
        for start in range(0, len(layers), self._run_length):
            run = nn.Sequential(*layers[start : start + self._run_length])
            # The last run's activations are needed at once.
            is_last = start + self._run_length >= len(layers)
            inputs = run(inputs) if is_last or not torch.is_grad_enabled() else recomputed(run, run, inputs)
        return inputs
