"""Parquet files by row group, Arrow files by record batch."""

from __future__ import annotations

import abc
import bisect
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cordee.core.errors import DataError
from cordee.data.storage import DataFile, find_data_files, require_package
from cordee.data.tables import TableSettings, make_table_data, takes_table_keys

_PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
_ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")


@takes_table_keys
def parquet(
    settings: TableSettings, path: str, test: str | None = None, root: str | None = None, ignored: int | None = None
) -> Any:
    """Rows of Parquet files: a file, a folder or a pattern, on this host or behind an fsspec URL."""
    require_package("pyarrow", "data.use = 'parquet'", "parquet")
    sets = [
        None if where is None else ParquetFiles(find_data_files(where, _PARQUET_SUFFIXES, key=key, root=root))
        for key, where in (("path", path), ("test", test))
    ]
    return make_table_data("parquet", sets[0], sets[1], settings, ignored)  # type: ignore[arg-type]


@takes_table_keys
def arrow(
    settings: TableSettings, path: str, test: str | None = None, root: str | None = None, ignored: int | None = None
) -> Any:
    """Rows of Arrow (Feather) files, as `parquet` has them of Parquet files."""
    require_package("pyarrow", "data.use = 'arrow'", "parquet")
    sets = [
        None if where is None else ArrowFiles(find_data_files(where, _ARROW_SUFFIXES, key=key, root=root))
        for key, where in (("path", path), ("test", test))
    ]
    return make_table_data("arrow", sets[0], sets[1], settings, ignored)  # type: ignore[arg-type]


class FilesOfOneSchema(abc.ABC):
    """Files of one schema whose blocks follow each other. `_schema_of` and `_sizes_of` are asked once for each file."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._pa = require_package("pyarrow", "reading tables", "parquet")
        self._files = files
        self.what = files[0].url if len(files) == 1 else f"{files[0].url} and {len(files) - 1} more"
        sizes: list[list[int]] = []
        for file in files:
            schema, of_file = self._look_at(file)
            if not sizes:
                self.schema = schema
            self._check_schema(file, schema)
            sizes.append(of_file)
        self._first_blocks = [0]  # of each file
        for of_file in sizes:
            self._first_blocks.append(self._first_blocks[-1] + len(of_file))
        self.sizes = torch.tensor([size for of_file in sizes for size in of_file], dtype=torch.int64)
        self._first_rows = [sum(of_file[:at]) for of_file in sizes for at in range(len(of_file))]

    @property
    def _advice_on_twice(self) -> str:
        return ": rename one"

    @abc.abstractmethod
    def _look_at(self, file: DataFile) -> tuple[Any, list[int]]:
        """Return the schema of a file and the sizes of its blocks. Raises DataError that names the file."""

    def _check_schema(self, file: DataFile, schema: Any) -> None:
        first = self._files[0].url
        if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
            raise DataError(f"{file.url} has two columns of the name {twice!r}{self._advice_on_twice}")
        for field in self.schema:
            if field.name not in schema.names:
                raise DataError(f"{file.url} has no column {field.name!r}, which {first} has: use files of one schema")
            if schema.field(field.name).type != field.type:
                raise DataError(
                    f"column {field.name!r} has the type {field.type} in {first} and "
                    f"{schema.field(field.name).type} in {file.url}: use files of one schema"
                )
        if more := next((name for name in schema.names if name not in self.schema.names), None):
            raise DataError(f"{file.url} has the column {more!r}, which {first} has not: use files of one schema")

    def _place(self, block: int) -> tuple[int, int]:
        """Return the file of a block, and the block's number in the file."""
        file = bisect.bisect_right(self._first_blocks, block) - 1
        return file, block - self._first_blocks[file]

    def bounds(self, name: str) -> tuple[int, int] | None:
        return None

    def check_no_nulls(self, names: Sequence[str]) -> None:  # noqa: B027 - nothing is known before rows are read
        """Nulls are found when rows are read."""

    @contextlib.contextmanager
    def _reading(self, file: DataFile, what: str) -> Iterator[Any]:
        """Give what pyarrow reads a file from; its errors become DataErrors."""
        try:
            if file.local is not None:
                with self._pa.OSFile(file.url) as opened:
                    yield opened
            else:
                with file.open() as remote, self._pa.PythonFile(remote, mode="r") as opened:
                    yield opened
        except (self._pa.ArrowException, OSError, EOFError) as error:
            raise DataError(
                f"cannot read {what}: the file is damaged, truncated, or of another format ({error})"
            ) from error


