"""Random numbers of a sliced model: the same on all workers for whole activations, each worker's own for slices.

Workers start every step with one seed, so that dropout of what all of them have is the same everywhere. What lies
between a layer of the style 'column' and one of the style 'row' is a slice, and with the same numbers each slice would
get the same mask: from the one layer to the other, numbers come from a stream of the worker's own. It follows from a
number of everybody's stream, so that a pass that is computed again draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cordee.core.seeds import derive_seed
from cordee.models.slicing import Style


class SliceStreams:
    """Switches this process's random numbers while `model`, which is sliced by `plan`, computes on slices."""

    def __init__(self, model: nn.Module, plan: Mapping[str, Style], slice_index: int, device: torch.device) -> None:
        self._slice_index = slice_index
        self._generator = (
            torch.cuda.default_generators[torch.cuda.current_device()]
            if device.type == "cuda"
            else torch.default_generator
        )
        self._common: Tensor | None = None  # the state of everybody's stream, while the worker's own is in use
        model.register_forward_pre_hook(lambda *_: self.begin())
        for name, style in plan.items():
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Linear) and style == "column":
                layer.register_forward_hook(lambda *_: self._enter())
            elif isinstance(layer, nn.Linear) and style == "row":
                layer.register_forward_pre_hook(lambda *_: self._leave())

    def begin(self) -> None:
        """Forget a pass that ended between the two layers, as torch ends one that it computes again."""
        self._common = None

    def _enter(self) -> None:
        if self._common is None:
            number = torch.randint(1 << 62, (1,), generator=self._generator, device=self._generator.device)
            self._common = self._generator.get_state()
            self._generator.manual_seed(derive_seed(int(number), "slice", self._slice_index))

    def _leave(self) -> None:
        if self._common is not None:
            self._generator.set_state(self._common)
            self._common = None
