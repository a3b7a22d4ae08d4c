"""From the job's [data] section to a data set that is known to be sound."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

from cordee.core.errors import CordeeError, DataError, JobError
from cordee.core.references import bind, name_of, resolve
from cordee.core.settings import Data
from cordee.data.builtin import BUILTIN_DATA
from cordee.data.datasets import IterableSource
from cordee.data.growing import GrowingSource, endless, folder
from cordee.data.source import Splits
from cordee.data.subset import cut_splits
from cordee.data.user_data import is_data, splits_of


def load_data(data: Data, *, seed: int, python_path: Sequence[str] = (), ignored: int | None = None) -> Splits:
    """Return the data set that `data` describes, checked and cut as it says.

    `data.use` is a built-in name, "module:callable", a live callable, or data itself (see `things`). A
    callable gets `data.args`, and `seed` and `normalize` if it has parameters of these names. Normalisation
    is the source's own affair: arrays and Datasets of the user's are not normalised here. `ignored` is a label that the
    loss does not count.

    Raises JobError for a setting that is wrong, DataError for data that is missing, damaged or unfit.
    """
    name = data.use if isinstance(data.use, str) else name_of(data.use)
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
    if is_data(data.use):
        if data.args:
            raise JobError(
                f"data has no setting '{next(iter(data.args))}': data.use is a {type(data.use).__name__}, "
                "which takes none"
            )
        return data.use
    make = resolve("data", data.use, BUILTIN_DATA, python_path=python_path)
    provided: dict[str, Any] = {"seed": seed, "normalize": data.normalize}
    if make is folder:
        provided["ignored"] = ignored
    bound = bind("data", make, data.args, provided)
    try:
        return bound()
    except CordeeError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"data.use = {name!r} raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})"
        ) from error