class ParquetFiles(FilesOfOneSchema):
    """Row groups of Parquet files. The footers are read at the start, and say much of the rows."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._parquet = require_package("pyarrow.parquet", "reading Parquet files", "parquet")
        self._footers: list[Any] = []
        super().__init__(files)

    def _look_at(self, file: DataFile) -> tuple[Any, list[int]]:
        with self._reading(file, f"the footer of {file.url}") as opened:
            footer = self._parquet.read_metadata(opened)
            schema = footer.schema.to_arrow_schema()
        self._footers.append(footer)
        return schema, [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        number, group = self._place(block)
        file = self._files[number]
        file.check_unchanged()
        with self._reading(file, f"row group {group} of {file.url}") as opened:
            # Without threads of its own: workers share the cores, and a fork does not lose them.
            reader = self._parquet.ParquetFile(opened, metadata=self._footers[number], pre_buffer=file.local is None)
            return reader.read_row_group(group, columns=None if names is None else list(names), use_threads=False)

    def where(self, block: int) -> tuple[str, int]:
        number, group = self._place(block)
        return f"row group {group} of {self._files[number].url}", self._first_rows[block]

    def bounds(self, name: str) -> tuple[int, int] | None:
        found: list[int] = []
        for footer, group, column in self._leaves([name]):
            statistics = footer.row_group(group).column(column).statistics
            if footer.row_group(group).num_rows == 0:
                continue
            if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, int):
                return None
            found += [int(statistics.min), int(statistics.max)]
        return (min(found), max(found)) if found else None

    def check_no_nulls(self, names: Sequence[str]) -> None:
        for footer, group, column in self._leaves(names):
            chunk = footer.row_group(group).column(column)
            statistics = chunk.statistics
            is_known = chunk.path_in_schema in names and statistics is not None and statistics.has_null_count
            if is_known and statistics.null_count:
                file = self._files[next(at for at, one in enumerate(self._footers) if one is footer)].url
                raise DataError(
                    f"column {chunk.path_in_schema!r} of row group {group} of {file} has {statistics.null_count} "
                    "nulls: fill them, or remove these rows"
                )

    def _leaves(self, names: Sequence[str]) -> Iterator[tuple[Any, int, int]]:
        """Yield footer, row group and column chunk of everything that belongs to these columns."""
        for footer in self._footers:
            paths = [footer.schema.column(at).path for at in range(footer.num_columns)]
            columns = [
                at
                for at, path in enumerate(paths)
                if any(path == name or path.startswith(f"{name}.") for name in names)
            ]
            for group in range(footer.num_row_groups):
                for column in columns:
                    yield footer, group, column

    def digest(self) -> str:
        digest = hashlib.sha256()
        for footer in self._footers:  # with the sizes, checksums and bounds of every column of every row group
            sink = self._pa.BufferOutputStream()
            footer.write_metadata_file(sink)
            digest.update(sink.getvalue())
        return digest.hexdigest()[:12]


class ArrowFiles(FilesOfOneSchema):
    """Record batches of Arrow files."""

    def _look_at(self, file: DataFile) -> tuple[Any, list[int]]:
        with self._reading(file, file.url) as opened:
            reader = self._pa.ipc.open_file(opened)
            # The sizes of the batches are in front of each of them: columns that are not asked for are not read.
            none = self._pa.ipc.open_file(opened, options=self._pa.ipc.IpcReadOptions(included_fields=[0]))
            sizes = [none.get_batch(at).num_rows for at in range(none.num_record_batches)]
            return reader.schema, sizes

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        number, batch = self._place(block)
        file = self._files[number]
        file.check_unchanged()
        with self._reading(file, f"record batch {batch} of {file.url}") as opened:
            read = self._pa.Table.from_batches([self._pa.ipc.open_file(opened).get_batch(batch)])
            return read if names is None else read.select(list(names))

    def where(self, block: int) -> tuple[str, int]:
        number, batch = self._place(block)
        return f"record batch {batch} of {self._files[number].url}", self._first_rows[block]

    def digest(self) -> str:
        return ""
