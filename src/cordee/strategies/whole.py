"""The whole model on a worker that trains only a part of it: there to be evaluated and saved, and away in between."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WholeModel:
    """Gives the memory of a model back while it is not needed; names, modules and tensor objects stay. Local."""

    def __init__(self, model: nn.Module, kept: Iterable[Tensor] = ()) -> None:
        """`kept` are tensors of the model that stay: those this worker trains."""
        self.model = model
        kept_ids = {id(tensor) for tensor in kept}
        others = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in kept_ids]
        self._others = [(tensor, tensor.shape, tensor.stride()) for tensor in others]
        self._is_here = True

    def release(self) -> None:
        """Give back the memory of all but the kept tensors; their values are lost."""
        if self._is_here:
            self._is_here = False
            for tensor, _, _ in self._others:
                # Not resize_ on the storage, which refuses once NumPy has seen it, as when it was saved.
                tensor.data = tensor.data.new_empty(0)

    def restore(self) -> None:
        """Take the memory again; what was away is zero until it is copied in."""
        if not self._is_here:
            self._is_here = True
            for tensor, shape, stride in self._others:
                tensor.data = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).zero_()
