"""From the job's [data] section to a data set that is known to be sound."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from cordee.core.batch import Batch
from cordee.core.errors import CordeeError, DataError, JobError
from cordee.core.references import bind, name_of, resolve
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
from cordee.data.parquet import arrow, parquet
from cordee.data.source import ArraySource, Source, Splits, check_classes, count_classes, find_missing, source_of_arrays
from cordee.data.synthetic import synthetic
from cordee.data.text import text


def load_data(data: Data, *, seed: int, python_path: Sequence[str] = (), ignored: int | None = None) -> Splits:
    """Return the data set that `data` describes, checked and cut as it says.

    `data.use` is a built-in name, "module:callable", a live callable, or data itself (see `splits_of`). A
    callable gets `data.args`, and `seed` and `normalize` if it has parameters of these names. Normalisation
    is the source's own affair: arrays and Datasets of the user's are not normalised here. `ignored` is a label that the
    loss does not count.

    Raises JobError for a setting that is wrong, DataError for data that is missing, damaged or unfit.
    """
    name = name_of(data.use)
    splits = _as_growing(splits_of(_make(data, name, seed, python_path, ignored), name, ignored), data, ignored)
    return cut_splits(splits, data, seed)


def _as_growing(splits: Splits, data: Data, ignored: int | None) -> Splits:
    """Return the splits with an endless iterable as a growing set; JobError for settings that do not fit such a set."""
    if data.online and isinstance(splits.train, IterableSource):
        stream = splits.train
        grown = endless(stream.dataset, stream.what, splits.num_classes, stream.example)
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
    own = {"ignored": ignored, "python_path": tuple(python_path)}
    if is_live_table(data.use):
        return bind("data", functools.partial(live_table, table=data.use), data.args, own)()
    make = resolve("data", data.use, BUILTIN_DATA, python_path=python_path)
    if make in BUILTIN_DATA.values():
        provided |= own
    bound = bind("data", make, data.args, provided)
    try:
        made = bound()
        return live_table(table=made, ignored=ignored) if is_live_table(made) else made
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


# What a user may give as data, and the source it becomes.
#
# A split is a `Source`, a torch Dataset or IterableDataset, or a tuple (x, y) of arrays. Data is `Splits`, a tuple
# (train, test) of splits, where test may be None, or one split. A tuple of two is (train, test) if its first part is a
# Source, a Dataset or itself a tuple of two arrays; otherwise it is (x, y). Lists are always arrays: write x as a list
# or an array, not as a tuple of tuples.

# Counting the classes of a Dataset that does not state them means reading it all.
LARGEST_COUNTED = 10_000


def is_data(value: Any) -> bool:
    """Return whether a live object is itself data, and not something to call for data."""
    return isinstance(value, (Splits, Source, Dataset, tuple)) or not (isinstance(value, str) or callable(value))


def splits_of(value: Any, name: str, ignored: int | None = None) -> Splits:
    """Return data as splits that are checked: samples there, shapes and labels that agree. DataError if not.

    `ignored` is a label that the loss does not count; it may be none of the classes.
    """
    if isinstance(value, Splits):
        splits = dataclasses.replace(
            value,
            train=_source(value.train, "the training set"),
            test=None if value.test is None else _source(value.test, "the test set"),
            input_shape=tuple(value.input_shape),
        )
    else:
        train, test = _train_and_test(value)
        train_source = _source(train, "the training set")
        test_source = None if test is None else _source(test, "the test set")
        num_classes = _num_classes([source for source in (train_source, test_source) if source is not None], ignored)
        splits = Splits(train_source, test_source, train_source.input_shape, num_classes, name)
    for source in (splits.train, splits.test):
        if isinstance(source, (DatasetSource, IterableSource)):
            # with which they check the labels they read
            source.num_classes, source.ignored = splits.num_classes, ignored
    _check(splits, ignored)
    return dataclasses.replace(splits, warnings=splits.warnings + _find_empty_classes(splits))


def _train_and_test(value: Any) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2 and _is_split(value[0]):
        return value[0], value[1]
    return value, None


def _is_split(value: Any) -> bool:
    return isinstance(value, (Source, Dataset)) or _is_pair_of_arrays(value) or _is_map_style(value)


def _is_pair_of_arrays(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_array_like(part) for part in value)


def _is_array_like(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple)) or hasattr(value, "__array__")


def _is_map_style(value: Any) -> bool:
    """Whether something that is not a torch Dataset can be read like one."""
    has_both = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return has_both and not _is_array_like(value) and not isinstance(value, (str, bytes, dict))


def _source(thing: Any, what: str) -> Source:
    if isinstance(thing, Source):
        return thing
    if isinstance(thing, TensorDataset) and type(thing) is TensorDataset and len(thing.tensors) == 2:
        return source_of_arrays(*thing.tensors, what)
    if type(thing) is TorchSubset and type(thing.dataset) is TensorDataset:
        return _taken(_source(thing.dataset, what), thing.indices)
    if isinstance(thing, IterableDataset):
        return IterableSource(thing, what)
    if isinstance(thing, Dataset) or _is_map_style(thing):
        if not hasattr(thing, "__len__"):
            raise DataError(f"{what}: the Dataset {type(thing).__name__} has no __len__; add it, or make it iterable")
        return DatasetSource(thing, what)
    if isinstance(thing, (tuple, list)) and len(thing) == 2:
        return source_of_arrays(thing[0], thing[1], what)
    if isinstance(thing, (tuple, list)):
        given = f"a {type(thing).__name__} of {len(thing)}"
    else:
        given = "None" if thing is None else f"a value of type {type(thing).__name__}"
    raise DataError(
        f"{what} was given as {given}; it can be a torch Dataset, an IterableDataset, "
        "or a tuple (inputs, targets) of arrays"
    )


def _taken(source: Source, indices: Any) -> Source:
    return source.take(torch.as_tensor(indices)) if isinstance(source, ArraySource) else source


def _num_classes(sources: list[Source], ignored: int | None) -> int | None:
    """Return how many classes the targets have, None for regression."""
    kinds = {_has_classes(source) for source in sources}
    if len(kinds) > 1:
        raise DataError("the targets of training and test set differ: whole numbers in one, fractions in the other")
    if kinds == {False}:
        return None
    sets = zip(sources, ("the training set", "the test set"))
    counts, starts = zip(*[_count(source, what, ignored) for source, what in sets], strict=True)
    num_classes: int = max(counts)
    if all(starts) and ignored != 0:
        raise DataError(
            f"the labels are from 1 to {num_classes - 1}, and classes are counted from 0, so that class 0 would have "
            "no samples: subtract 1 from the labels. If there is a class 0, give the Dataset an attribute "
            f"num_classes, or return cordee.data.Splits with num_classes = {num_classes}"
        )
    return num_classes


def _find_empty_classes(splits: Splits) -> tuple[str, ...]:
    """Return a warning if no sample of the training set has some class, such as an empty folder's."""
    source, num_classes = splits.train, splits.num_classes
    if num_classes is None:
        return ()
    names: Sequence[str] | None = splits.class_names
    targets = None
    if isinstance(source, ArraySource):
        targets = source.targets
    elif isinstance(source, DatasetSource):
        targets = getattr(source.dataset, "targets", None)
        names = names or getattr(source.dataset, "classes", None)
    if not isinstance(targets, (list, Tensor)) or len(targets) == 0:
        return ()
    labels = torch.as_tensor(targets)
    if labels.is_floating_point():
        return ()
    missing = find_missing(labels, num_classes, names if isinstance(names, (list, tuple)) else None)
    return (f"the training set of {splits.name} has no sample of class {missing}",) if missing else ()


