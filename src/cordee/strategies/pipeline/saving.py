"""What a worker of a pipeline saves itself: its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from cordee.checkpoint import Kind, Slice, Slices, State, share_kinds
from cordee.strategies.pipeline.stages import merge_states


def slices_of_stages(
    weights: Mapping[str, Tensor],
    optimizer: State,
    aliases: Mapping[str, str],
    names: Collection[str],
    *,
    sources: Sequence[int],
) -> Slices | None:
    """Return what this worker has of the state of all stages; None if nobody has some of the `names`. Collective.

    `weights` are those of this worker's stages that no worker before it has, `sources` the workers of one pipeline.
    Others hold the same as they do, and save nothing. `aliases` are other names of weights.
    """
    own = State.join(model=State(dict(weights), {}), optimizer=optimizer)
    states = [share_kinds(own, source) for source in sources]
    merged = merge_states([state.part("optimizer") for state in states if "optimizer" in state.values])
    tensors = {name: tensor for state in states for name, tensor in state.tensors.items() if name.startswith("model.")}
    if set(names) - aliases.keys() != {name.removeprefix("model.") for name in tensors}:
        return None
    tensors |= {f"optimizer.{name}": tensor for name, tensor in merged.tensors.items()}
    return Slices(
        {name: Kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        {f"model.{name}": f"model.{first}" for name, first in aliases.items()},
        {name: Slice(0, tensor) for name, tensor in tensors.items() if not tensor.is_meta},
        {"optimizer": merged.values},
        {},
    )
