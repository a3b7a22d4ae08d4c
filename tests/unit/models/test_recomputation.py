"""Blocks that are computed again give the same losses, gradients, buffers and random numbers, and keep less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cordee.core.errors import ModelError
from cordee.models.recomputation import recompute_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.inner(inputs)
        return outputs


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(6, 2))


def layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))))


def trained(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """Return gradients and buffers after two passes, and how many numbers were kept for the backward pass."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(3)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(50, 6)).square().mean()
        loss.backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), torch.rand(1)], kept


@pytest.mark.parametrize("build", [blocks, layers])
@pytest.mark.parametrize("copied", [False, True])
def test_computes_the_same_and_keeps_less(build: Any, copied: bool) -> None:
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    recompute_blocks(model)
    recompute_blocks(model)  # as with each team that is formed again
    model = copy.deepcopy(model) if copied else model
    expected, kept_plain = trained(plain)
    found, kept = trained(model)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept < kept_plain
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="has no blocks"):
        recompute_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
