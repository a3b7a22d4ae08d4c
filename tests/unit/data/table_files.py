"""Tables that tests write into files, and the sources of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cordee.core.settings import Data
from cordee.data import Splits, load_data


def numbered(size: int = 100, num_classes: int = 3, first: int = 0) -> pa.Table:
    """Rows whose first column is their number, so that a sample can be told by its inputs."""
    number = np.arange(first, first + size)
    return pa.table({"a": number.astype(np.float32), "b": -number, "label": number % num_classes})


def write(path: Path, table: pa.Table | None = None, rows: int = 10) -> Path:
    pq.write_table(numbered() if table is None else table, path, row_group_size=rows)
    return path


def load(use: str = "parquet", seed: int = 0, **keys: Any) -> Splits:
    own = {key: keys.pop(key) for key in ("test_fraction", "train_limit", "test_limit") if key in keys}
    keys = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return load_data(Data(use=use, args=keys, **own), seed=seed)


def large(path: Path, num_rows: int = 400_000, rows: int = 2_000) -> Path:
    """Write rows that take more than 1 MB in memory, so that they are read block by block where that is the limit."""
    return write(path, numbered(num_rows), rows)
