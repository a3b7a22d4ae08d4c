"""Data in tables: rows with columns, in blocks.

`TableFiles` are the rows of files in blocks; `table_splits` makes a data set of them. Small sets become arrays, large
ones are read block by block (`blocks`). With a transform of the user's, rows become samples one by one.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import CordeeError, DataError, JobError, nearest
from cordee.core.references import resolve
from cordee.data.blocks import Blocks, BlockSource, source_of_blocks
from cordee.data.columns import Columns, ColumnSettings, Kind, check_name, image_column
from cordee.data.datasets import DatasetSource
from cordee.data.images import Color, ImageSettings
from cordee.data.samples import TARGET_NAMES
from cordee.data.source import ArraySource, Source, Splits, without_ignored

DEFAULT_MEMORY_MB = 256
# Fewer blocks than this in a window shuffle badly where neighbours in a file are alike.
_FEW_BLOCKS = 4


class TableFiles(Protocol):
    """The rows of files of one schema, in blocks."""

    what: str  # in errors
    sizes: Tensor
    schema: Any  # Arrow's

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        """Return columns of a block as an Arrow table. Raises DataError that names the file."""
        ...

    def where(self, block: int) -> tuple[str, int]:
        """Return a block in words, and the number of its first row in the file."""
        ...

    def bounds(self, name: str) -> tuple[int, int] | None:
        """Return the smallest and the largest whole number in a column, if that is known without reading it."""
        ...

    def check_no_nulls(self, names: Sequence[str]) -> None:
        """Raise DataError if columns are known to have nulls. What is not known is found when rows are read."""
        ...

    def digest(self) -> str: ...


class TableReader:
    """Blocks of a table as batches."""

    def __init__(
        self,
        files: TableFiles,
        columns: Columns,
        names: Sequence[str] | None,
        num_classes: int | None,
        ignored: int | None,
    ) -> None:
        self.sizes = files.sizes
        self.digest = files.digest
        self._files, self._columns = files, columns
        self._names, self._num_classes, self._ignored = names, num_classes, ignored
        first = int(self.sizes.nonzero()[0, 0])
        self.example = self._convert(first)
        self._first: tuple[int, Batch] | None = (first, self.example)  # read once, given once
        self.example = self.example.rows(0, 1).map(Tensor.clone)
        self.row_bytes = sum(part.element_size() * part.numel() for part in self.example)

    def read(self, block: int) -> Batch:
        kept, self._first = self._first, None
        return kept[1] if kept is not None and kept[0] == block else self._convert(block)

    def _convert(self, block: int) -> Batch:
        where, first_row = self._files.where(block)
        table = self._files.table(block, self._columns.names)
        batch = self._columns.convert(table, where, first_row, self._names)
        example = getattr(self, "example", batch)
        if batch.inputs.shape[1:] != example.inputs.shape[1:] or batch.targets.shape[1:] != example.targets.shape[1:]:
            shapes = [tuple(part.shape[1:]) for part in (*batch, *example)]
            raise DataError(
                f"{where} has inputs of the shape {shapes[0]} and targets of the shape {shapes[1]}, and the first rows "
                f"of {self._files.what} have {shapes[2]} and {shapes[3]}: all must have the same"
            )
        rows = range(first_row, first_row + len(batch.targets))
        self._columns.check_labels(batch.targets, self._num_classes, where, rows, self._ignored)
        return batch


def table_splits(
    name: str, train: TableFiles, test: TableFiles | None, settings: TableSettings, ignored: int | None
) -> Splits:
    """Return the data set of one table's rows, or of two tables', checked as far as that needs little reading."""
    memory_mb = settings.memory_mb
    columns = Columns(train.schema, settings, train.what)
    tables = [table for table in (train, test) if table is not None]
    for table in tables:
        table.check_no_nulls(columns.names)
    if test is not None:
        _check_same_types(columns, Columns(test.schema, settings, test.what), train.what, test.what)
    names, num_classes = _classes(columns, tables, ignored)
    sources: list[ArraySource | BlockSource] = [
        source_of_blocks(TableReader(table, columns, names, num_classes, ignored), memory_mb << 20) for table in tables
    ]
    return Splits(
        train=sources[0],
        test=sources[1] if len(sources) > 1 else None,
        input_shape=sources[0].input_shape,
        num_classes=num_classes,
        name=name,
        warnings=tuple(_warnings(train, sources[0], memory_mb)),
        class_names=None if names is None else tuple(names),
    )


def _check_same_types(columns: Columns, others: Columns, what: str, other: str) -> None:
    for column, kind in columns.types.items():
        if column not in others.types:
            raise DataError(f"{other} has no column {column!r}, which {what} has")
        if others.types[column] != kind:
            raise DataError(
                f"column {column!r} has the type {kind} in {what} and {others.types[column]} in {other}: "
                "make them the same"
            )


def _classes(
    columns: Columns, tables: Sequence[TableFiles], ignored: int | None
) -> tuple[Sequence[str] | None, int | None]:
    """Return the names of the classes, if they have names, and how many they are, None for regression."""
    settings = columns.settings
    if not columns.has_classes:
        return None, None
    if settings.classes is not None:
        return settings.classes, len(settings.classes)
    if columns.has_named_classes:
        found: set[str] = set()
        for table in tables:
            for block in table.sizes.nonzero()[:, 0].tolist():
                found |= columns.label_texts(table.table(block, [settings.label]), *table.where(block))
        if settings.num_classes is not None and len(found) > settings.num_classes:
            raise DataError(f"data.num_classes = {settings.num_classes}, but there are {len(found)} different labels")
        return sorted(found), settings.num_classes or len(found)
    if settings.num_classes is not None:
        return None, settings.num_classes
    if ignored is not None and ignored >= 0 and columns.kind == "tokens":
        ignored = None  # a word of the vocabulary all the same: inputs have it too
    bounds = [_label_bounds(table, columns, ignored) for table in tables]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest == 1 < highest and columns.types[settings.label].num_fields == 0:
        raise DataError(
            f"the labels in {settings.label!r} are from 1 to {highest}, and classes are counted from 0: subtract 1 "
            f"from the labels, or set data.num_classes = {highest + 1} if there is a class 0"
        )
    return None, max(highest, 0) + 1


def _label_bounds(table: TableFiles, columns: Columns, ignored: int | None) -> tuple[int, int]:
    label = columns.settings.label
    known = table.bounds(label)
    if known is not None and ignored not in known:
        return known
    lowest, highest = 1 << 62, -1  # the ignored label is the smallest or the largest: the others have to be looked at
    for block in table.sizes.nonzero()[:, 0].tolist():
        where, first_row = table.where(block)
        targets = columns.labels(table.table(block, [label]), where, first_row)
        targets = without_ignored(targets, ignored)
        if targets.numel():
            low, high = (int(bound) for bound in torch.aminmax(targets))
            lowest, highest = min(lowest, low), max(highest, high)
    return lowest, highest


def _warnings(files: TableFiles, source: Source, memory_mb: int) -> list[str]:
    if not isinstance(source, BlockSource):
        return []
    layout, row_bytes = source.blocks.layout, source.blocks.reader.row_bytes
    largest = int(layout.sizes.max())
    if largest > layout.window:
        where, _ = files.where(int(layout.sizes.argmax()))
        return [
            f"{where} takes {largest * row_bytes >> 20:,} MB, more than half of data.memory_mb = {memory_mb}: "
            "memory is exceeded, and rows are shuffled within such a block only. Write smaller row groups, or set "
            "data.memory_mb"
        ]
    if layout.window // largest < _FEW_BLOCKS:
        return [
            f"rows of {files.what} are shuffled among {max(1, layout.window // largest)} of {len(layout.sizes)} blocks "
            "at a time: write smaller row groups, or set data.memory_mb, if neighbours in the files are alike"
        ]
    return []


# Rows that a callable makes samples of: the user's transform, or the decoder of images.


class RowsReader:
    """Blocks of a table as they are in Arrow."""

    def __init__(self, files: TableFiles, names: Sequence[str] | None) -> None:
        self.sizes = files.sizes
        self.digest = files.digest
        self.where = files.where
        self._files, self._names = files, names
        first = int(self.sizes.nonzero()[0, 0])
        self.row_bytes = max(1, self.read(first).nbytes // int(self.sizes[first]))

    def read(self, block: int) -> Any:
        return self._files.table(block, self._names)


class RowsDataset:
    """Rows as samples: `transform(row)`, where a row is a dict by column, gives a pair (input, target)."""

    def __init__(self, blocks: Blocks[Any], transform: Callable[[dict[str, Any]], Any]) -> None:
        self.blocks = blocks
        self._transform = transform

    def __len__(self) -> int:
        return self.blocks.num_rows

    def __getitem__(self, index: int) -> Any:
        blocks, rows = self.blocks.locate(torch.tensor([index]))
        table, used = self.blocks.get(int(blocks))
        row = int(rows) if used is None else int(used[int(rows)])
        try:
            return self._transform(table.slice(row, 1).to_pylist()[0])
        except CordeeError as error:
            reader = self.blocks.reader
            assert isinstance(reader, RowsReader)
            where, first_row = reader.where(int(blocks))
            raise DataError(f"{where}, row {first_row + row}: {error}") from error

    def split_rows(self, fraction: float, seed: int) -> tuple[RowsDataset, RowsDataset]:
        rest, aside = self.blocks.split_rows(fraction, seed)
        return self._over(rest), self._over(aside)

    def first(self, num_rows: int) -> RowsDataset:
        return self._over(self.blocks.first(num_rows))

    def _over(self, blocks: Blocks[Any]) -> RowsDataset:
        part = RowsDataset(blocks, self._transform)
        if hasattr(self, "num_classes"):
            part.num_classes = self.num_classes
        return part

    num_classes: int  # where it is known


class ImageRow:
    """Makes a sample of a row that has an encoded image."""

    def __init__(self, column: str, columns: Columns, images: ImageSettings, names: Sequence[str] | None) -> None:
        self._column, self._label, self._images = column, columns.settings.label, images
        self._is_number = not columns.has_classes
        self._places = None if names is None else {name: place for place, name in enumerate(names)}

    def __call__(self, row: dict[str, Any]) -> tuple[Tensor, Any]:
        image, label = row[self._column], row[self._label]
        if image is None or image["bytes"] is None:
            raise DataError(f"column {self._column!r} has no image")
        if label is None:
            raise DataError(f"column {self._label!r} has no value (null)")
        if self._places is not None and not isinstance(label, str):
            return self._images.decode(image["bytes"], "the image"), label
        if self._places is not None and label not in self._places:
            raise DataError(f"the label {label!r} is no class{nearest(label, self._places)}")
        target = self._places[label] if self._places else float(label) if self._is_number else label
        return self._images.decode(image["bytes"], "the image"), target


class TableSettings(ColumnSettings, frozen=True, kw_only=True):
    """What the keys of [data] say of a table."""

    transform: Callable[[dict[str, Any]], Any] | None = None
    images: ImageSettings = ImageSettings()
    memory_mb: int = DEFAULT_MEMORY_MB
    inputs: tuple[str, ...] | None = None  # columns that are inputs by their names
    target: tuple[str, ...] | None = None  # the same for targets

    @property
    def is_named(self) -> bool:
        """Whether columns stay apart, each a tensor of its own."""
        return self.inputs is not None or self.target is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_mb < 1:
            raise JobError(f"data.memory_mb = {self.memory_mb} must be at least 1")
        own = {"shape": self.shape, "classes": self.classes, "kind": self.kind != "auto", "regression": self.regression}
        own |= {"resize": self.images.size, "color": self.images.color != "rgb"}
        if self.transform is not None:
            for key, value in own.items():
                if value not in (None, False):
                    raise JobError(f"data.{key} has no meaning with data.transform, which makes the samples: remove it")
        elif self.is_named:
            given = "inputs" if self.inputs is not None else "target"
            for key, value in {"columns": self.columns, **own}.items():
                if value not in (None, False):
                    raise JobError(f"data.{key} and data.{given} both say what the columns are: remove one of them")


def table_settings(
    columns: tuple[str, ...] | None = None,
    label: str = "label",
    shape: tuple[int, ...] | None = None,
    kind: Kind = "auto",
    num_classes: int | None = None,
    classes: tuple[str, ...] | None = None,
    regression: bool = False,
    transform: Any = None,
    resize: tuple[int, ...] | None = None,
    color: Color = "rgb",
    memory_mb: int = DEFAULT_MEMORY_MB,
    *,
    inputs: tuple[str, ...] | None = None,
    target: tuple[str, ...] | None = None,
    python_path: Sequence[str] = (),
) -> TableSettings:
    """Return the settings that the keys of [data] give; the parameters are these keys."""
    return TableSettings(
        columns=columns,
        label=label,
        shape=shape,
        kind=kind,
        num_classes=num_classes,
        classes=classes,
        regression=regression,
        transform=None if transform is None else resolve("data.transform", transform, {}, python_path=python_path),
        images=ImageSettings.of_keys(resize, color),
        memory_mb=memory_mb,
        inputs=inputs,
        target=target,
    )


def takes_table_keys(make: Callable[..., Any]) -> Callable[..., Any]:
    """Give a source the keys of `table_settings` beside its own; `make` gets the settings as its first argument."""
    own, shared = inspect.signature(make), inspect.signature(table_settings)

    @functools.wraps(make)
    def with_keys(*given: Any, **keys: Any) -> Any:
        settings = {key: keys[key] for key in shared.parameters if key in keys}
        rest = {key: value for key, value in keys.items() if key in own.parameters or key not in shared.parameters}
        return make(table_settings(**settings), *given, **rest)

    parameters = {**dict(list(own.parameters.items())[1:]), **shared.parameters}
    with_keys.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    )
    with_keys.__annotations__ = {**typing.get_type_hints(make), **typing.get_type_hints(table_settings)}
    return with_keys


def make_table_data(
    name: str, train: TableFiles, test: TableFiles | None, settings: TableSettings, ignored: int | None
) -> Any:
    """Return what `load_data` takes: splits, or data sets of rows that are made samples one by one."""
    tables = [table for table in (train, test) if table is not None]
    for table in tables:
        if not int(table.sizes.sum()):
            raise DataError(f"{table.what} has no samples")
    if settings.transform is not None:
        columns = None if settings.columns is None else [*settings.columns, settings.label]
        for table in tables:
            for column in columns or ():
                check_name(table.schema, column, "columns", table.what)
        sets = [_rows(table, columns, settings, settings.transform) for table in tables]
        return sets[0], sets[1] if test is not None else None
    if settings.is_named:
        return _named_rows(tables, test is not None, settings)
    image = image_column(train.schema, settings)
    if image is None:
        settings.images.refuse_any(train.what)
        return table_splits(name, train, test, settings, ignored)
    return _image_splits(name, image, tables, settings, ignored)


def _named_rows(tables: Sequence[TableFiles], has_test: bool, settings: TableSettings) -> Any:
    """Return data sets whose samples are dicts of the columns that are named."""
    names = [*(settings.inputs or ()), *(settings.target or ())]
    for table in tables:
        for key, columns in (("inputs", settings.inputs), ("target", settings.target)):
            for column in columns or ():
                check_name(table.schema, column, key, table.what)
    if settings.target is None:
        names += [name for name in TARGET_NAMES if name in tables[0].schema.names and name not in names][:1]
    wanted = None if settings.inputs is None else names
    sets = [_rows(table, wanted, settings, _without_nulls) for table in tables]
    return sets[0], sets[1] if has_test else None


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    if missing := [name for name, value in row.items() if value is None]:
        raise DataError(f"column {missing[0]!r} has no value (null)")
    return row


def _image_splits(
    name: str, image: str, tables: Sequence[TableFiles], settings: TableSettings, ignored: int | None
) -> Splits:
    for key, default in (("shape", None), ("kind", "auto")):
        if getattr(settings, key) != default:
            raise JobError(f"data.{key} is not for images, which column {image!r} has: remove it (data.resize, say)")
    columns = [Columns(table.schema, settings, table.what, has_images=True) for table in tables]
    _check_same_types(columns[0], columns[-1], tables[0].what, tables[-1].what)
    names, num_classes = _classes(columns[0], tables, ignored)
    decode = ImageRow(image, columns[0], settings.images.of_first(_first_image(tables[0], image)), names)
    sets = [
        DatasetSource(_rows(table, columns[0].names, settings, decode), what)
        for table, what in zip(tables, ("the training set", "the test set"))
    ]
    return Splits(
        train=sets[0],
        test=sets[1] if len(sets) > 1 else None,
        input_shape=sets[0].input_shape,
        num_classes=num_classes,
        name=name,
        class_names=None if names is None else tuple(names),
    )


def _first_image(files: TableFiles, column: str) -> bytes:
    first = int(files.sizes.nonzero()[0, 0])
    image = files.table(first, [column]).slice(0, 1).to_pylist()[0][column]
    if image is None or image["bytes"] is None:
        raise DataError(f"column {column!r} of {files.what} has no image in its first row")
    content: bytes = image["bytes"]
    return content


def _rows(files: TableFiles, names: Sequence[str] | None, settings: TableSettings, transform: Any) -> RowsDataset:
    dataset = RowsDataset(Blocks(RowsReader(files, names), settings.memory_mb << 20), transform)
    if settings.num_classes is not None:
        dataset.num_classes = settings.num_classes
    return dataset


class MemoryTable:
    """A table of Arrow's that is in memory, in blocks."""

    def __init__(self, table: Any, what: str) -> None:
        self.what = what
        self.schema = table.schema
        self._table = table
        self.sizes = even_sizes(table.num_rows, _MEMORY_ROWS)

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        part = self._table.slice(block * _MEMORY_ROWS, _MEMORY_ROWS)
        return part if names is None else part.select(list(names))

    def where(self, block: int) -> tuple[str, int]:
        return self.what, block * _MEMORY_ROWS

    def bounds(self, name: str) -> tuple[int, int] | None:
        return None

    def check_no_nulls(self, names: Sequence[str]) -> None:
        pass  # all rows are read before training

    def digest(self) -> str:
        return ""


_MEMORY_ROWS = 1 << 16


def even_sizes(num_rows: int, size: int) -> Tensor:
    """Return the sizes of blocks of `size` rows, of which the last may have fewer."""
    whole, rest = divmod(num_rows, size)
    return torch.tensor([size] * whole + [rest] * (rest > 0), dtype=torch.int64)
