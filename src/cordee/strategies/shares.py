"""Gradients and optimizer state shared out among workers that hold the same weights and compute other samples.

This is ZeRO's second stage, for stages of a pipeline: weights stay whole while the micro-batches pass, gradients are
summed once per step, each worker steps its share of every parameter, and the new weights are put together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.strategies.slices import Held


class ShareOfParameter:
    """An even share of what is held of a parameter, as one row of numbers; the last may be filled up with zeros."""

    def __init__(self, base: Held, group: dist.ProcessGroup) -> None:
        self.name, self.num_holders = base.name, base.num_holders
        self._base, self._group = base, group
        self._num_shares, self._index = dist.get_world_size(group), dist.get_rank(group)
        self.local = nn.Parameter(self._share(base.local.detach()).clone(), requires_grad=base.local.requires_grad)

    @property
    def shape(self) -> torch.Size:
        return self._base.shape

    def take_gradient(self) -> None:
        pass  # `reduce` has

    def drop_gradient(self) -> None:
        self.local.grad = None
        self._base.drop_gradient()

    def gather(self, local: Tensor) -> Tensor:
        return self._base.gather(self._put_together(local))

    def cut(self, whole: Tensor) -> Tensor:
        return self._share(self._base.cut(whole))

    def has_gradient(self) -> bool:
        """Take the gradient of what is held over; whether there is one."""
        self._base.take_gradient()
        return self._base.local.grad is not None

    def reduce(self) -> None:
        """Let `local` have its share of the sum of all workers' gradients. Collective."""
        gradient = self._base.local.grad
        flat = self._filled(torch.zeros_like(self._base.local) if gradient is None else gradient)
        self.local.grad = torch.empty_like(self.local)
        dist.reduce_scatter_single(self.local.grad, flat, group=self._group)
        self._base.drop_gradient()

    @torch.no_grad()
    def publish(self) -> None:
        """Put all workers' shares together where the weights are computed with. Collective."""
        self._base.local.copy_(self._put_together(self.local.detach()))

    def _share(self, held: Tensor) -> Tensor:
        return self._filled(held).chunk(self._num_shares)[self._index]

    def _filled(self, held: Tensor) -> Tensor:
        flat = held.reshape(-1)
        missing = -len(flat) % self._num_shares
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def _put_together(self, local: Tensor) -> Tensor:
        held = self._base.local
        flat = local.new_empty(len(local) * self._num_shares)
        dist.all_gather_single(flat, local.contiguous(), group=self._group)
        return flat[: held.numel()].view(held.shape)


class Shares:
    """All of a worker's shares."""

    def __init__(self, held: Sequence[Held], group: dist.ProcessGroup) -> None:
        self.held = [ShareOfParameter(one, group) for one in held]
        self._group = group

    def reduce(self) -> None:
        """Sum gradients over the group and keep the own share of each. Collective.

        What has no gradient on any worker gets none, so that optimizers leave it alone.
        """
        trained = [one for one in self.held if one.local.requires_grad]
        has_gradient = torch.tensor([float(one.has_gradient()) for one in trained])
        dist.all_reduce(has_gradient, group=self._group)
        for one, num_users in zip(trained, has_gradient.tolist(), strict=True):
            if num_users:
                one.reduce()

    def publish(self) -> None:
        """Let the weights be what the optimizers made of their shares. Collective."""
        for one in self.held:
            if one.local.requires_grad:
                one.publish()
