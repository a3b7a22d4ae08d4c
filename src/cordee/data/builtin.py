"""The data sets that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cordee.data.cifar import CIFAR10, cifar10, find_cifar_files
from cordee.data.embedded import digits, iris
from cordee.data.files import locate
from cordee.data.growing import folder
from cordee.data.mnist import FASHION_MNIST, MNIST, fashion_mnist, locate_idx_files, mnist
from cordee.data.source import Splits
from cordee.data.synthetic import synthetic

BUILTIN_DATA: Mapping[str, Callable[..., Splits]] = {
    "cifar10": cifar10,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "folder": folder,
    "iris": iris,
    "mnist": mnist,
    "synthetic": synthetic,
}

FILE_SOURCES = ("cifar10", "fashion-mnist", "mnist")


def find_files(name: str) -> Path:
    """Return the folder, or the archive, in which the files of a set of `FILE_SOURCES` are found.

    Looks where loading would look, and raises the same DataError if they are nowhere. Reads little of them.
    """
    if name == "cifar10":
        return locate(CIFAR10, find_cifar_files, root=None, download=False).path
    return locate_idx_files({"mnist": MNIST, "fashion-mnist": FASHION_MNIST}[name])[0].parent
