"""Refuse a unit that is used twice under re-entrant checkpointing: FSDP2 would lose a part of its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cordee.core.errors import ModelError


def refuse_repeated_recomputation(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let the backward pass raise ModelError where it would lose gradients. To be called before `fully_shard`.

    Re-entrant checkpointing computes a unit without a graph first and builds the graph in the backward pass. FSDP2
    takes a call in the backward pass for a recomputation whose hooks exist already (torch 2.13,
    `FSDPState._pre_forward`). That is wrong once the unit has been through a backward pass: nobody sums the gradients
    of the next.
    """
    names = {module: name for name, module in model.named_modules()}
    _Watch(model, {unit: names[unit] for unit in units if unit is not model})


class _Watch:
    """How often each unit was called in the present forward pass, and which of them without a graph."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._num_calls: Counter[nn.Module] = Counter()
        self._without_graph: set[nn.Module] = set()
        self._is_forward = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for unit in names:
            unit.register_forward_pre_hook(self._count)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._num_calls.clear()
        self._without_graph.clear()
        self._is_forward = True

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        self._is_forward = False

    def _count(self, unit: nn.Module, inputs: Any) -> None:
        if self._is_forward:
            self._num_calls[unit] += 1
            if not torch.is_grad_enabled():
                self._without_graph.add(unit)
        elif unit in self._without_graph and self._num_calls[unit] > 1:
            raise ModelError(
                f"'{self._names[unit]}' is used {self._num_calls[unit]} times in a forward pass, under re-entrant "
                "checkpointing, and strategy 'sharded' would lose a part of its gradient: use "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or set strategy.unit_bytes above the "
                f"{sum(parameter.nbytes for parameter in unit.parameters()):,} bytes of its parameters"
            )
