"""A stage whose backward pass may be split: first the gradients of its inputs, later those of its parameters."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from cordee.core.passes import PASSES, PassKind


class SplittableStage(PipelineStage):
    """A stage of torch, which trains parameters that are used in several places, and whose passes are recorded."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **keywords: Any) -> Any:
        if not PASSES.is_on:
            return super().forward_one_chunk(fwd_chunk_id, *args, **keywords)
        begin_ns = perf_counter_ns()
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **keywords)
        PASSES.add(PassKind.FORWARD, self.stage_index, fwd_chunk_id, begin_ns)
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **keywords: Any) -> Any:
        if not PASSES.is_on:
            return super().backward_one_chunk(bwd_chunk_id, *args, **keywords)
        begin_ns = perf_counter_ns()
        gradients = super().backward_one_chunk(bwd_chunk_id, *args, **keywords)
        PASSES.add(PassKind.BACKWARD, self.stage_index, bwd_chunk_id, begin_ns)
        return gradients

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        begin_ns = perf_counter_ns()
        groups = self.backward_state.get(bwd_chunk_id, (None, None))[1]
        if groups:
            groups[:] = join_groups(groups)
            own_gradients(groups)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if PASSES.is_on:
            PASSES.add(PassKind.WEIGHTS, self.stage_index, bwd_chunk_id, begin_ns)


def join_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return torch's groups of parameters and of the nodes above them; one group where a parameter is used twice.

    torch goes back once from the nodes of each group, and frees what it has passed. From a parameter that is used in
    several places it also passes what lies between them, where other groups begin: a later group fails. And it may
    leave such a parameter in two groups: its gradient is counted twice where there is nothing to free, as in a sum.
    One pass for all groups adds up the gradients once.
    """
    if all(len(group["intermediates"]) == 1 for group in groups):
        return groups
    nodes: dict[Any, Any] = {}  # with what flows into them
    for group in groups:
        nodes |= dict(zip(group["intermediates"], group["grads"], strict=True))
    parameters = set().union(*(group["params"] for group in groups))
    return [{"params": parameters, "intermediates": list(nodes), "grads": list(nodes.values())}]


def own_gradients(groups: list[dict[str, Any]]) -> None:
    """Give each parameter of torch's groups memory for its gradient, where it has none yet.

    torch takes what a backward pass returns for the first gradient, and adds later ones to it in place. That may be the
    very tensor of another parameter, where two are added to each other, or one that is being sent.
    """
    for group in groups:
        for node in group["params"]:
            if node.variable.grad is None:
                node.variable.grad = torch.zeros_like(node.variable)
