"""What torch runs as a stage: its blocks one after the other, in the job's precision, maybe computed twice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cordee.compute import Computation
from cordee.models.blocks import Block
from cordee.models.effects import own_attributes


class StageModule(nn.Module):
    """The blocks of a stage. Their modules are those of the whole model: modes and weights are the same objects."""

    def __init__(self, blocks: Sequence[Block], computation: Computation, *, recompute: bool) -> None:
        super().__init__()
        self._blocks = blocks
        self._computation = computation
        self._recompute = recompute
        self.members = nn.ModuleList([module for block in blocks for module in block.modules])

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._recompute:
            return self._run(inputs)
        start = _Moment(self)
        outputs: Tensor = checkpoint(
            self._run,
            inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self._again_from(start)),
        )
        return outputs

    def _run(self, inputs: Tensor) -> Tensor:
        with self._computation.autocast():
            for block in self._blocks:
                inputs = block(inputs)
        return inputs.contiguous()  # as its neighbour expects to receive it

    @contextlib.contextmanager
    def _again_from(self, start: _Moment) -> Iterator[None]:
        """Inside, the stage computes a micro-batch for the second time: as it was then, and counting nothing."""
        now = _Moment(self)
        start.stand_in()
        try:
            yield
        finally:
            now.put_back()


class _Moment:
    """What the modules of a stage hold beside parameters, and the random numbers torch does not keep itself."""

    def __init__(self, stage: nn.Module) -> None:
        modules = list(stage.modules())
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        tensors = {id(t): t for _, buffers in self._buffers for t in buffers.values() if t is not None}
        self._values = {key: tensor.clone() for key, tensor in tensors.items()}
        self._attributes = [(module, own_attributes(module)) for module in modules]
        self._random = random.getstate(), np.random.get_state()

    def stand_in(self) -> None:
        """Let the modules compute with copies of what they held; these may be changed."""
        for module, buffers in self._buffers:
            for name, tensor in buffers.items():
                module._buffers[name] = None if tensor is None else self._values[id(tensor)]
        self._put_rest()

    def put_back(self) -> None:
        """Give the modules their own tensors again."""
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        self._put_rest()

    def _put_rest(self) -> None:
        for module, attributes in self._attributes:
            vars(module).update(attributes)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
