"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cordee.horovod.operations import Sum
from cordee.horovod.torch.mpi_ops import allreduce_
from cordee.horovod.world import global_process_set

_Function: Any = torch.autograd.Function  # its methods are not typed


class SyncBatchNorm(_BatchNorm):
    """A batch norm of any number of dimensions. In training its forward and backward passes are collective."""

    def _check_input_dim(self, data: Tensor) -> None:
        if data.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {data.dim()}D input)")

    def forward(self, data: Tensor) -> Tensor:
        self._check_input_dim(data)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or global_process_set.size() == 1:
            return super().forward(data)
        axes = [0, *range(2, data.dim())]
        count = data.numel() // max(1, data.shape[1])
        local = torch.cat(
            [
                data.detach().double().sum(axes),
                data.detach().double().square().sum(axes),
                torch.tensor([float(count)], dtype=torch.float64, device=data.device),
            ]
        )
        total = allreduce_(local, op=Sum)
        num_channels = data.shape[1]
        num_samples = float(total[-1])
        mean = total[:num_channels] / num_samples
        variance = (total[num_channels:-1] / num_samples - mean.square()).clamp(min=0)
        if self.training and self.track_running_stats:
            self._update_running(mean, variance * num_samples / max(1.0, num_samples - 1))
        inverse = (variance + self.eps).rsqrt()
        normalized = _Normalize.apply(data, mean.to(data.dtype), inverse.to(data.dtype), num_samples)
        if not self.affine:
            return cast(Tensor, normalized)
        shape = [1, -1, *[1] * (data.dim() - 2)]
        return cast(Tensor, normalized * self.weight.view(shape) + self.bias.view(shape))

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Normalize(_Function):  # type: ignore[misc]
    """(data - mean) · inverse, where mean and inverse depend on all ranks' data."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mean: Tensor, inverse: Tensor, num_samples: float) -> Tensor:
        shape = [1, -1, *[1] * (data.dim() - 2)]
        normalized = (data - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalized, inverse)
        ctx.num_samples = num_samples
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        normalized, inverse = ctx.saved_tensors
        shape = [1, -1, *[1] * (gradient.dim() - 2)]
        axes = [0, *range(2, gradient.dim())]
        sums = torch.cat([gradient.double().sum(axes), (gradient * normalized).double().sum(axes)])
        allreduce_(sums, op=Sum)
        mean, along = (sums / ctx.num_samples).to(gradient.dtype).chunk(2)
        result = (gradient - mean.view(shape) - normalized * along.view(shape)) * inverse.view(shape)
        return result, None, None, None
