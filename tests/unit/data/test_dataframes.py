"""Where Spark writes a DataFrame. That it does so is tested with Spark: tests/engines/test_spark_data.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.core.errors import DataError
from cordee.data.dataframes import _as_hadoop_url
from cordee.data.storage import is_there


@pytest.mark.parametrize(
    ("folder", "url"),
    [
        ("/shared/a b/run-data", "file:///shared/a%20b/run-data"),
        ("file:///shared/run-data", "file:///shared/run-data"),
        ("s3://bucket/run-data", "s3a://bucket/run-data"),
        ("gcs://bucket/run-data", "gs://bucket/run-data"),
        ("hdfs://host:8020/run-data", "hdfs://host:8020/run-data"),
    ],
)
def test_spark_gets_the_url_as_hadoop_writes_it(folder: str, url: str) -> None:
    assert _as_hadoop_url(folder) == url


def test_a_file_is_found_by_path_and_by_url(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    for folder in (str(tmp_path), tmp_path.as_uri()):
        assert is_there(f"{folder}/_SUCCESS")
        assert not is_there(f"{folder}/other")


def test_a_storage_that_nobody_knows_is_no_answer() -> None:
    with pytest.raises(DataError, match="cannot be read"):
        is_there("nosuch://bucket/_SUCCESS")
