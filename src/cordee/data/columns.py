"""Columns of an Arrow table as inputs and targets: which columns, types and shapes, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import DataError, JobError, nearest
from cordee.data.source import check_classes, check_finite
from cordee.data.storage import require_package

Kind = Literal["auto", "numbers", "tokens", "bytes"]


class ColumnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the columns of a table are used. The keys are those of [data] in the job file."""

    columns: tuple[str, ...] | None = None  # inputs; None: all but the label
    label: str = "label"
    shape: tuple[int, ...] | None = None  # of an input; None: as the column has it
    kind: Kind = "auto"  # of the inputs
    num_classes: int | None = None  # None: found in the labels
    classes: tuple[str, ...] | None = None  # names of the classes, in their order; None: as the labels are
    regression: bool = False  # whole-number labels are numbers to predict

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 2:
            raise JobError(f"data.num_classes = {self.num_classes} must be at least 2")
        if self.num_classes is not None and self.classes is not None and self.num_classes != len(self.classes):
            raise JobError(f"data.num_classes = {self.num_classes}, but data.classes has {len(self.classes)} names")
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            raise JobError("data.classes has a name twice")
        if self.regression and (self.num_classes is not None or self.classes is not None):
            raise JobError("data.regression = true predicts numbers: remove data.num_classes and data.classes")
        if self.columns is not None and not self.columns:
            raise JobError("data.columns = [] names no column")
        if self.columns is not None and self.label in self.columns:
            raise JobError(f"data.columns has the label {self.label!r} in it: remove it there")
        if self.shape is not None and any(length < 1 for length in self.shape):
            raise JobError(f"data.shape = {list(self.shape)} must be lengths of at least 1")


