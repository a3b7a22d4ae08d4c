"""Batch normalisation over the batches of all workers.

torch's own SyncBatchNorm works on GPUs only; this one works wherever the group does. With it, a team sees the
statistics that one worker with the whole batch would have seen, uneven shares included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncedBatchNorm(nn.Module):
    """Takes over the parameters and buffers of a batch norm, under the same names.

    Collective while training, in both directions: members without samples take part as well (see `without samples`).
    """

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
        self.is_absent = False
        self.train(original.training)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:  # local: members may evaluate different numbers of batches
            own = self.running_mean is None
            return torch.nn.functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps
            )
        normalised, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            inputs, self.eps, self.is_absent
        )
        if self.running_mean is not None and count:
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
    def forward(ctx: Any, inputs: Tensor, eps: float, is_absent: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, inputs.ndim)]
        dtype = _statistics_dtype(inputs)
        channels, count = inputs.shape[1], inputs.numel() // max(1, inputs.shape[1])
        presence = 0.0 if is_absent else 1.0
        # Two rounds, mean then squares about it: the one-round formula loses digits where mean >> deviation.
        sums = torch.cat([inputs.sum(dims, dtype=dtype), inputs.new_tensor([count], dtype=dtype)]) * presence
        dist.all_reduce(sums)
        total_count = sums[-1]
        if total_count == 1:  # as torch's own refuses it; all members see the same count
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {inputs.shape}")
        divisor = total_count.clamp(min=1.0)  # nobody may have a sample of a late part of a small batch
        rough_mean = sums[:-1] / divisor
        shape = [1, channels] + [1] * (inputs.ndim - 2)
        centred = inputs - rough_mean.view(shape)
        # What rounding left of the mean is taken out as well. Without that, a mean of 10 deviations put the gradient of
        # the weight off by 3e-6 (64 × 16 × 32 × 32 numbers); with it by 1e-7, and torch's own batch norm by 3e-7.
        moments = torch.cat([centred.sum(dims, dtype=dtype), (centred * centred).sum(dims, dtype=dtype)]) * presence
        dist.all_reduce(moments)
        rest, squares = (moments / divisor).chunk(2)
        mean = rough_mean + rest
        variance = (squares - rest * rest).clamp(min=0.0)
        inverse = torch.rsqrt(variance + eps)
        normalised = torch.addcmul(-(rest * inverse).view(shape), centred, inverse.view(shape))
        ctx.save_for_backward(normalised, inverse)
        ctx.divisor, ctx.input_dtype, ctx.is_absent = divisor, inputs.dtype, is_absent
        ctx.mark_non_differentiable(mean, variance, total_count)
        return normalised.to(inputs.dtype), mean, variance, total_count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normalised, inverse = ctx.saved_tensors
        dims = [0, *range(2, gradient.ndim)]
        shape = [1, -1] + [1] * (gradient.ndim - 2)
        dtype = inverse.dtype
        sums = torch.cat([gradient.sum(dims, dtype=dtype), (gradient * normalised).sum(dims, dtype=dtype)])
        dist.all_reduce(sums)
        if ctx.is_absent:  # its inputs had no part in the others' statistics
            return torch.zeros_like(gradient, dtype=ctx.input_dtype), None, None
        mean_gradient, mean_product = (sums / ctx.divisor).chunk(2)
        centred = gradient - mean_gradient.view(shape) - normalised * mean_product.view(shape)
        return (centred * inverse.view(shape)).to(ctx.input_dtype), None, None


def _statistics_dtype(inputs: Tensor) -> torch.dtype:
    """The same on all members, and precise enough to add many numbers up."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def synchronise_batch_norms(model: nn.Module) -> bool:
    """Make every batch norm inside `model` one over all workers; return whether there are any. May be called again."""
    for name, child in model.named_children():
        if isinstance(child, _BATCH_NORMS):
            setattr(model, name, SyncedBatchNorm(child))
        else:
            synchronise_batch_norms(child)
    return any(isinstance(module, SyncedBatchNorm) for module in model.modules())


@contextlib.contextmanager
def no_samples(model: nn.Module) -> Iterator[None]:
    """Inside, `model` records nothing of what it computes, but its synced batch norms still meet the others'."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    synced = [module for module in was_training if isinstance(module, SyncedBatchNorm)]
    for norm in synced:
        norm.is_absent = norm.training = True
    try:
        yield
    finally:
        for module, flag in was_training.items():
            module.training = flag
        for norm in synced:
            norm.is_absent = False
