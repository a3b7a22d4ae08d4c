"""What a user may give as data, and the source it becomes.

A split is a `Source`, a torch Dataset or IterableDataset, or a tuple (x, y) of arrays. Data is `Splits`, a tuple
(train, test) of splits, where test may be None, or one split. A tuple of two is (train, test) if its first part is a
Source, a Dataset or itself a tuple of two arrays, or if both are dicts with the same names; otherwise it is (x, y).
Lists are always arrays: write x as a list or an array, not as a tuple of tuples. A dict of arrays is a split whose
target has a name; x and y may be dicts too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from cordee.core.errors import DataError, JobError
from cordee.data.datasets import DatasetSource, IterableSource
from cordee.data.samples import PAIRS, SampleFormat
from cordee.data.source import (
    ArraySource,
    Source,
    Splits,
    check_classes,
    count_classes,
    find_missing,
    source_of_arrays,
    source_of_trees,
    without_ignored,
)

# Counting the classes of a Dataset that does not state them means reading it all.
LARGEST_COUNTED = 10_000
_COLLATED_AT_ONCE = 64  # samples, to count their classes


def is_data(value: Any) -> bool:
    """Return whether a live object is itself data, and not something to call for data."""
    return isinstance(value, (Splits, Source, Dataset, tuple)) or not (isinstance(value, str) or callable(value))


def splits_of(
    value: Any,
    name: str,
    ignored: int | None = None,
    sample_format: SampleFormat = PAIRS,
    *,
    counts_classes: bool = True,
) -> Splits:
    """Return data as splits that are checked: samples there, shapes and labels that agree. DataError if not.

    `ignored` is a label that the loss does not count; it may be none of the classes. `sample_format` is how the
    samples of Datasets are read.
    """
    if isinstance(value, Splits):
        shape = value.input_shape
        splits = dataclasses.replace(
            value,
            train=_source(value.train, "the training set", sample_format),
            test=None if value.test is None else _source(value.test, "the test set", sample_format),
            input_shape=tuple(shape) if isinstance(shape, list) else shape,
        )
    else:
        train, test = _train_and_test(value)
        train_source = _source(train, "the training set", sample_format)
        test_source = None if test is None else _source(test, "the test set", sample_format)
        sources = [source for source in (train_source, test_source) if source is not None]
        num_classes = _num_classes(sources, ignored, counts_classes)
        splits = Splits(train_source, test_source, train_source.input_shape, num_classes, name)
    for source in (splits.train, splits.test):
        if isinstance(source, (DatasetSource, IterableSource)):
            # with which they check the labels they read
            source.num_classes, source.ignored = splits.num_classes, ignored
    _check(splits, ignored)
    _check_format(splits, sample_format)
    return dataclasses.replace(splits, warnings=splits.warnings + _find_empty_classes(splits))


def _train_and_test(value: Any) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        if _is_split(value[0]):
            return value[0], value[1]
        if isinstance(value[0], dict) and (value[1] is None or _has_keys(value[1], value[0])):
            return value[0], value[1]
    return value, None


def _has_keys(value: Any, other: dict[Any, Any]) -> bool:
    return isinstance(value, dict) and value.keys() == other.keys()


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


def _source(thing: Any, what: str, sample_format: SampleFormat) -> Source:
    if isinstance(thing, Source):
        return thing
    if sample_format.collate is None and type(thing) is TensorDataset and len(thing.tensors) == 2:
        return source_of_arrays(*thing.tensors, what)
    if sample_format.collate is None and type(thing) is TorchSubset and type(thing.dataset) is TensorDataset:
        return _taken(_source(thing.dataset, what, sample_format), thing.indices)
    if isinstance(thing, IterableDataset):
        return IterableSource(thing, what, sample_format=sample_format)
    if isinstance(thing, Dataset) or _is_map_style(thing):
        if not hasattr(thing, "__len__"):
            raise DataError(f"{what}: the Dataset {type(thing).__name__} has no __len__; add it, or make it iterable")
        return DatasetSource(thing, what, sample_format=sample_format)
    if isinstance(thing, (tuple, list)) and len(thing) == 2:
        if any(isinstance(part, (dict, tuple)) for part in thing):
            return source_of_trees(thing[0], thing[1], what)
        return source_of_arrays(thing[0], thing[1], what)
    if isinstance(thing, dict):
        return source_of_trees(*sample_format.split(thing, what), what)
    if isinstance(thing, (tuple, list)):
        given = f"a {type(thing).__name__} of {len(thing)}"
    else:
        given = "None" if thing is None else f"a value of type {type(thing).__name__}"
    raise DataError(
        f"{what} was given as {given}; it can be a torch Dataset, an IterableDataset, "
        "a tuple (inputs, targets) of arrays, or a dict of arrays"
    )


def _taken(source: Source, indices: Any) -> Source:
    return source.take(torch.as_tensor(indices)) if isinstance(source, ArraySource) else source


def _check_format(splits: Splits, sample_format: SampleFormat) -> None:
    """Raise JobError for settings of samples that no source of the data follows."""
    sources = [source for source in (splits.train, splits.test) if source is not None]
    if sample_format.collate is not None and any(
        getattr(source, "format", None) is not sample_format for source in sources
    ):
        raise JobError(
            f"data.collate makes batches of the samples of a Dataset, and {splits.name} is made of arrays: remove it"
        )
    key = "inputs" if sample_format.inputs is not None else "target" if sample_format.target is not None else None
    if key is not None and not isinstance(splits.train.input_shape, Mapping):
        raise JobError(
            f"data.{key} chooses parts of a sample by name, and the samples of {splits.name} have no names: remove it"
        )


def _num_classes(sources: list[Source], ignored: int | None, is_needed: bool) -> int | None:
    """Return how many classes the targets have, None for regression, and for targets that are not one tensor."""
    kinds = {_has_classes(source) for source in sources}
    if len(kinds) > 1:
        raise DataError("the targets of training and test set differ: whole numbers in one, fractions in the other")
    if kinds == {False}:
        return None
    ignores_first = ignored == 0
    if ignored is not None and ignored >= 0 and any(_has_tokens(source) for source in sources):
        ignored = None  # a word of the vocabulary all the same: inputs have it too
    sets = zip(sources, ("the training set", "the test set"))
    if not is_needed and any(_is_too_long(source, ignored) for source in sources):
        return None
    counts, starts = zip(*[_count(source, what, ignored) for source, what in sets], strict=True)
    num_classes: int = max(counts)
    if all(starts) and not ignores_first:
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
        targets = source.example.targets
    else:
        targets = source.gather(torch.tensor([0])).targets
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def _has_tokens(source: Source) -> bool:
    if isinstance(source, (DatasetSource, IterableSource)):
        inputs = source.example.inputs
    else:
        inputs = source.gather(torch.tensor([0])).inputs
    return isinstance(inputs, Tensor) and inputs.dtype is torch.int64


def _is_too_long(source: Source, ignored: int | None) -> bool:
    """Whether a source's labels would all have to be read to count the classes, and are too many for that."""
    if not isinstance(source, (DatasetSource, IterableSource)):
        return False
    is_long = isinstance(source, IterableSource) or (source.num_samples or 0) > LARGEST_COUNTED
    return is_long and declared_classes(source.dataset, ignored) is None


