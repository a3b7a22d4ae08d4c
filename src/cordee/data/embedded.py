"""The small sets that come with scikit-learn: iris (150 flowers) and digits (1,797 images of 8 × 8).

Both are cut once and for all: in the order of the file, every fifth sample of each class is test. The split
does not follow the job's seed, so that accuracies of different runs can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cordee.data.source import ArraySource, Splits

_TEST_EVERY = 5


def iris(*, normalize: bool = True) -> Splits:
    """Four measures of 150 flowers of three kinds: 120 to train, 30 to test.

    Normalised, each measure has mean 0 and deviation 1 over the training set.
    """
    from sklearn.datasets import load_iris

    measures, kinds = load_iris(return_X_y=True)
    inputs, targets = torch.tensor(measures, dtype=torch.float32), torch.tensor(kinds, dtype=torch.int64)
    is_test = is_test_sample(targets)
    if normalize:
        deviation, mean = torch.std_mean(inputs[~is_test], dim=0, correction=0)
        inputs = (inputs - mean) / deviation
    return _splits("iris", inputs, targets, is_test, num_classes=3)


def digits(*, normalize: bool = True) -> Splits:
    """Handwritten digits as images of (1, 8, 8): 1,442 to train, 355 to test.

    Values are divided by 16, the largest; normalised, they then have mean 0 and deviation 1 over all pixels
    of the training set.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels, dtype=torch.int64)
    is_test = is_test_sample(targets)
    if normalize:
        deviation, mean = torch.std_mean(inputs[~is_test], correction=0)
        inputs = (inputs - mean) / deviation
    return _splits("digits", inputs, targets, is_test, num_classes=10)


def is_test_sample(targets: Tensor) -> Tensor:
    """Return which samples are test: of each class the fifth, the tenth, and so on."""
    is_test = torch.zeros(len(targets), dtype=torch.bool)
    for label in range(int(targets.max()) + 1):
        is_test[(targets == label).nonzero().flatten()[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return is_test


def _splits(name: str, inputs: Tensor, targets: Tensor, is_test: Tensor, num_classes: int) -> Splits:
    return Splits(
        train=ArraySource(inputs[~is_test], targets[~is_test]),
        test=ArraySource(inputs[is_test], targets[is_test]),
        input_shape=tuple(inputs.shape[1:]),
        num_classes=num_classes,
        name=name,
    )
