"""The models a job can name with `model.use`.

What all builders have in common:

- They take keywords only: `input_shape` (one sample, without the batch) and `num_classes`, which come from
  the data, then the model's own arguments. Job files are checked against the annotations of these.
- They return an `nn.Sequential` of named blocks. Skip connections live inside a block, so the model may be
  cut between any two of them; the output of each block is one tensor.
- They draw the initial weights from torch's default generator on the current default device: the same seed
  gives the same weights, and under `torch.device("meta")` nothing is allocated.
- Arguments that cannot be met raise `ModelError`, which names the argument and the values allowed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from cordee.models.fbnet import fbnet
from cordee.models.gpt import gpt
from cordee.models.lenet import lenet
from cordee.models.mlp import mlp
from cordee.models.resnet import resnet, wide_resnet

BUILTIN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet": resnet,
    "wide_resnet": wide_resnet,
    "fbnet": fbnet,
    "gpt": gpt,
}
