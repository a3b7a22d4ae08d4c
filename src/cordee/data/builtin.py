"""The data sets that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cordee.data.cifar import cifar10
from cordee.data.embedded import digits, iris
from cordee.data.mnist import fashion_mnist, mnist
from cordee.data.source import Splits
from cordee.data.synthetic import synthetic

BUILTIN_DATA: Mapping[str, Callable[..., Splits]] = {
    "cifar10": cifar10,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "iris": iris,
    "mnist": mnist,
    "synthetic": synthetic,
}
