"""Dynamic loss scaling for fp16, as torch's GradScaler does it.

Gradients of a scaled loss do not underflow in 16 bits. A step whose gradient overflows is left out, and the scale is
halved; after many steps without one, it is doubled. All workers see the same gradient, or agree on it, so that the
scale is the same everywhere. It is part of the progress of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

START, GROWTH_INTERVAL, LARGEST = 65536.0, 2000, 2.0**24


class LossScale:
    """What losses are multiplied by, and how long no gradient has overflowed."""

    def __init__(self) -> None:
        self.factor = START
        self._num_sound = 0

    def record(self, *, is_sound: bool) -> None:
        """Take whether the gradient of a step was finite."""
        self._num_sound = self._num_sound + 1 if is_sound else 0
        if not is_sound:
            self.factor = max(1.0, self.factor / 2.0)
        elif self._num_sound == GROWTH_INTERVAL:
            self.factor, self._num_sound = min(LARGEST, self.factor * 2.0), 0

    def dump(self) -> dict[str, float]:
        """Return all that `load` needs."""
        return {"factor": self.factor, "num_sound": self._num_sound}

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue where another was; from the start where nothing is saved."""
        self.factor, self._num_sound = saved.get("factor", START), int(saved.get("num_sound", 0))


@torch.no_grad()
def unscale(gradients: Sequence[Tensor], scale: LossScale) -> bool:
    """Divide gradients by the scale; return whether all are finite."""
    if not gradients:
        return True
    torch._foreach_mul_(list(gradients), 1.0 / scale.factor)
    return is_finite(gradients)


@torch.no_grad()
def is_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all values are finite."""
    return not gradients or bool(torch.isfinite(torch.stack([g.float().norm() for g in gradients])).all())
