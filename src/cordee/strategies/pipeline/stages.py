"""The stages of a model: which blocks, parameters and buffers each has, and who computes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.blocks import Block, Chain, Wire


@dataclass(frozen=True)
class Stage:
    """A run of blocks."""

    index: int
    blocks: tuple[Block, ...]
    given: Wire | None  # what comes in; None for the first stage, which reads the data
    gives: Wire
    is_trained_before: bool  # whether a gradient is to be sent back

    def parameters(self) -> list[nn.Parameter]:
        return list({id(p): p for block in self.blocks for p in block.parameters()}.values())

    def buffers(self) -> list[Tensor]:
        return list({id(b): b for block in self.blocks for b in block.buffers()}.values())


def make_stages(chain: Chain, counts: Sequence[int]) -> list[Stage]:
    """Return stages of so many blocks each."""
    assert sum(counts) == len(chain.blocks) and min(counts) > 0
    stages: list[Stage] = []
    start, is_trained = 0, False
    for index, count in enumerate(counts):
        given = chain.wires[start - 1] if start else None
        blocks = chain.blocks[start : start + count]
        stages.append(Stage(index, blocks, given, chain.wires[start + count - 1], is_trained))
        is_trained = is_trained or any(p.requires_grad for block in blocks for p in block.parameters())
        start += count
    return stages


@dataclass(frozen=True)
class Ownership:
    """Which parts of the team hold each tensor of the model, by the name that `named_parameters` gives it.

    A weight that several stages use (tied embeddings) is held by each; the first of its holders speaks for it. What
    no stage uses is held by the first part, so that nothing gets lost.
    """

    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that more than one part holds."""
        return {name: parts for name, parts in self.parameters.items() if len(parts) > 1}


def share_out(model: nn.Module, stages: Sequence[Stage], part_of: Sequence[int]) -> Ownership:
    """Return who holds what when `part_of[i]` computes stage i. Raises ModelError for buffers that two parts share."""
    parameter_parts: dict[int, set[int]] = {}
    buffer_parts: dict[int, set[int]] = {}
    for stage in stages:
        for parameter in stage.parameters():
            parameter_parts.setdefault(id(parameter), set()).add(part_of[stage.index])
        for buffer in stage.buffers():
            buffer_parts.setdefault(id(buffer), set()).add(part_of[stage.index])
    parameters = {n: tuple(sorted(parameter_parts.get(id(p), {0}))) for n, p in model.named_parameters()}
    buffers = {n: tuple(sorted(buffer_parts.get(id(b), {0}))) for n, b in model.named_buffers()}
    for name, parts in buffers.items():
        if len(parts) > 1:
            raise ModelError(
                f"buffer '{name}' belongs to a module that is used in several stages, which would each count by "
                "themselves: give each place a module of its own, or put both into one stage with strategy.placement"
            )
    check_conserved(model, stages)
    return Ownership(parameters, buffers)


def check_conserved(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise ModelError unless the stages have all parameters the model has, and no others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used = {id(parameter) for stage in stages for parameter in stage.parameters()}
    strange = sum(1 for stage in stages for parameter in stage.parameters() if id(parameter) not in names)
    if strange:
        raise ModelError(f"{strange} parameters of the stages are not the model's: it cannot be cut")
    lost = [name for key, name in names.items() if key not in used]
    total = sum(parameter.numel() for parameter in model.parameters())
    found = {id(p): p.numel() for stage in stages for p in stage.parameters()}
    unused = sum(parameter.numel() for name, parameter in model.named_parameters() if name in lost)
    assert sum(found.values()) + unused == total, "parameters were lost or doubled by the cut"
