"""The whole model comes and goes; tensors that are trained stay."""

from __future__ import annotations

import torch
from torch import nn

from cordee.checkpoint import weights_sha256
from cordee.strategies.split import WholeModel


def test_memory_is_given_back_and_taken_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    kept = [model[2].bias, model[1].running_mean]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = WholeModel(model, kept)
    weights_sha256(model.state_dict())  # NumPy looks at the memory, which may not be resized from then on
    whole.release()
    whole.release()
    assert model[0].weight.numel() == 0 and model[2].weight is model[0].weight
    assert model[2].bias.numel() == 4 and torch.equal(model[1].running_mean, before["1.running_mean"])
    whole.restore()
    whole.restore()
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    model.load_state_dict(before)
    assert torch.equal(model(torch.ones(2, 4)), model(torch.ones(2, 4)))