class Columns:
    """The columns of tables with one schema, as inputs and targets."""

    def __init__(self, schema: Any, settings: ColumnSettings, what: str, *, has_images: bool = False) -> None:
        """`schema` is Arrow's; `what` names the table in errors. DataError if it does not have what is asked for.

        With `has_images` the inputs are a column of images, which somebody else decodes.
        """
        self.settings = settings
        self._pa = require_package("pyarrow", what, "parquet")
        self._what = what
        names: list[str] = list(schema.names)
        for key, name in (("label", settings.label), *(("columns", name) for name in settings.columns or ())):
            check_name(schema, name, key, what)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{what} has two columns of the name {twice!r}: rename one")
        self.inputs = list(settings.columns or [name for name in names if name != settings.label])
        if not self.inputs:
            raise DataError(f"{what} has no column but the label {settings.label!r}: there are no inputs")
        self.types = {name: _plain(self._pa, schema.field(name).type) for name in self.names}
        self._check_label()
        self.kind = "images"
        if not has_images:
            for name in self.inputs:
                self._check_input(name)
            self.kind = self._kind()

    @property
    def names(self) -> list[str]:
        return [*self.inputs, self.settings.label]

    @property
    def has_named_classes(self) -> bool:
        """Whether labels are texts."""
        return _is_text(self._pa, self.types[self.settings.label])

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes, not numbers to predict."""
        types, label = self._pa.types, _innermost(self.types[self.settings.label])
        is_whole = types.is_integer(label) or types.is_boolean(label)
        return self.has_named_classes or (is_whole and not self.settings.regression)

    def _check_input(self, name: str) -> None:
        kind = self.types[name]
        innermost = _innermost(kind)
        if _is_number(self._pa, innermost) or _is_bytes(self._pa, innermost):
            return
        others = [other for other in self.inputs if _is_number(self._pa, _innermost(self.types[other]))]
        advice = f"set data.columns = {others}" if others else "set data.transform to make numbers of it"
        raise DataError(
            f"column {name!r} of {self._what} has the type {kind}, which is not numbers: {advice}, or convert it"
        )

    def _check_label(self) -> None:
        kind = self.types[self.settings.label]
        if self.has_named_classes and self.settings.regression:
            raise DataError(f"data.regression = true, but the label {self.settings.label!r} has the type {kind}")
        if not self.has_named_classes and not _is_number(self._pa, _innermost(kind)):
            raise DataError(
                f"the label {self.settings.label!r} of {self._what} has the type {kind}: it must be whole numbers or "
                "texts (classes), or numbers to predict"
            )
        if not self.has_classes and (self.settings.num_classes or self.settings.classes):
            raise DataError(
                f"the label {self.settings.label!r} of {self._what} has the type {kind}, and the job names classes: "
                "remove data.num_classes and data.classes, or make the labels whole numbers"
            )

    def _kind(self) -> str:
        pa, alone = self._pa, self.types[self.inputs[0]] if len(self.inputs) == 1 else None
        is_list = alone is not None and not _is_number(pa, alone)
        innermost = _innermost(alone) if alone is not None else None
        if self.settings.kind == "auto":
            if not is_list:
                return "numbers"
            if _is_bytes(pa, innermost) or innermost == pa.uint8():
                return "bytes"
            return "tokens" if pa.types.is_integer(innermost) else "numbers"
        if self.settings.kind == "tokens" and not all(
            pa.types.is_integer(_innermost(self.types[name])) for name in self.inputs
        ):
            raise DataError(f"data.kind = 'tokens', but not all of {_listed(self.inputs)} are whole numbers")
        if self.settings.kind == "bytes" and not all(
            _is_bytes(pa, _innermost(self.types[name])) or _innermost(self.types[name]) == pa.uint8()
            for name in self.inputs
        ):
            raise DataError(f"data.kind = 'bytes', but not all of {_listed(self.inputs)} are bytes (uint8 or binary)")
        return self.settings.kind

    def convert(self, table: Any, where: str, first_row: int, names: Sequence[str] | None) -> Batch:
        """Return rows as they are held: bytes as uint8, tokens as int64, numbers as float32; targets ready.

        `where` and `first_row` say which rows these are, in errors. `names` are the classes of labels that are texts.
        """
        parts = [self._values(table, name, where, first_row) for name in self.inputs]
        if len(parts) > 1:
            parts = [part.reshape(len(part), -1) for part in parts]
        wanted: Any = {"bytes": np.uint8, "tokens": np.int64, "numbers": np.float32}[self.kind]
        if len(parts) == 1:
            values = np.array(parts[0], dtype=wanted)  # a copy: Arrow's memory is read-only
            values = values.reshape(-1, 1) if values.ndim == 1 else values
        else:
            values = np.concatenate([part.astype(wanted, copy=False) for part in parts], axis=1)
        inputs = self._shaped(torch.from_numpy(values), where)
        check_finite(inputs, f"{where} (rows from {first_row} on)")
        return Batch(inputs, self.labels(table, where, first_row, names))

    def _shaped(self, inputs: Tensor, where: str) -> Tensor:
        shape = self.settings.shape
        if shape is None:
            return inputs
        if math.prod(shape) != math.prod(inputs.shape[1:]):
            raise DataError(
                f"data.shape = {list(shape)} has {math.prod(shape)} values, and a row of {where} has "
                f"{math.prod(inputs.shape[1:])} ({_listed(self.inputs)})"
            )
        return inputs.reshape(-1, *shape)

    def labels(self, table: Any, where: str, first_row: int, names: Sequence[str] | None = None) -> Tensor:
        """Return the targets of rows: classes as int64, numbers to predict as float32."""
        label = self.settings.label
        if self.has_named_classes:
            assert names is not None
            texts = self._texts(table, where, first_row)
            places = self._pa.compute.index_in(texts, value_set=self._pa.array(list(names), self._pa.string()))
            if places.null_count:
                row = places.is_null().to_numpy(zero_copy_only=False).argmax()
                raise DataError(
                    f"{where}: the label of row {first_row + row} is {texts[int(row)].as_py()!r}, which is no class"
                    f"{nearest(texts[int(row)].as_py(), names)} (classes: {_listed(list(names))})"
                )
            return torch.from_numpy(places.to_numpy(zero_copy_only=False).astype(np.int64))
        values = self._values(table, label, where, first_row)
        if self.has_classes:
            if values.dtype.kind == "u" and values.dtype.itemsize == 8 and values.size and values.max() >= 1 << 63:
                raise DataError(f"{where}: the label {int(values.max())} is no class")
            targets = torch.from_numpy(values.astype(np.int64))
            return targets.squeeze(1) if targets.dim() == 2 and targets.shape[1] == 1 else targets
        targets = torch.from_numpy(values.astype(np.float32))
        check_finite(targets, f"the label {label!r} of {where} (rows from {first_row} on)")
        return targets

    def _texts(self, table: Any, where: str, first_row: int) -> Any:
        array = _combined(table.column(self.settings.label))
        if self._pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        _check_no_null(array, self.settings.label, where, first_row)
        return array.cast(self._pa.string())

    def label_texts(self, table: Any, where: str, first_row: int) -> set[str]:
        """Return the different labels of a table that are texts. Raises DataError for one without a character."""
        texts = self._texts(table, where, first_row)
        found: set[str] = set(texts.unique().to_pylist())
        if "" in found:
            row = first_row + texts.to_pylist().index("")
            raise DataError(
                f"{where}: the label of row {row} is empty: fill it in or remove the row, or name all classes in "
                "data.classes if the empty text is a class"
            )
        return found

    def _values(self, table: Any, name: str, where: str, first_row: int) -> Any:
        return values_of(self._pa, _combined(table.column(name)), name, where, first_row)

    def check_labels(
        self, targets: Tensor, num_classes: int | None, where: str, rows: Any, ignored: int | None
    ) -> None:
        """Raise DataError that names the row for a label that is no class."""
        if num_classes is not None and self.has_classes:
            check_classes(targets, num_classes, where, rows, ignored)


def check_name(schema: Any, name: str, key: str, what: str) -> None:
    """Raise DataError, with the nearest name, if a schema has no such column."""
    names: list[str] = list(schema.names)
    if name not in names:
        raise DataError(f"data.{key}: {what} has no column {name!r}{nearest(name, names)} (it has: {_listed(names)})")


def image_column(schema: Any, settings: ColumnSettings) -> str | None:
    """Return the column of encoded images, {bytes, path} as Hugging Face writes them, if the inputs are one."""
    names = settings.columns or [name for name in schema.names if name != settings.label]
    if len(names) != 1 or names[0] not in schema.names:
        return None
    kind = schema.field(names[0]).type
    fields = {kind.field(at).name for at in range(kind.num_fields)} if str(kind).startswith("struct") else set()
    return names[0] if "bytes" in fields else None


def values_of(pa: Any, array: Any, name: str, where: str, first_row: int) -> Any:
    """Return an Arrow array as a NumPy array, one row per element: numbers, bytes, or lists of one length of them."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    _check_no_null(array, name, where, first_row)
    types, kind = pa.types, array.type
    if types.is_fixed_size_list(kind):
        inner = values_of(pa, array.flatten(), name, f"lists of {where}", first_row)
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if types.is_list(kind) or types.is_large_list(kind):
        length = _one_length(_plain_values(array.offsets), name, where, first_row)
        inner = values_of(pa, array.flatten(), name, f"lists of {where}", first_row)
        return inner.reshape(len(array), length, *inner.shape[1:])
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
        held = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        return held[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)
    if types.is_binary(kind) or types.is_large_binary(kind):
        offsets_type = np.int64 if types.is_large_binary(kind) else np.int32
        offsets = np.frombuffer(array.buffers()[1], dtype=offsets_type)[array.offset : array.offset + len(array) + 1]
        length = _one_length(offsets, name, where, first_row)
        held = np.frombuffer(array.buffers()[2] or b"", dtype=np.uint8)
        return held[int(offsets[0]) : int(offsets[-1])].reshape(len(array), length)
    if types.is_decimal(kind):
        array = array.cast(pa.float64())
    if types.is_boolean(kind):
        array = array.cast(pa.uint8())
    return _plain_values(array)


