"""What the tests of the models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def num_parameters() -> Callable[..., int]:
    """Count the parameters of a model that is built without memory for them."""

    def count(build: Callable[..., nn.Module], **arguments: Any) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(**arguments).parameters())

    return count


@pytest.fixture
def check_images() -> Callable[..., None]:
    """Send two images forward and backward: the logits have the right shape, every parameter a gradient."""

    def check(build: Callable[..., nn.Module], shape: tuple[int, ...], num_classes: int = 10, **arguments: Any) -> None:
        torch.manual_seed(0)
        model = build(input_shape=shape, num_classes=num_classes, **arguments)
        logits = model(torch.randn(2, *shape))
        assert logits.shape == (2, num_classes)
        nn.functional.cross_entropy(logits, torch.tensor([0, num_classes - 1])).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name

    return check
