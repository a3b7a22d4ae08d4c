"""The model layer: models by name, each built for the shape of its data."""

from cordee.models.builtin import BUILTIN_MODELS
from cordee.models.fbnet import fbnet
from cordee.models.gpt import gpt
from cordee.models.lenet import lenet
from cordee.models.mlp import mlp
from cordee.models.resnet import resnet, wide_resnet

__all__ = ["BUILTIN_MODELS", "fbnet", "gpt", "lenet", "mlp", "resnet", "wide_resnet"]