def _plain_values(array: Any) -> Any:
    """Return the values of an array of numbers without nulls, as they are in memory."""
    # Not `to_numpy`, which imports pandas where that is installed: half of the time to the first batch.
    dtype = np.dtype(array.type.to_pandas_dtype())
    if len(array) == 0:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(array.buffers()[1], dtype=dtype)[array.offset : array.offset + len(array)]


def _one_length(offsets: Any, name: str, where: str, first_row: int) -> int:
    lengths = np.diff(offsets)
    if len(lengths) == 0:
        return 0
    other = int((lengths != lengths[0]).argmax())
    if lengths[other] != lengths[0]:
        raise DataError(
            f"column {name!r} of {where}: row {first_row} has {lengths[0]} values and row {first_row + other} has "
            f"{lengths[other]}: all rows must have as many. Pad or cut them, or set data.transform"
        )
    if lengths[0] == 0:
        raise DataError(f"column {name!r} of {where}: row {first_row} has no values")
    return int(lengths[0])


def _check_no_null(array: Any, name: str, where: str, first_row: int) -> None:
    if array.null_count:
        row = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        others = f", and {array.null_count - 1} more" if array.null_count > 1 else ""
        raise DataError(
            f"column {name!r} of {where}: row {first_row + row} has no value (null){others}: fill in values, or remove "
            "such rows"
        )


def _combined(column: Any) -> Any:
    """Return a column as one array, of a table or of a record batch."""
    if not hasattr(column, "combine_chunks"):
        return column
    combined = column.combine_chunks()
    if hasattr(combined, "chunks"):  # pyarrow keeps several chunks, or none, where a column is too large or empty
        chunks = combined.chunks
        if len(chunks) != 1:
            raise DataError("a block has more than 2 GB of one column: write smaller row groups")
        combined = chunks[0]
    return combined


def _plain(pa: Any, kind: Any) -> Any:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _innermost(kind: Any) -> Any:
    """Return the type of the values of lists of lists."""
    while hasattr(kind, "value_type") and not hasattr(kind, "index_type"):
        kind = kind.value_type
    return kind


def _is_number(pa: Any, kind: Any) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def _is_bytes(pa: Any, kind: Any) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _is_text(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:12]) + (", …" if len(shown) > 12 else "")
