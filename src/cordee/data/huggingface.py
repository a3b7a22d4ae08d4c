"""Data sets of the library `datasets` (Hugging Face) with random access, and tables that a program has at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cordee.core.errors import DataError, JobError, nearest
from cordee.core.references import resolve
from cordee.data.storage import is_url, require_package, under_root
from cordee.data.tables import MemoryTable, TableFiles, TableSettings, even_sizes, make_table_data, takes_table_keys

_BLOCK_BYTES = 8 << 20
_MOST_ROWS = 1 << 16  # of a block


@takes_table_keys
def huggingface(
    settings: TableSettings,
    path: str | None = None,
    dataset: Any = None,
    test: str | None = None,
    split: str = "train",
    test_split: str | None = None,
    root: str | None = None,
    ignored: int | None = None,
    python_path: Sequence[str] = (),
) -> Any:
    """A data set that was saved with `save_to_disk` (`path`), or that a callable gives (`dataset`).

    Of a DatasetDict, `split` is what to train on, and `test_split`, or "test" if there is one, what to test on. `test`
    is the path of a test set of its own.
    """
    library = require_package("datasets", "data.use = 'huggingface'", "huggingface")
    if (path is None) == (dataset is None):
        raise JobError(
            "data.use = 'huggingface' needs data.path, of a data set saved with save_to_disk, or data.dataset"
        )
    if path is not None:
        found = _load(library, path, root, "path")
    else:
        make: Callable[..., Any] = resolve("data.dataset", dataset, {}, python_path=python_path)
        found = make()
    train, aside = found, None
    if isinstance(found, library.DatasetDict):
        train = _split(found, split, "split")
        if test is None and (test_split is not None or "test" in found):
            aside = _split(found, test_split or "test", "test_split")
    elif split != "train" or test_split is not None:
        raise JobError(
            "data.split and data.test_split are for a DatasetDict, and the data set has no splits: remove them"
        )
    if test is not None:
        if test_split is not None:
            raise JobError("data.test and data.test_split both name a test set: remove one")
        aside = _load(library, test, root, "test")
    return live_table_data(train, aside, settings, ignored, name="huggingface")


def _load(library: Any, path: str, root: str | None, key: str) -> Any:
    full = under_root(path, root, key)
    try:
        return library.load_from_disk(full)
    except FileNotFoundError as error:
        hint = "" if is_url(full) else ", or was not saved with save_to_disk"
        raise DataError(f"data.{key} = {path!r} does not exist{hint}: {error}") from error
    except Exception as error:
        raise DataError(f"data.{key} = {path!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _split(found: Any, name: str, key: str) -> Any:
    if name not in found:
        raise DataError(
            f"data.{key} = {name!r}: the DatasetDict has no such split{nearest(name, found)} "
            f"(it has: {', '.join(found)})"
        )
    return found[name]


# Tables that a program has at hand: of pyarrow, or of `datasets`.


def is_live_table(value: Any) -> bool:
    """Whether something is a table of pyarrow's or a data set of Hugging Face's, a stream too. Imports neither."""
    return _is_one_of(value, ("pyarrow", "Table"), ("datasets", "Dataset"), ("datasets", "IterableDataset"))


def _is_one_of(value: Any, *names: tuple[str, str]) -> bool:
    classes = [getattr(sys.modules.get(module), name, None) for module, name in names]
    return isinstance(value, tuple(kind for kind in classes if kind is not None))


@takes_table_keys
def live_table(settings: TableSettings, table: Any, test: Any = None, ignored: int | None = None) -> Any:
    """The rows of a live table, and of another one to test on."""
    return live_table_data(table, test, settings, ignored, name=type(table).__name__)


def live_table_data(train: Any, test: Any, settings: TableSettings, ignored: int | None, *, name: str) -> Any:
    label = settings.target[0] if settings.target is not None and len(settings.target) == 1 else settings.label
    names = _class_names(train, label)
    if test is not None and settings.transform is None:
        _check_same_classes(names, _class_names(test, label))
    if names is not None and settings.is_named and settings.num_classes is None:
        settings = msgspec.structs.replace(settings, num_classes=len(names))
    is_plain = settings.transform is None and not settings.is_named
    if names is not None and settings.classes is None and is_plain and not settings.regression:
        settings = msgspec.structs.replace(settings, classes=tuple(names))
    if not hasattr(train, "features"):  # in memory already
        settings = msgspec.structs.replace(settings, memory_mb=1 << 40)
    aside = None if test is None else _files_of(test, "the test set")
    return make_table_data(name, _files_of(train, "the training set"), aside, settings, ignored)


def _files_of(table: Any, what: str) -> TableFiles:
    if not _is_one_of(table, ("pyarrow", "Table"), ("datasets", "Dataset")):
        kind = f"{type(table).__module__}.{type(table).__qualname__}"
        stream = " A stream has no random access: use Dataset, or give it as an IterableDataset of torch."
        raise DataError(
            f"{what} is a {kind}, not a Dataset of datasets or a Table of pyarrow."
            f"{stream if 'Iterable' in kind else ''}"
        )
    return HuggingFaceRows(table, what) if hasattr(table, "features") else MemoryTable(table, what)


def _class_names(table: Any, label: str) -> Sequence[str] | None:
    """Return the names that a data set of Hugging Face's gives to its classes (ClassLabel)."""
    feature = (getattr(table, "features", None) or {}).get(label)
    names: Sequence[str] | None = getattr(feature, "names", None)
    return names


def _check_same_classes(names: Sequence[str] | None, others: Sequence[str] | None) -> None:
    """Raise DataError where a number stands for another class in the test set."""
    for place, (name, other) in enumerate(zip(names or (), others or ())):
        if name != other:
            raise DataError(
                f"class {place} is {name!r} in the training set and {other!r} in the test set: give both the same "
                "ClassLabel (datasets: cast_column, or align_labels_with_mapping)"
            )


class HuggingFaceRows:
    """The rows of a Dataset in blocks of neighbours. Its files are mapped into memory, not read into it."""

    def __init__(self, dataset: Any, what: str) -> None:
        self.what = what
        kept = dataset.format
        if kept["type"] == "custom":
            raise DataError(
                f"{what} has a transform of its own (set_transform, with_transform), and rows are read as they are "
                "stored: set data.transform instead, or make new columns with datasets.Dataset.map"
            )
        # The columns of a format (set_format) are those that the data set shows.
        dataset = dataset.select_columns(kept["columns"])
        self._dataset = dataset.with_format("arrow")
        self.schema = dataset.features.arrow_schema
        num_rows = len(dataset)
        average = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))
        self._rows = max(1, min(_MOST_ROWS, _BLOCK_BYTES // average))
        self.sizes = even_sizes(num_rows, self._rows)

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        start = block * self._rows
        dataset = self._dataset if names is None else self._dataset.select_columns(list(names))
        return dataset[start : min(start + self._rows, len(self._dataset))]

    def where(self, block: int) -> tuple[str, int]:
        return self.what, block * self._rows

    def bounds(self, name: str) -> tuple[int, int] | None:
        return None

    def check_no_nulls(self, names: Sequence[str]) -> None:
        pass

    def digest(self) -> str:
        return ""
