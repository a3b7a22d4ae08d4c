"""What the graph behind outputs tells about a backward pass before it is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cordee.core.batch import tensors_in


def reached_parameters(outputs: Any) -> list[Tensor] | None:
    """Return the leaves that a backward pass from `outputs` adds a gradient to, each once; None if that is not certain.

    torch adds up all contributions to a leaf before it adds them to its gradient, but only those of one graph. A
    function written in Python may run another backward pass inside: re-entrant checkpointing does.
    """
    roots: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    if not roots:
        return None
    seen: set[Any] = set(roots)
    waiting = list(seen)
    leaves = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        following: Iterable[tuple[Any, int]] = node.next_functions
        for other, _ in following:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return leaves
