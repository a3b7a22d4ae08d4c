"""What a worker of a pipeline saves itself: what it has of its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from cordee.checkpoint import Kind, Slice, Slices, State, share_kinds
from cordee.strategies.pipeline.stages import merge_states


def slices_of_stages(
    own: Mapping[str, Slice],
    described: State,
    aliases: Mapping[str, str],
    names: Collection[str],
    *,
    sources: Sequence[int],
    part: int,
) -> Slices | None:
    """Return what this worker has of the state of all stages; None if nobody has some of the `names`. Collective.

    `own` are the slices that this worker saves, of all tensors that no part of the pipeline before it has.
    `described` says what these are slices of: its tensors have the shapes of the whole, and no values. `sources` are
    workers of all parts, of which this one's is `part`. `aliases` are other names of weights.
    """
    states = [share_kinds(described, source) for source in sources]
    kinds, values = _merge(states)
    if set(names) - aliases.keys() != {name.removeprefix("model.") for name in kinds if name.startswith("model.")}:
        return None
    # The same with this worker's own tensors: of tied weights the first part has the state, and names may change.
    states[part] = State({name: one.values for name, one in own.items()}, described.values)
    found, _ = _merge(states)
    slices = {id(one.values): one for one in own.values()}
    return Slices(
        {name: Kind(tensor.dtype, tensor.shape) for name, tensor in kinds.items()},
        {f"model.{name}": f"model.{first}" for name, first in aliases.items()},
        {name: slices[id(tensor)] for name, tensor in found.items() if id(tensor) in slices},
        {"optimizer": values.values},
        {},
    )


def _merge(states: Sequence[State]) -> tuple[dict[str, Tensor], State]:
    """Return the tensors of all parts' weights and optimizers, and the state of all optimizers as one."""
    merged = merge_states([state.part("optimizer") for state in states if "optimizer" in state.values])
    tensors = {name: tensor for state in states for name, tensor in state.tensors.items() if name.startswith("model.")}
    return {**tensors, **{f"optimizer.{name}": tensor for name, tensor in merged.tensors.items()}}, merged
