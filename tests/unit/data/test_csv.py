"""CSV files: lines found, values read, what is wrong named by its line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_files import load
from test_tables import everything, refused

from cordee.core.errors import JobError
from cordee.data import ArraySource, Loader
from cordee.data.blocks import BlockSource
from cordee.data.csv_files import find_runs
from cordee.data.storage import DataFile


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def numbered(size: int, first: int = 0) -> str:
    return "a,b,label\n" + "".join(f"{n},{-n}.5,{n % 3}\n" for n in range(first, first + size))


def test_rows_become_samples(tmp_path: Path) -> None:
    splits = load("csv", path=write(tmp_path / "a.csv", numbered(50)))
    inputs, targets = everything(splits.train)
    assert isinstance(splits.train, ArraySource) and (splits.num_classes, splits.input_shape) == (3, (2,))
    assert inputs.tolist() == [[float(n), -n - 0.5 if n else 0.5] for n in range(50)]
    assert targets.tolist() == [n % 3 for n in range(50)]


def test_large_files_are_read_by_runs_of_lines(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.csv", numbered(300_000, 300_000 * number))
    splits = load("csv", path=tmp_path, memory_mb=1, num_classes=3)
    assert isinstance(splits.train, BlockSource) and splits.train.num_samples == 900_000
    assert len(splits.train.blocks.sizes) > 3
    places = torch.tensor([899_999, 0, 300_000, 299_999, 600_001])
    assert splits.train.gather(places).inputs[:, 0].tolist() == places.tolist()
    batches = Loader(splits.train, batch_size=10_000, seed=0, shuffle=True).batches(0)
    assert torch.cat([batch.inputs[:, 0] for batch in batches]).sort().values.tolist() == list(range(900_000))


def test_texts_as_labels_quotes_blank_lines_and_windows_line_ends(tmp_path: Path) -> None:
    text = '\ufeff"x",name\r\n1,"oak, red"\r\n\r\n2,"elm\nof two lines"\r\n3,"say ""oak"""\r\n4,ash'
    splits = load("csv", path=write(tmp_path / "a.csv", text), label="name")
    assert splits.class_names == ("ash", "elm\nof two lines", "oak, red", 'say "oak"')
    assert everything(splits.train)[0].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert everything(splits.train)[1].tolist() == [2, 1, 3, 0]


def test_empty_labels_are_no_class_unless_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,label\n1,oak\n2,elm\n3,\n4,oak\n")
    refused(r"a.csv \(lines from 2 on\): the label of row 2 is empty", use="csv", path=path)
    assert everything(load("csv", path=path, classes=("", "elm", "oak")).train)[1].tolist() == [2, 1, 0, 2]


