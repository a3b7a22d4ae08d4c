"""A Spark DataFrame as training data: Spark writes it as Parquet, once, to where all members read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import DataError, JobError, nearest
from cordee.core.settings import Data
from cordee.data.storage import find_data_files, is_there, is_url

SOURCE = "parquet"  # the source that reads what was written
DONE = "_SUCCESS"  # the file that Spark writes last
HADOOP_NAMES = {"s3": "s3a", "gcs": "gs"}  # of storages that Spark calls otherwise than fsspec


def is_dataframe(data: object) -> bool:
    """Whether this is a DataFrame of Spark, of a classic session or of Spark Connect."""
    return type(data).__module__.startswith("pyspark.sql.") and type(data).__name__ == "DataFrame"


def data_of_frame(frame: Any, data: Data, folder: str, *, resume: bool) -> Data:
    """Have Spark write `frame` to `folder`, a path or a URL, and return the [data] that reads it.

    Who resumes reads what is there. `data` says how the columns are used; all but the label are inputs unless it names
    some. Raises JobError for settings that contradict a DataFrame, DataError for columns that are not there and if
    Spark cannot write.
    """
    if data.use != SOURCE:
        raise JobError(
            f"data.use = {data.use!r}, and a DataFrame is given, which is written as {SOURCE}: remove data.use"
        )
    if "path" in data.args:
        raise JobError(f"data.path = {data.args['path']!r}, and a DataFrame is given: remove one of them")
    names, label = list(frame.columns), data.args.get("label", "label")
    columns = list(data.args.get("columns") or [name for name in names if name != label])
    for name in (label, *columns):
        if name not in names:
            raise DataError(f"the DataFrame has no column {name!r}{nearest(name, names)} (it has: {', '.join(names)})")
    folder = folder if is_url(folder) else str(Path(folder).absolute())
    if resume and not is_there(f"{folder}/{DONE}"):
        raise DataError(f"the rows that the run was trained on are not in {folder} any more: start without resume")
    if not resume:
        _write(frame.select(*columns, label), folder)
    return msgspec.structs.replace(data, args={**data.args, "columns": columns, "path": folder})


def _write(frame: Any, folder: str) -> None:
    """Have Spark write the rows: they are computed once, and do not change in a run.

    A folder that an interrupted writing has left is replaced; rows of another run are not.
    """
    if is_there(f"{folder}/{DONE}"):
        raise DataError(f"{folder} has the data of another run: remove it, or choose another run directory")
    try:
        frame.write.mode("overwrite").parquet(_as_hadoop_url(folder))
    except Exception as error:  # Py4J passes on whatever the JVM throws
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"Spark could not write the DataFrame to {folder}: {reason}") from error
    try:
        find_data_files(folder, (".parquet",))
    except DataError as error:
        raise DataError(
            f"Spark has written the DataFrame to {folder}, and this host does not see it: the executors are on other "
            "hosts. Set checkpoint.storage, or give --run-dir (run_dir) in a folder that all hosts share, or write the "
            f"DataFrame as Parquet yourself and set data.path ({error})"
        ) from error


def _as_hadoop_url(folder: str) -> str:
    if not is_url(folder):
        return Path(folder).as_uri()
    scheme, _, rest = folder.partition("://")
    return f"{HADOOP_NAMES.get(scheme, scheme)}://{rest}"
