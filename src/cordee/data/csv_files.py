"""CSV files in blocks of lines, found by one pass over the bytes, and parsed by pyarrow when they are needed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cordee.core.errors import DataError, JobError
from cordee.data.parquet import FilesOfOneSchema
from cordee.data.storage import DataFile, find_data_files, require_package
from cordee.data.tables import TableSettings, make_table_data, takes_table_keys

_SUFFIXES = (".csv", ".tsv", ".txt")
_BLOCK_BYTES = 4 << 20
_CHUNK_BYTES = 16 << 20
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@takes_table_keys
def csv_files(
    settings: TableSettings,
    path: str,
    test: str | None = None,
    root: str | None = None,
    delimiter: str = ",",
    header: bool = True,
    ignored: int | None = None,
) -> Any:
    """Rows of CSV files. Without a header, columns are called "0", "1", "2" and so on."""
    require_package("pyarrow", "data.use = 'csv'", "parquet")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise JobError(f"data.delimiter = {delimiter!r} must be one character, and no quote or line end")
    form = _Form(delimiter, header, settings.label, settings.regression)
    sets = [
        None if where is None else CsvFiles(find_data_files(where, _SUFFIXES, key=key, root=root), form)
        for key, where in (("path", path), ("test", test))
    ]
    if sets[1] is not None:
        sets[1].use_types(sets[0])  # type: ignore[arg-type]
    return make_table_data("csv", sets[0], sets[1], settings, ignored)  # type: ignore[arg-type]


class _Form(NamedTuple):
    delimiter: str
    has_header: bool
    label: str
    is_regression: bool


class Run(NamedTuple):
    """Lines of a file that follow each other."""

    start: int  # byte
    stop: int
    line: int  # number of the first line, counted from 1
    num_rows: int


class CsvFiles(FilesOfOneSchema):
    """Runs of lines of CSV files with one header."""

    def __init__(self, files: Sequence[DataFile], form: _Form) -> None:
        self._csv = require_package("pyarrow.csv", "reading CSV files", "parquet")
        self._form = form
        self._runs: list[Run] = []
        self._names: list[list[str]] = []  # of the columns of each file
        self.types: dict[str, Any] | None = None
        super().__init__(files)
        self.schema = self._pa.schema(
            [(name, (self.types[name] if self.types else self._pa.null())) for name in self._names[0]]
        )

    def use_types(self, other: CsvFiles) -> None:
        """Read the columns with the types that were found in another set."""
        found = {**(self.types or {}), **(other.types or {})}
        self.types = {name: found.get(name, self._pa.null()) for name in self._names[0]}
        self.schema = self._pa.schema(list(self.types.items()))

    def _look_at(self, file: DataFile) -> tuple[Any, list[int]]:
        runs = find_runs(file, _BLOCK_BYTES)
        names, runs = self._header(file, runs)
        self._names.append(names)
        self._runs += runs
        if self.types is None and runs:
            found = self._parse(file, names, runs[0], names, None)
            self.types = {field.name: self._kept_type(field) for field in found.schema}
        # Types are those of the first file that has rows, and all others are read with them.
        return self._pa.schema([(name, self._pa.null()) for name in names]), [run.num_rows for run in runs]

    def _kept_type(self, field: Any) -> Any:
        # Inputs become floats anyway, and a column that begins with whole numbers may have fractions later.
        is_number = field.name != self._form.label or self._form.is_regression
        return self._pa.float64() if is_number and self._pa.types.is_integer(field.type) else field.type

    @property
    def _advice_on_twice(self) -> str:
        return ": rename one, or set data.header = false if its first line is a row" if self._form.has_header else ""

    def _header(self, file: DataFile, runs: list[Run]) -> tuple[list[str], list[Run]]:
        """Return the names of the columns, and the runs without the header."""
        if not runs:
            raise DataError(f"{file.url} has no lines")
        first = runs[0]
        content = file.read(first.start, first.stop - first.start)
        lead = len(_BYTE_ORDER_MARK) if content.startswith(_BYTE_ORDER_MARK) else 0
        reader = self._rows(content[lead:], file)
        values: list[str] = next((row for row in reader if row), [])
        if not self._form.has_header:
            kept = first._replace(start=first.start + lead)
            return [str(number) for number in range(len(values))], [kept, *runs[1:]]
        if b"\n" not in content and b"\r" in content.strip():
            raise DataError(f"{file.url} has lines that end in a carriage return alone: convert it to line feeds (\\n)")
        skipped = _bytes_of_lines(content, reader.line_num)
        rest = first._replace(
            start=first.start + skipped, line=first.line + reader.line_num, num_rows=first.num_rows - 1
        )
        return [name.strip() for name in values], [run for run in (rest, *runs[1:]) if run.num_rows]

    def table(self, block: int, names: Sequence[str] | None) -> Any:
        number, _ = self._place(block)
        file = self._files[number]
        file.check_unchanged()
        return self._parse(file, self._names[number], self._runs[block], names or self._names[number], self.types)

    def where(self, block: int) -> tuple[str, int]:
        number, _ = self._place(block)
        return f"{self._files[number].url} (lines from {self._runs[block].line} on)", self._first_rows[block]

    def digest(self) -> str:
        return ""

    def _parse(self, file: DataFile, all_names: list[str], run: Run, names: Sequence[str], types: Any) -> Any:
        content = file.read(run.start, run.stop - run.start)
        is_uneven = False

        def note_uneven(_: Any) -> str:
            nonlocal is_uneven
            is_uneven = True
            return "skip"

        try:
            table = self._csv.read_csv(
                self._pa.BufferReader(content),
                read_options=self._csv.ReadOptions(
                    column_names=all_names, use_threads=False, block_size=len(content) + 1
                ),
                parse_options=self._csv.ParseOptions(
                    delimiter=self._form.delimiter,
                    newlines_in_values=b'"' in content,
                    invalid_row_handler=note_uneven,
                ),
                convert_options=self._csv.ConvertOptions(include_columns=list(names), column_types=types),
            )
        except self._pa.ArrowException as error:
            self._name_uneven(file, content, run, all_names)
            self._name_unfit(file, content, run, all_names, types or {})
            raise DataError(f"{file.url}: cannot read the lines from {run.line} on: {error}") from error
        if is_uneven:
            self._name_uneven(file, content, run, all_names)
        if table.num_rows != run.num_rows:
            raise DataError(
                f"{file.url}: the {run.num_rows} lines from line {run.line} on have {table.num_rows} rows: "
                "a quote that is not closed, or a line end within a value, is likely"
            )
        return table

    def _rows(self, content: bytes, file: DataFile) -> Any:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{file.url} is not UTF-8 text: {error.reason} (0x{content[error.start]:02x})") from error
        return csv.reader(io.StringIO(text, newline=""), delimiter=self._form.delimiter)

    def _name_uneven(self, file: DataFile, content: bytes, run: Run, names: list[str]) -> None:
        """Raise DataError for the first line with more or fewer values than there are columns, if there is one."""
        reader = self._rows(content, file)
        for row in reader:
            if row and len(row) != len(names):
                expected = "the header" if self._form.has_header else "the first line"
                raise DataError(
                    f"{file.url}, line {run.line + reader.line_num - 1}: {len(row)} values, and {expected} has "
                    f"{len(names)}"
                )

    def _name_unfit(self, file: DataFile, content: bytes, run: Run, names: list[str], types: dict[str, Any]) -> None:
        """Raise DataError for the first value that does not fit the type of its column, if there is one."""
        reader = self._rows(content, file)
        for row in reader:
            for name, value in zip(names, row):
                is_whole = self._pa.types.is_integer(types.get(name, self._pa.null()))
                is_number = is_whole or self._pa.types.is_floating(types.get(name, self._pa.null()))
                try:
                    if is_number and value.strip():
                        int(value) if is_whole else float(value)
                except ValueError:
                    raise DataError(
                        f"{file.url}, line {run.line + reader.line_num - 1}: column {name!r} has the value {value!r}, "
                        f"and {'whole numbers' if is_whole else 'numbers'} before"
                    ) from None


def _bytes_of_lines(content: bytes, num_lines: int) -> int:
    """Return how many bytes the first lines have."""
    at = 0
    for _ in range(num_lines):
        at = content.find(b"\n", at) + 1 or len(content)
    return at


def find_runs(file: DataFile, block_bytes: int) -> list[Run]:
    """Return the lines of a file in runs of about `block_bytes`. Lines without a character do not count.

    A line end within quotes is no line end.
    """
    runs: list[Run] = []
    start, line, rows = 0, 1, 0  # of the run that is begun
    lines_before, row_start = 0, 0  # line ends so far, quoted ones too; where the present row begins
    is_quoted, opened_in, last_byte = False, 0, _NEWLINE
    offset = 0
    with file.open() as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            held = np.frombuffer(chunk, dtype=np.uint8)
            all_ends = np.flatnonzero(held == _NEWLINE)
            ends = all_ends
            quotes = np.flatnonzero(held == _QUOTE)
            if len(quotes) or is_quoted:
                num_quotes = np.searchsorted(quotes, all_ends)  # before each line end
                ends = all_ends[(num_quotes + is_quoted) % 2 == 0]
                if len(quotes) % 2:
                    is_quoted = not is_quoted
                    opened_in = lines_before + int(np.searchsorted(all_ends, quotes[-1])) + 1
            starts = np.concatenate([[row_start - offset], ends[:-1] + 1]) if len(ends) else ends
            lengths = ends - starts
            before = np.where(ends > 0, held[ends - 1], last_byte) if len(ends) else ends
            has_row = ~((lengths == 0) | ((lengths == 1) & (before == _RETURN)))
            counts = np.concatenate([[0], np.cumsum(has_row)])
            done = 0  # line ends that are in runs
            while len(ends) > done:
                cut = int(np.searchsorted(ends + 1 + offset, start + block_bytes))
                if cut >= len(ends):
                    break
                cut = max(cut, done)
                stop = offset + int(ends[cut]) + 1
                runs.append(Run(start, stop, line, rows + int(counts[cut + 1] - counts[done])))
                start, rows, done = stop, 0, cut + 1
                line = lines_before + int(np.searchsorted(all_ends, ends[cut], side="right")) + 1
            rows += int(counts[-1] - counts[done])
            if len(ends):
                row_start = offset + int(ends[-1]) + 1
            lines_before += len(all_ends)
            offset += len(chunk)
            last_byte = chunk[-1]
    if is_quoted:
        raise DataError(f"{file.url}: a quote that is opened in line {opened_in} is never closed")
    if offset > row_start:  # a last line without an end
        rows += 1
    if rows:
        runs.append(Run(start, offset, line, rows))
    return [run for run in runs if run.num_rows]
