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


class AccumulatingExchange(GradientExchange):
    """An exchange for gradients that add up over several backward passes, of which some are not exchanged.

    A gradient is either *common*, the same on all members, or *local*: it has parts that have not been exchanged.
    In a local gradient the first member also holds what was common before, and the others do not, so that the sum
    over the members is right whichever passes touched the parameter on whichever member.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_extras: int, *, is_first: bool) -> None:
        super().__init__(parameters, num_extras)
        self.parameters = tuple(self._parameters)
        self._is_first = is_first
        self._local: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor] = {}

    @property
    def has_local(self) -> bool:
        return any(parameter.grad is self._local.get(i, ...) for i, parameter in enumerate(self._parameters))

    def local_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient would change in an exchange."""
        return [self._parameters[i] for i, gradient in self._local.items() if self._parameters[i].grad is gradient]

    def begin_pass(self, *, is_kept: bool = True) -> float:
        """Take the common gradients out of the way of a backward pass; return a number that tells them apart.

        Without `is_kept` the pass counts for nothing, and `end_pass` drops what it computes.
        """
        for i, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or gradient is not self._local.get(i):
                self._local.pop(i, None)  # was set to None, or to something that is the same everywhere
            if gradient is not None and (not is_kept or i not in self._local):
                is_buffer = not gradient.is_sparse and gradient.data_ptr() == self._views[i].data_ptr()
                self._aside[i] = gradient.clone() if is_buffer and i not in self._local else gradient
                parameter.grad = None
        common = [gradient for i, gradient in self._aside.items() if i not in self._local and not gradient.is_sparse]
        return float(sum(torch._foreach_norm(common, 1.0))) if common else 0.0

    def end_pass(self, *, is_kept: bool = True) -> None:
        """Put what was taken away back, and remember which gradients the pass has changed."""
        for i, parameter in enumerate(self._parameters):
            aside = self._aside.get(i)
            if not is_kept or parameter.grad is None:
                parameter.grad = aside
            else:
                if aside is not None and self._is_first:
                    parameter.grad = parameter.grad + aside
                self._local[i] = parameter.grad
        self._aside.clear()

    def reduce_local(self, extras: Sequence[float]) -> list[float]:
        """Replace the gradients that are local on any member by their sums; return the summed extras. Collective."""
        assert self._tail is not None
        held = [
            parameter.grad if i in self._local or self._is_first else None
            for i, parameter in enumerate(self._parameters)
        ]
        copy_gradients(self._views, held)
        flags = [float(i in self._local) for i in range(len(self._parameters))]
        self._tail.copy_(torch.tensor([*flags, *extras], device=self._tail.device))
        for flat in self._flats:
            dist.all_reduce(flat, group=self._group)
        tail = self._tail.tolist()
        for parameter, view, num_local in zip(self._parameters, self._views, tail, strict=False):
            if num_local:
                parameter.grad = view
        self._local.clear()
        return tail[len(flags) :]


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
