"""What a model keeps beside its parameters, such as running statistics, on workers that compute other samples.

Batch norms may take the statistics of the batches of all workers. torch's own SyncBatchNorm works on GPUs only; the one
here works wherever the group does. With it, a team sees the statistics that one worker with the whole batch would have
seen, uneven shares included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cordee.communication.exchange import settle

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
        sums = torch.cat([inputs.sum(dims, dtype=dtype), inputs.new_full((1,), count, dtype=dtype)]) * presence
        dist.all_reduce(sums)
        total_count = sums[-1]
        if float(total_count) == 1:  # as torch's own refuses it; all members see the same count
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


# Buffers that each worker changes on its own: after every step all members have the same.
#
# Agreeing only before a checkpoint or an evaluation would round at other places in a run that is interrupted and
# resumed than in one that is not, and members could not be compared in between.


def buffers_of(model: nn.Module, left_out: type[nn.Module]) -> Callable[[], list[Tensor]]:
    """Return what finds the buffers of `model`, but those of modules that agree by themselves.

    Models may put a new tensor in the place of a buffer, so they are looked up each time.
    """
    seen: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if not isinstance(module, left_out):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    seen.setdefault(id(buffer), (module, name))
    places = list(seen.values())

    def find() -> list[Tensor]:
        found = [module._buffers[name] for module, name in places]
        return [buffer for buffer in found if buffer is not None]

    return find


class SharedBuffers:
    """The buffers of one member. In each step: `begin`, then `flags` when it has computed, then `agree`.

    Floating-point buffers become the mean over the members that had samples, others the first member's. With
    `keeps_first` all become the first member's. What no member changed is left alone.
    """

    def __init__(
        self,
        find: Callable[[], list[Tensor]],
        *,
        is_first: bool,
        keeps_first: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._find = find
        self._is_first, self._keeps_first, self._group = is_first, keeps_first, group
        self._starts = [buffer.detach().clone() for buffer in find()]
        self._has_samples = False

    @property
    def num_flags(self) -> int:
        return len(self._starts) + 1 if self._starts else 0

    def begin(self) -> None:
        """Remember the buffers as they are. Local."""
        if self._starts:
            torch._foreach_copy_(self._starts, [buffer.detach() for buffer in self._find()])

    def starts(self) -> list[tuple[Tensor, Tensor]]:
        """Return each buffer as it is, and as it was at the last `begin`."""
        return list(zip(self._find(), self._starts, strict=True))

    def flags(self, *, has_samples: bool) -> list[float]:
        """Return what `agree` needs the sum of, over all members: which buffers changed, and who had samples. Local."""
        self._has_samples = has_samples
        if not self._starts:
            return []
        # Compared by value: torch's batch norm does not count up the version of what it changes.
        pairs = zip(self._find(), self._starts, strict=True)
        return [*(float(not torch.equal(new, old)) for new, old in pairs), float(has_samples)]

    @torch.no_grad()
    def agree(self, totals: Sequence[float] | None = None) -> None:
        """Give every member the same. Collective where a member changed something; `totals` are the summed flags."""
        if not self._starts:
            return
        *users, num_present = self._sum(self.flags(has_samples=self._has_samples)) if totals is None else totals
        changed = [i for i, num in enumerate(users) if num]
        if not changed:
            return
        if not num_present:
            self.undo()
            return
        buffers = self._find()
        # In double precision, so that the mean of equal numbers is that number.
        flat = torch.cat([self._contribution(buffers[i]) for i in changed])
        dist.all_reduce(flat, group=self._group)
        settle(flat.device, self._group)
        for i, part in zip(changed, torch.split(flat, [_as_real(buffers[i]).numel() for i in changed]), strict=True):
            buffer = buffers[i]
            mean = part / num_present if self._is_averaged(buffer) else part
            _as_real(buffer).copy_(mean.view_as(_as_real(buffer)))

    def undo(self) -> None:
        """Put everything back as it was at the start of the step: it did not happen. Local."""
        with torch.no_grad():
            for buffer, start in zip(self._find(), self._starts, strict=True):
                buffer.copy_(start)

    def _contribution(self, buffer: Tensor) -> Tensor:
        counts = self._has_samples if self._is_averaged(buffer) else self._is_first
        values = _as_real(buffer.detach()).reshape(-1).double()
        return values if counts else torch.zeros_like(values)

    def _is_averaged(self, buffer: Tensor) -> bool:
        return not self._keeps_first and (buffer.is_floating_point() or buffer.is_complex())

    def _sum(self, flags: Sequence[float]) -> list[float]:
        total = torch.tensor(flags, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        summed: list[float] = total.tolist()
        return summed


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
