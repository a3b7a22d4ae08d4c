"""The whole model on a worker that trains only a part of it: there to be evaluated and saved, and away in between."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class WholeModel:
    """Gives the memory of a model back while it is not needed; shapes, names and modules stay. Local."""

    def __init__(self, model: nn.Module, kept: Iterable[Tensor] = ()) -> None:
        """`kept` are tensors of the model that stay: those this worker trains."""
        self.model = model
        keys = {tensor.untyped_storage().data_ptr() for tensor in kept}
        found = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
        # A tensor without bytes has the address 0, and nothing to give back.
        storages = [tensor.untyped_storage() for key, tensor in found.items() if key and key not in keys]
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._is_here = True

    def release(self) -> None:
        """Give back the memory of all but the kept tensors; their values are lost."""
        if self._is_here:
            self._is_here = False
            for storage, _ in self._storages:
                storage.resize_(0)

    def restore(self) -> None:
        """Take the memory again; the values are anything until they are copied in."""
        if not self._is_here:
            self._is_here = True
            for storage, num_bytes in self._storages:
                storage.resize_(num_bytes)
