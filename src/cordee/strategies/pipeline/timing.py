"""How long each block of a model takes, measured where it will run."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from cordee.compute import Computation
from cordee.models.blocks import Chain

_NUM_TRIALS = 3
_LONG_S = 0.5  # blocks that take longer are measured once: nothing disturbs them by much


def measure_blocks(chain: Chain, inputs: Tensor, computation: Computation) -> list[float]:
    """Return the seconds of a forward and a backward pass of each block on these inputs. Gradients are left empty.

    Local. The caller keeps what the model counts while it computes (`unchanged`).
    """
    times = []
    for block in chain.blocks:
        seconds, outputs = _once(block, inputs, computation)  # the first time allocates
        num_trials = _NUM_TRIALS if seconds < _LONG_S else 0
        for _ in range(num_trials):
            again, outputs = _once(block, inputs, computation)
            seconds = min(seconds, again)
        times.append(seconds)
        inputs = outputs
        for parameter in block.parameters():
            parameter.grad = None
    return times


def _once(block: object, inputs: Tensor, computation: Computation) -> tuple[float, Tensor]:
    assert callable(block)
    leaf = inputs.detach()
    if leaf.is_floating_point():
        leaf = leaf.clone().requires_grad_()
    started = time.perf_counter()
    with computation.autocast():
        outputs: Tensor = block(leaf)
    if outputs.requires_grad:
        outputs.backward(torch.ones_like(outputs))  # type: ignore[no-untyped-call]
    return time.perf_counter() - started, outputs.detach()