def test_other_delimiters_and_no_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "1\t2\t0\n3\t4\t1\n")
    splits = load("csv", path=path, delimiter="\t", header=False, label="2")
    assert everything(splits.train)[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    refused(r"data.delimiter = '\|\|' must be one character", JobError, use="csv", path=path, delimiter="||")


def test_whole_numbers_may_become_fractions_later(tmp_path: Path) -> None:
    text = "x,label\n" + "1,0\n" * 1_100_000 + "1.5,1\n"
    splits = load("csv", path=write(tmp_path / "a.csv", text), num_classes=2)
    assert splits.train.gather(torch.tensor([1_100_000])).inputs.item() == 1.5


@settings(deadline=None)  # a busy machine
@given(
    st.lists(
        st.lists(st.text(st.sampled_from('ab,"\n\r '), max_size=4), min_size=2, max_size=2), min_size=1, max_size=30
    ),
    st.integers(1, 60),
    st.booleans(),
)
def test_runs_have_the_rows_that_pythons_reader_finds(rows: list[list[str]], block_bytes: int, has_end: bool) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    content = file.getvalue() if has_end else file.getvalue().removesuffix("\r\n")

    class Held(DataFile):
        def open(self):  # type: ignore[no-untyped-def]
            return io.BytesIO(content.encode())

    runs = find_runs(Held("held", "held", len(content)), block_bytes)
    found = [list(csv.reader(io.StringIO(content[run.start : run.stop], newline=""))) for run in runs]
    assert [row for part in found for row in part] == rows
    assert [len(part) for part in found] == [run.num_rows for run in runs]
    for run in runs:
        assert run.line == content[: run.start].count("\n") + 1


def test_lines_of_another_length_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b,label\n1,2,0\n"1",2,1\n\n1,2\n1,2,0\n')
    refused(r"a.csv, line 5: 2 values, and the header has 3", use="csv", path=path)
    write(path, numbered(400_000) + "1,2,0,4\n")
    refused(r"a.csv, line 400002: 4 values, and the header has 3", use="csv", path=path)
    splits = load("csv", path=path, memory_mb=1, num_classes=3)
    with pytest.raises(Exception, match=r"line 400002: 4 values"):
        splits.train.gather(torch.tensor([400_000]))


def test_values_that_do_not_fit_are_named_by_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", numbered(400_000) + "1,x,0\n")
    refused(
        r"a.csv, line 400002: column 'b' has the value 'x', and numbers before", use="csv", path=path, num_classes=3
    )
    write(path, numbered(400_000) + "1,2,1.5\n")
    refused(
        r"line 400002: column 'label' has the value '1.5', and whole numbers before",
        use="csv",
        path=path,
        num_classes=3,
    )
    write(path, "a,label\n1,0\n,1\n")
    refused(r"column 'a' of .*a.csv.*: row 1 has no value \(null\)", use="csv", path=path)
    write(path, "a,label\nred,0\nblue,1\n")
    refused(r"column 'a' of .*a.csv has the type string, which is not numbers", use="csv", path=path)


def test_headers_that_differ_or_are_missing(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", numbered(5))
    write(tmp_path / "b.csv", "a,c,label\n1,2,0\n")
    refused(r"b.csv has no column 'b', which .*a.csv has", use="csv", path=tmp_path)
    refused(
        r"has no column 'label'.* \(it has: 'a;label'\)",
        use="csv",
        path=write(tmp_path / "c.csv", "a;label\n1;0\n"),
    )
    write(tmp_path / "e.csv", "a,label\n")
    refused(r"e.csv has no samples", use="csv", path=tmp_path / "e.csv")
    write(tmp_path / "a0.csv", "a,b,label\n")
    assert load("csv", path=f"{tmp_path}/a*.csv").train.num_samples == 5
    write(tmp_path / "e.csv", "\n\n")
    refused(r"e.csv has no lines", use="csv", path=tmp_path / "e.csv")
    write(tmp_path / "e.csv", 'a,label\n"1,0\n2,1\n')
    refused(r"a quote that is opened in line 2 is never closed", use="csv", path=tmp_path / "e.csv")
    (tmp_path / "e.csv").write_bytes(b"a,label\n\xff\xfe,1\n")
    refused(r"e.csv", use="csv", path=tmp_path / "e.csv", columns=["a"])
    (tmp_path / "e.csv").write_bytes(b"")
    refused(r"e.csv is empty \(0 bytes\)", use="csv", path=tmp_path / "e.csv")
    refused(
        r"c.csv has two columns of the name 'a': rename",
        use="csv",
        path=write(tmp_path / "c.csv", "a,a,label\n1,2,0\n"),
    )
    rows = write(tmp_path / "c.csv", "5,5,0\n1,2,1\n")
    refused(r"two columns of the name '5': .*set data.header = false if its first line is a row", use="csv", path=rows)
    (tmp_path / "c.csv").write_bytes(b"a,label\r1,0\r2,1\r")
    refused(r"c.csv has lines that end in a carriage return alone", use="csv", path=tmp_path / "c.csv")


def test_a_test_set_has_the_types_of_the_training_set(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.csv", numbered(50)), write(tmp_path / "t.csv", "a,b,label\n1,2,0\n3,4,2\n")
    splits = load("csv", path=train, test=test)
    assert everything(splits.test)[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    write(test, "label,c,b,a\n2,9,4,3\n")
    assert everything(load("csv", path=train, test=test).test)[0].tolist() == [[3.0, 4.0]]
    for header, missing in (("a,label", "b"), ("a,b", "label")):
        write(test, f"{header}\n1,0\n")
        refused(rf"t.csv has no column '{missing}'", use="csv", path=train, test=test)


def test_numbers_to_predict_may_become_fractions_later(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "a,label\n1,2\n")
    write(tmp_path / "b.csv", "a,label\n1,2.5\n")
    assert everything(load("csv", path=tmp_path, regression=True).train)[1].tolist() == [2.0, 2.5]
    refused(r"b.csv, line 2: column 'label' has the value '2.5'", use="csv", path=tmp_path)
