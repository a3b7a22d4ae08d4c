"""From the job's [data] section to a data set that is known to be sound."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import CordeeError, DataError, JobError
from cordee.core.references import bind, construct, name_of, resolve
from cordee.core.seeds import derive_seed
from cordee.core.settings import Data
from cordee.data.blocks import BlockSource
from cordee.data.cifar import CIFAR10, cifar10, find_cifar_files
from cordee.data.csv_files import csv_files
from cordee.data.datasets import DatasetSource, IterableSource
from cordee.data.files import locate
from cordee.data.huggingface import huggingface, is_live_table, live_table
from cordee.data.images import image_folder, image_tar
from cordee.data.mnist import FASHION_MNIST, MNIST, fashion_mnist, locate_idx_files, mnist
from cordee.data.online import GrowingSource, endless, folder
from cordee.data.order import preserved_generators, seed_generators
from cordee.data.parquet import arrow, parquet
from cordee.data.samples import SampleFormat
from cordee.data.source import ArraySource, Source, Splits
from cordee.data.synthetic import synthetic
from cordee.data.text import text
from cordee.data.user_data import is_data, splits_of


def load_data(
    data: Data,
    *,
    seed: int,
    python_path: Sequence[str] = (),
    ignored: int | None = None,
    counts_classes: bool = True,
) -> Splits:
    """Return the data set that `data` describes, checked and cut as it says.

    `data.use` is a built-in name, "module:callable", a live callable, or data itself (see `splits_of`). A
    callable gets `data.args`, and `seed` and `normalize` if it has parameters of these names. What it draws from
    Python's, NumPy's and torch's own generators follows from `seed`. Normalisation is the source's own affair: arrays
    and Datasets of the user's are not normalised here. `ignored` is a label that the loss does not count. Without
    `counts_classes` a Dataset that is too long to be read for its classes may leave them open.

    Raises JobError for a setting that is wrong, DataError for data that is missing, damaged or unfit.
    """
    name = name_of(data.use)
    made = _make(data, name, seed, python_path, ignored)
    splits = splits_of(made, name, ignored, read_sample_format(data, python_path), counts_classes=counts_classes)
    return cut_splits(_as_growing(splits, data, ignored), data, seed)


def read_sample_format(data: Data, python_path: Sequence[str] = ()) -> SampleFormat:
    """Return how the job says that samples are read. Raises JobError."""
    collate = data.collate
    if collate is not None:
        collate = resolve("data.collate", collate, {}, python_path=python_path)
        if inspect.isclass(collate):
            collate = construct("data.collate", data.collate, collate)
    target = (data.target,) if isinstance(data.target, str) else data.target
    return SampleFormat(data.inputs, target, collate)


def _as_growing(splits: Splits, data: Data, ignored: int | None) -> Splits:
    """Return the splits with an endless iterable as a growing set; JobError for settings that do not fit such a set."""
    if data.online and isinstance(splits.train, IterableSource):
        stream = splits.train
        grown = endless(stream, splits.num_classes)
        splits = dataclasses.replace(splits, train=grown)
    if not isinstance(splits.train, GrowingSource):
        if data.online:
            raise JobError(
                f"data.online = true is for an IterableDataset, and {splits.name} is none: remove the setting"
            )
        if data.holdout:
            raise JobError(
                f"data.holdout = {data.holdout} is for data that grows: set data.test_fraction = {data.holdout} instead"
            )
        return splits
    splits.train.ignored = ignored
    for key, off in (("train_limit", None), ("test_fraction", 0.0), ("processes", 0)):
        if getattr(data, key) != off:
            raise JobError(f"data.{key} = {getattr(data, key)} has no meaning for data that grows: remove it")
    if data.holdout and splits.test is not None:
        raise JobError(f"data.holdout = {data.holdout}, but {splits.name} has a test set: remove the setting")
    return splits


def _make(data: Data, name: str, seed: int, python_path: Sequence[str], ignored: int | None) -> Any:
    if is_data(data.use) and not is_live_table(data.use):
        if data.args:
            raise JobError(
                f"data has no setting '{next(iter(data.args))}': data.use is a {type(data.use).__name__}, "
                "which takes none"
            )
        return data.use
    provided: dict[str, Any] = {"seed": seed, "normalize": data.normalize}
    target = (data.target,) if isinstance(data.target, str) else data.target
    own = {"ignored": ignored, "python_path": tuple(python_path), "inputs": data.inputs, "target": target}
    if is_live_table(data.use):
        return bind("data", functools.partial(live_table, table=data.use), data.args, own)()
    make = resolve("data", data.use, BUILTIN_DATA, python_path=python_path)
    if make in BUILTIN_DATA.values():
        provided |= own
    bound = bind("data", make, data.args, provided)
    try:
        with preserved_generators():  # a user's split of the samples is the same on every worker, and on resume
            seed_generators(derive_seed(seed, "data"))
            made = bound()
        if not is_live_table(made):
            return made
        return live_table(table=made, ignored=ignored, inputs=data.inputs, target=target)
    except CordeeError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"data.use = {name!r} raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})"
        ) from error


# Parts of a source: the first samples, or a share set aside for testing.


class Subset:
    """Some samples of any source."""

    def __init__(self, source: Source, kept: Tensor) -> None:
        self.num_samples: int | None = len(kept)
        self.input_shape = source.input_shape
        self._source = source
        self._kept = kept

    def gather(self, indices: Tensor) -> Batch:
        return self._source.gather(self._kept.index_select(0, indices))


def cut_splits(splits: Splits, data: Data, seed: int) -> Splits:
    """Return the splits with `data.test_fraction`, then `data.train_limit` and `data.test_limit` applied.

    The share set aside is drawn from the job's seed. A setting that cannot be followed is a JobError.
    """
    if data.test_fraction > 0:
        splits = _with_test_fraction(splits, data.test_fraction, seed)
    if data.train_limit is not None:
        splits = dataclasses.replace(splits, train=_first(splits.train, data.train_limit))
    if data.test_limit is not None:
        if splits.test is None:
            raise JobError(
                f"data.test_limit = {data.test_limit}, but {splits.name} has no test set: "
                "set data.test_fraction, or remove the limit"
            )
        splits = dataclasses.replace(splits, test=_first(splits.test, data.test_limit))
    return splits


def _with_test_fraction(splits: Splits, fraction: float, seed: int) -> Splits:
    if splits.test is not None:
        raise JobError(f"data.test_fraction = {fraction}, but {splits.name} has a test set: remove the setting")
    num_samples = splits.train.num_samples
    if num_samples is None:
        raise JobError(
            f"data.test_fraction = {fraction} cannot be set aside from an IterableDataset of unknown length: "
            "give a test set of its own"
        )
    num_test = round(fraction * num_samples)
    if not 0 < num_test < num_samples:
        raise JobError(f"data.test_fraction = {fraction} of {num_samples} samples leaves nothing on one side")
    seed = derive_seed(seed, "test_fraction")
    source = splits.train
    if isinstance(source, BlockSource) or (isinstance(source, DatasetSource) and source.blocks is not None):
        rest, aside = source.split_rows(fraction, seed)
        return dataclasses.replace(splits, train=rest, test=aside)
    drawn = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    test, train = (part.sort().values for part in drawn.split_with_sizes([num_test, num_samples - num_test]))
    return dataclasses.replace(splits, train=_take(splits.train, train), test=_take(splits.train, test))


def _take(source: Source, kept: Tensor) -> Source:
    take = getattr(source, "take", None)
    return take(kept) if take is not None else Subset(source, kept)


def _first(source: Source, num_samples: int) -> Source:
    first = getattr(source, "first", None)
    if first is not None:
        return first(num_samples)  # type: ignore[no-any-return]
    if source.num_samples is None:
        raise DataError("a limit needs a source that knows its length, or that has the method first(num_samples)")
    return Subset(source, torch.arange(min(num_samples, source.num_samples)))


# The small sets that come with scikit-learn: iris (150 flowers) and digits (1,797 images of 8 × 8).
#
# Both are cut once and for all: in the order of the file, every fifth sample of each class is test. The split does not
# follow the job's seed, so that accuracies of different runs can be compared.

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


# The data sets that have a name.

BUILTIN_DATA: Mapping[str, Callable[..., Any]] = {
    "arrow": arrow,
    "cifar10": cifar10,
    "csv": csv_files,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "folder": folder,
    "huggingface": huggingface,
    "image-folder": image_folder,
    "image-tar": image_tar,
    "iris": iris,
    "mnist": mnist,
    "parquet": parquet,
    "synthetic": synthetic,
    "text": text,
}

FILE_SOURCES = ("cifar10", "fashion-mnist", "mnist")


def find_files(name: str) -> Path:
    """Return the folder, or the archive, in which the files of a set of `FILE_SOURCES` are found.

    Looks where loading would look, and raises the same DataError if they are nowhere. Reads little of them.
    """
    if name == "cifar10":
        return locate(CIFAR10, find_cifar_files, root=None, download=False).path
    return locate_idx_files({"mnist": MNIST, "fashion-mnist": FASHION_MNIST}[name])[0].parent