def _has_classes(source: Source) -> bool:
    if isinstance(source, (DatasetSource, IterableSource)):
        return not source.example.targets.is_floating_point()
    return not source.gather(torch.tensor([0])).targets.is_floating_point()


def _count(source: Source, what: str, ignored: int | None) -> tuple[int, bool]:
    """Return how many classes there are, and whether they were counted from labels that begin with 1."""
    if isinstance(source, ArraySource):
        return count_classes(source.targets, what, ignored), _starts_at_one(source.targets)
    if not isinstance(source, (DatasetSource, IterableSource)):
        raise DataError("a Source of your own does not state its classes: return cordee.data.Splits, which does")
    declared = declared_classes(source.dataset)
    if declared is not None:
        targets = getattr(source.dataset, "targets", None)
        is_counted = not _declares_classes(source.dataset) and isinstance(targets, (list, Tensor))
        return declared, is_counted and _starts_at_one(torch.as_tensor(targets))
    if isinstance(source, IterableSource) or (source.num_samples or 0) > LARGEST_COUNTED:
        raise DataError(
            f"{source.what} does not state how many classes it has, and is too long to be read for it: "
            f"give the {type(source.dataset).__name__} an attribute num_classes"
        )
    labels = source.gather(torch.arange(source.num_samples or 0)).targets
    return count_classes(labels, what, ignored), _starts_at_one(labels)


def _starts_at_one(targets: Tensor) -> bool:
    """Whether labels are from 1 to something, where samples have one each: a vocabulary may begin with unused words."""
    return targets.dim() == 1 and len(targets) > 0 and int(targets.min()) == 1 < int(targets.max())


def _declares_classes(dataset: Any) -> bool:
    has_number = isinstance(getattr(dataset, "num_classes", None), int)
    return has_number or isinstance(getattr(dataset, "classes", None), (list, tuple))


def declared_classes(dataset: Any) -> int | None:
    """Return what a dataset says of its classes: `num_classes`, the length of `classes`, or its `targets`."""
    if isinstance(getattr(dataset, "num_classes", None), int):
        return int(dataset.num_classes)
    if isinstance(getattr(dataset, "classes", None), (list, tuple)):
        return len(dataset.classes)
    if isinstance(getattr(dataset, "targets", None), (list, Tensor)) and len(dataset.targets) > 0:
        targets = torch.as_tensor(dataset.targets)
        if not targets.is_floating_point():
            return count_classes(targets, "the attribute targets of the dataset")
    return declared_classes(dataset.dataset) if isinstance(dataset, TorchSubset) else None


def _check(splits: Splits, ignored: int | None) -> None:
    for source, what in ((splits.train, "the training set"), (splits.test, "the test set")):
        if source is None:
            continue
        if source.num_samples == 0:
            raise DataError(f"{what} of {splits.name} has no samples")
        if tuple(source.input_shape) != splits.input_shape:
            raise DataError(
                f"the inputs of {what} have the shape {tuple(source.input_shape)}, "
                f"those of {splits.name} should have {splits.input_shape}"
            )
        if isinstance(source, ArraySource) and splits.num_classes is not None:
            if source.targets.is_floating_point():
                raise DataError(f"the targets of {what} are fractions, but {splits.num_classes} classes are declared")
            check_classes(source.targets, splits.num_classes, f"{what} of {splits.name}", ignored=ignored)


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