def _count(source: Source, what: str, ignored: int | None) -> tuple[int, bool]:
    """Return how many classes there are, and whether they were counted from labels that begin with 1."""
    if isinstance(source, ArraySource):
        return count_classes(source.targets, what, ignored), _starts_at_one(source.targets, ignored)
    if not isinstance(source, (DatasetSource, IterableSource)):
        raise DataError("a Source of your own does not state its classes: return cordee.data.Splits, which does")
    declared = declared_classes(source.dataset, ignored)
    if declared is not None:
        targets = getattr(source.dataset, "targets", None)
        is_counted = not _declares_classes(source.dataset) and isinstance(targets, (list, Tensor))
        return declared, is_counted and _starts_at_one(torch.as_tensor(targets), ignored)
    if _is_too_long(source, ignored):
        raise DataError(
            f"{source.what} does not state how many classes it has, and is too long to be read for it: "
            f"give the {type(source.dataset).__name__} an attribute num_classes"
        )
    assert isinstance(source, DatasetSource)
    indices = torch.arange(source.num_samples or 0)
    if source.format.collate is None:
        labels = source.gather(indices).targets
        return count_classes(labels, what, ignored), _starts_at_one(labels, ignored)
    counts, starts = [], []
    for first in range(0, len(indices), _COLLATED_AT_ONCE):
        labels = source.gather(indices[first : first + _COLLATED_AT_ONCE]).targets
        counts.append(count_classes(labels, what, ignored))
        counted = without_ignored(labels, ignored)
        starts.append(labels.dim() != 1 or counted.numel() == 0 or int(counted.min()) >= 1)
    return max(counts), source.example.targets.dim() == 1 and all(starts) and max(counts) > 1


def _starts_at_one(targets: Tensor, ignored: int | None) -> bool:
    """Whether labels are from 1 to something, where samples have one each: a vocabulary may begin with unused words."""
    counted = without_ignored(targets, ignored)
    return targets.dim() == 1 and counted.numel() > 0 and int(counted.min()) == 1 < int(counted.max())


def _declares_classes(dataset: Any) -> bool:
    has_number = isinstance(getattr(dataset, "num_classes", None), int)
    return has_number or isinstance(getattr(dataset, "classes", None), (list, tuple))


def declared_classes(dataset: Any, ignored: int | None) -> int | None:
    """Return what a dataset says of its classes: `num_classes`, the length of `classes`, or its `targets`."""
    if isinstance(getattr(dataset, "num_classes", None), int):
        return int(dataset.num_classes)
    if isinstance(getattr(dataset, "classes", None), (list, tuple)):
        return len(dataset.classes)
    if isinstance(getattr(dataset, "targets", None), (list, Tensor)) and len(dataset.targets) > 0:
        targets = torch.as_tensor(dataset.targets)
        if not targets.is_floating_point():
            return count_classes(targets, "the attribute targets of the dataset", ignored)
    return declared_classes(dataset.dataset, ignored) if isinstance(dataset, TorchSubset) else None


def _check(splits: Splits, ignored: int | None) -> None:
    for source, what in ((splits.train, "the training set"), (splits.test, "the test set")):
        if source is None:
            continue
        if source.num_samples == 0:
            raise DataError(f"{what} of {splits.name} has no samples")
        has_collate = getattr(getattr(source, "format", None), "collate", None) is not None
        if not has_collate and source.input_shape != splits.input_shape:
            raise DataError(
                f"the inputs of {what} have the shape {source.input_shape}, "
                f"those of {splits.name} should have {splits.input_shape}"
            )
        if isinstance(source, ArraySource) and splits.num_classes is not None and isinstance(source.targets, Tensor):
            if source.targets.is_floating_point():
                raise DataError(f"the targets of {what} are fractions, but {splits.num_classes} classes are declared")
            check_classes(source.targets, splits.num_classes, f"{what} of {splits.name}", ignored=ignored)
