"""What torch runs as a stage: its blocks one after the other, in the job's precision, maybe computed twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cordee.compute import Computation
from cordee.models.blocks import Block


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
        outputs: Tensor = checkpoint(
            self._run,
            inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self._counting_nothing()),
        )
        return outputs

    def _run(self, inputs: Tensor) -> Tensor:
        with self._computation.autocast():
            for block in self._blocks:
                inputs = block(inputs)
        return inputs.contiguous()  # as its neighbour expects to receive it

    @contextlib.contextmanager
    def _counting_nothing(self) -> Iterator[None]:
        """Inside, batch norms see the batch for the second time and leave their running statistics alone."""
        norms = [m for m in self.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
        kept = [(norm, norm.momentum, None if (n := norm.num_batches_tracked) is None else n.clone()) for norm in norms]
        for norm in norms:
            norm.momentum = 0.0  # running statistics move by nothing
        try:
            yield
        finally:
            for norm, momentum, num_batches in kept:
                norm.momentum = momentum
                if num_batches is not None and norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.copy_(num_batches)
