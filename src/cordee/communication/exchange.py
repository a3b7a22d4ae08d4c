"""One all-reduce per step: gradients, and the few numbers all members must know, travel together.

The gradients of a member are sums over its own items divided by a nominal count that all members know. Their
sum over the members, scaled by nominal / actual count, is the gradient of the mean over all items, however
unequal the members' shares. A member without items, or without a gradient for some parameter, adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientExchange:
    """Sums gradients over a group, the default one unless told, through one flat buffer per dtype. Collective."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], num_extras: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        assert self._parameters, "there is nothing to train"
        device = self._parameters[0].device
        # float32 so that it can ride with the gradients, which usually are; counts are exact to 16 million.
        num_tail = len(self._parameters) + num_extras
        self._flats: list[Tensor] = []
        self._views: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        self._tail: Tensor | None = None
        self._aside: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters):
            chosen = [i for i, parameter in enumerate(self._parameters) if parameter.dtype == dtype]
            size = sum(self._parameters[i].numel() for i in chosen)
            has_tail = dtype == torch.float32
            flat = torch.zeros(size + (num_tail if has_tail else 0), dtype=dtype, device=device)
            offset = 0
            for i in chosen:
                parameter = self._parameters[i]
                self._views[i] = flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
            if has_tail:
                self._tail = flat[size:]
            self._flats.append(flat)
        if self._tail is None:
            self._tail = torch.zeros(num_tail, device=device)
            self._flats.append(self._tail)

    def reduce(
        self, extras: Sequence[float] = (), *, count_at: int | None = None, nominal_count: int = 1
    ) -> list[float]:
        """Replace each gradient by its sum over the members, scaled to the actual count; return the summed extras.

        `extras[count_at]` is this member's number of items; without it nothing is scaled. A parameter without a
        gradient on any member keeps none; one with a gradient on some members gets their sum.
        """
        assert self._tail is not None
        flags = copy_gradients(self._views, [parameter.grad for parameter in self._parameters])
        self._tail.copy_(torch.tensor([*flags, *extras], device=self._tail.device))
        for flat in self._flats:
            dist.all_reduce(flat, group=self._group)
        tail = self._tail.tolist()
        users, totals = tail[: len(flags)], tail[len(flags) :]
        total_count = nominal_count if count_at is None else totals[count_at]
        if total_count and total_count != nominal_count:
            scale = nominal_count / total_count
            torch._foreach_mul_([view for view, num in zip(self._views, users, strict=True) if num], scale)
        for parameter, view, num_users in zip(self._parameters, self._views, users, strict=True):
            parameter.grad = view if num_users else None
        return totals

    def set_aside(self) -> None:
        """Keep gradients that are sums over the members already out of the next exchange."""
        for i, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is view:
                self._aside[i] = view.clone()
                parameter.grad = None

    def take_back(self) -> None:
        """Add what was set aside to the gradients again."""
        for i, kept in self._aside.items():
            parameter = self._parameters[i]
            if parameter.grad is None:
                parameter.grad = self._views[i].copy_(kept)
            else:
                parameter.grad.add_(kept)
        self._aside.clear()


def copy_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[float]:
    """Fill the views with the gradients; one that is missing counts as zero, and its flag is 0 instead of 1."""
    dense = [gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient for gradient in gradients]
    flags = [0.0 if gradient is None else 1.0 for gradient in dense]
    if all(flags):
        torch._foreach_copy_(views, dense)  # type: ignore[arg-type]
    else:
        for view, gradient in zip(views, dense, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
    return flags


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every member of the group the first member's values, in place. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=0)
