"""Batch normalisation over the batches of all workers.

torch's own SyncBatchNorm works on GPUs only; this one works wherever the group does. With it, a team sees the
statistics that one worker with the whole batch would have seen, uneven shares included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncedBatchNorm(nn.Module):
    """Takes over the parameters and buffers of a batch norm, under the same names."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, original: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = original.eps, original.momentum
        self.weight, self.bias = original.weight, original.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(original, name))
        self.train(original.training)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return torch.nn.functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        normalised, mean, variance, count = _Normalise.apply(inputs, self.eps)  # type: ignore[no-untyped-call]
        if self.running_mean is not None:
            self._follow(mean, variance, float(count))
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        outputs: Tensor = normalised
        if self.weight is not None and self.bias is not None:
            outputs = normalised * self.weight.view(shape) + self.bias.view(shape)
        return outputs

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(1.0, count - 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation with the statistics of all members' inputs; collective in both directions."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, inputs.ndim)]
        channels, count = inputs.shape[1], inputs.numel() // max(1, inputs.shape[1])
        # Two rounds, mean then squares about it: the one-round formula loses digits where mean >> deviation.
        totals = torch.cat([inputs.sum(dims, dtype=torch.float32), inputs.new_tensor([count], dtype=torch.float32)])
        dist.all_reduce(totals)
        total_count = totals[-1]
        mean = totals[:-1] / total_count
        shape = [1, channels] + [1] * (inputs.ndim - 2)
        centred = inputs - mean.view(shape)
        squares = (centred * centred).sum(dims, dtype=torch.float32)
        dist.all_reduce(squares)
        variance = squares / total_count
        inverse = torch.rsqrt(variance + eps)
        normalised = centred * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse)
        ctx.total_count = total_count
        ctx.mark_non_differentiable(mean, variance, total_count)
        return normalised, mean, variance, total_count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        normalised, inverse = ctx.saved_tensors
        dims = [0, *range(2, gradient.ndim)]
        shape = [1, -1] + [1] * (gradient.ndim - 2)
        totals = torch.cat([gradient.sum(dims), (gradient * normalised).sum(dims)])
        dist.all_reduce(totals)
        mean_gradient, mean_product = (totals / ctx.total_count).chunk(2)
        centred = gradient - mean_gradient.view(shape) - normalised * mean_product.view(shape)
        return centred * inverse.view(shape), None


def synchronise_batch_norms(model: nn.Module) -> int:
    """Replace every batch norm inside `model` by one over all workers; return how many there were."""
    replaced = 0
    for name, child in model.named_children():
        if isinstance(child, _BATCH_NORMS):
            setattr(model, name, SyncedBatchNorm(child))
            replaced += 1
        else:
            replaced += synchronise_batch_norms(child)
    return replaced


def average_buffers(model: nn.Module, num_members: int) -> None:
    """Replace floating-point buffers by their mean over the members. Collective."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= num_members
    for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
