"""Buffers that each worker changes on its own, such as running statistics: after every step all members have the same.

Agreeing only before a checkpoint or an evaluation would round at other places in a run that is interrupted and
resumed than in one that is not, and members could not be compared in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
