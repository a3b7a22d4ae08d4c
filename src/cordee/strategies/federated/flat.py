"""A model whose trained parameters and their gradients are two flat vectors: shared with other clients first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cordee.core.errors import JobError, ModelError


class FlatModel:
    """Makes a model's parameters views of one vector, in place. Layouts of the same model and names are the same."""

    def __init__(self, model: nn.Module, is_personal: Callable[[str], bool] = lambda name: False) -> None:
        """Raises ModelError for parameters of several types, and JobError if none is shared."""
        self.model = model
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if len({p.dtype for _, p in trained}) > 1:
            raise ModelError(
                f"strategy 'federated' sums one vector of parameters, and those of {type(model).__name__} have several "
                f"types: {sorted({str(p.dtype) for _, p in trained})}"
            )
        shared = [(name, p) for name, p in trained if not is_personal(name)]
        personal = [(name, p) for name, p in trained if is_personal(name)]
        if not shared:
            raise JobError("strategy.personal leaves no parameter that clients share: let some patterns out")
        self.names = [name for name, _ in shared]
        self.shapes = [tuple(p.shape) for _, p in shared]
        self.num_shared = sum(p.numel() for _, p in shared)
        self.values = torch.cat([p.detach().reshape(-1) for _, p in [*shared, *personal]])
        self.gradients = torch.zeros_like(self.values)
        self._parameters = [parameter for _, parameter in [*shared, *personal]]
        self._views: list[Tensor] = []  # of the gradients
        self._used: set[int] = set()  # places of the parameters that a backward pass has added to
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            parameter.data = self.values[start:stop].view_as(parameter)
            self._views.append(self.gradients[start:stop].view_as(parameter))
            start = stop
        self._is_watched = False  # what backward passes add to is noted
        kept = set(model.state_dict())
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
        self._shared_buffers = [name for name in self._buffers if not is_personal(name)]
        self._personal_buffers = [name for name in self._buffers if is_personal(name)]

    @property
    def layout(self) -> str:
        """A hash of what clients share: names, shapes and types of the parameters, and the number of buffers."""
        text = [f"{name} {tuple(shape)}" for name, shape in zip(self.names, self.shapes, strict=True)]
        text += [str(self.values.dtype), str(self.read_buffers().numel())]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def _note(self, place: int, _: Tensor) -> None:
        self._used.add(place)

    def clear_gradients(self) -> None:
        """Begin a step: gradients are zero, and views of the vector."""
        if not self._is_watched:
            self._is_watched = True
            for place, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._note, place))  # type: ignore[no-untyped-call]
        self._used.clear()
        self.gradients.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def forget_gradients(self) -> None:
        """Begin a step whose gradients nobody looks at in the vector: they are where the backward pass leaves them.

        A parameter that the step does not use has none. Filling the vector and watching takes some percent of a step.
        """
        for parameter in self._parameters:
            parameter.grad = None

    def used(self) -> list[float]:
        """Return for each parameter 1 if this step has used it, else 0."""
        return [float(place in self._used) for place in range(len(self._parameters))]

    def note_used(self, used: Sequence[float]) -> None:
        """Take what `used` returned, or sums of it, for what this step has used."""
        self._used = {place for place, count in enumerate(used) if count}

    def drop_unused(self) -> None:
        """Leave parameters that this step has not used without a gradient: optimizers leave those alone.

        What corrects gradients may have given one to a parameter that the step has not used: it stays.
        """
        for place, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if place not in self._used and not bool(view.any()):
                parameter.grad = None

    @property
    def shared(self) -> Tensor:
        """The parameters that clients share; a view."""
        return self.values[: self.num_shared]

    @property
    def shared_gradient(self) -> Tensor:
        return self.gradients[: self.num_shared]

    @property
    def personal(self) -> Tensor:
        """The parameters that stay with a client; a view."""
        return self.values[self.num_shared :]

    def read_buffers(self, *, personal: bool = False) -> Tensor:
        """Return a copy of the buffers that clients share, or of those that stay with a client, in double precision."""
        names = self._personal_buffers if personal else self._shared_buffers
        pieces = [self._buffers[name].detach().reshape(-1).to(torch.float64) for name in names]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def write_buffers(self, values: Tensor, *, personal: bool = False) -> None:
        """Set the buffers that `read_buffers` reads; whole numbers are rounded to."""
        names = self._personal_buffers if personal else self._shared_buffers
        start = 0
        for name in names:
            buffer = self._buffers[name]
            piece = values[start : start + buffer.numel()].view_as(buffer)
            buffer.copy_(piece if buffer.is_floating_point() else piece.round())
            start += buffer.numel()
