"""Data that is read from Parquet files beside the same data in memory, and the time to resume in the middle of it.

LeNet trains on images of 28 × 28 bytes from the page cache: in arrays, from a file that fits into `data.memory_mb`,
and from files that do not, block by block. Then 10 million rows are opened, and the batch in their middle is read, each
time by a process that has read nothing before: what a resumed run does before its first step.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cordee.bench.harness import (
    Contestant,
    Place,
    Processes,
    Report,
    compete,
    describe_machine,
    goal_outcome,
    median_ratio,
    medians,
)
from cordee.bench.loops import cordee_loop
from cordee.core.errors import MissingExtraError
from cordee.core.settings import Data
from cordee.data import Loader, load_data

ROUNDS = 5
BATCH_SIZE = 32
NUM_STEPS = 600
NUM_IMAGES, NUM_PIXELS, NUM_CLASSES = 60_000, 28 * 28, 10
IMAGE_ROWS = 1_000  # of a row group
SMALL_MEMORY_MB = 16  # of 45 MB
NUM_ROWS, NUM_FEATURES, TABLE_ROWS = 10_000_000, 8, 100_000
LEAST_SPEED = 0.95
LONGEST_RESUME_S = 2.0


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        _write_images(Path(folder))
        raw: dict[str, list[float]] = {}
        rows: list[dict[str, Any]] = []
        for num_workers in (1, 2):
            say(f"LeNet on {num_workers} worker{'s' * (num_workers > 1)}: {NUM_STEPS} steps of {BATCH_SIZE} a round")
            figures, _ = compete(_contestants(folder, num_workers), rounds, say)
            figures = {f"{name}, {num_workers} workers": speeds for name, speeds in figures.items()}
            raw |= figures
            rows += _speed_rows(figures, f"memory, {num_workers} workers")
        say(f"resuming in the middle of {NUM_ROWS:,} rows")
        table = _write_table(Path(folder))
        resumes = {name: [_time_resume(table, share) for _ in range(rounds)] for name, share in _PLACES.items()}
        raw |= resumes
        rows += [
            {
                "case": name,
                "figure": middle,
                "unit": "s",
                "of_memory": None,
                "goal": f"≤ {LONGEST_RESUME_S:g} s",
                "outcome": goal_outcome(middle <= LONGEST_RESUME_S),
            }
            for name, middle in medians(resumes).items()
        ]
    settings = {
        "batch_size": BATCH_SIZE,
        "steps": NUM_STEPS,
        "images": NUM_IMAGES,
        "rows_of_a_row_group": [IMAGE_ROWS, TABLE_ROWS],
        "memory_mb_of_blocks": SMALL_MEMORY_MB,
        "rows": NUM_ROWS,
        "threads": 1,
        "rounds": rounds,
    }
    return Report("data", describe_machine(), settings, raw, "samples/s; resuming: s", rows)


_PLACES = {"first batch of 10 M rows": 0.0, "batch in the middle of 10 M rows": 0.5}


def _contestants(folder: str, num_workers: int) -> dict[str, Contestant]:
    def reading(name: str, **args: Any) -> Data:
        return Data("parquet", args={"path": f"{folder}/{name}.parquet", "shape": [1, 28, 28], **args})

    data = {
        "memory": Data("cordee.bench.data:images_in_memory", args={"path": f"{folder}/binary.parquet"}),
        "parquet that fits": reading("binary"),
        "blocks of binary": reading("binary", memory_mb=SMALL_MEMORY_MB),
        "blocks of lists": reading("lists", memory_mb=SMALL_MEMORY_MB),
    }
    return {
        name: Contestant(
            partial(cordee_loop, model="lenet", data=one, batch_size=BATCH_SIZE), num_workers, NUM_STEPS, BATCH_SIZE
        )
        for name, one in data.items()
    }


def _speed_rows(figures: dict[str, list[float]], reference: str) -> list[dict[str, Any]]:
    rows = []
    for name, speed in medians(figures).items():
        share = median_ratio(figures[name], figures[reference])
        rows.append(
            {
                "case": name,
                "figure": speed,
                "unit": "samples/s",
                "of_memory": share,
                "goal": "–" if name == reference else f"≥ {LEAST_SPEED}",
                "outcome": "–" if name == reference else goal_outcome(share >= LEAST_SPEED),
            }
        )
    return rows


def images_in_memory(path: str) -> tuple[Tensor, Tensor]:
    """Return the images of a file as arrays; what contestants are compared with."""
    source = load_data(Data("parquet", args={"path": path, "shape": [1, 28, 28], "memory_mb": 4096}), seed=0).train
    return source.inputs, source.targets  # type: ignore[attr-defined]


def _write_images(folder: Path) -> None:
    pa, pq = _pyarrow()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (NUM_IMAGES, NUM_PIXELS), dtype=np.uint8)
    labels = rng.integers(0, NUM_CLASSES, NUM_IMAGES)
    binary = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(NUM_PIXELS), NUM_IMAGES, [None, pa.py_buffer(pixels.tobytes())]
    )
    lists = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), NUM_PIXELS)
    for name, column in (("binary", binary), ("lists", lists)):
        table = pa.table({"image": column, "label": labels})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=IMAGE_ROWS)


def _write_table(folder: Path) -> str:
    pa, pq = _pyarrow()
    path = str(folder / "table.parquet")
    rng = np.random.default_rng(0)
    names = [f"x{number}" for number in range(NUM_FEATURES)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("label", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(NUM_ROWS // TABLE_ROWS):
            columns = [rng.random(TABLE_ROWS, dtype=np.float32) for _ in names]
            writer.write_table(pa.table([*columns, rng.integers(0, NUM_CLASSES, TABLE_ROWS)], schema=schema))
    return path


def _time_resume(path: str, share: float) -> float:
    with contextlib.closing(Processes(partial(_resume, path=path, share=share), 1)) as process:
        (elapsed_s,) = process.answers()
        assert isinstance(elapsed_s, float)
        return elapsed_s


def _resume(place: Place, pipe: Connection, *, path: str, share: float) -> None:
    started_s = time.perf_counter()
    source = load_data(Data("parquet", args={"path": path}), seed=0).train
    loader = Loader(source, batch_size=1_000, seed=0, shuffle=True)
    assert loader.num_batches is not None
    with contextlib.closing(loader.batches(0, int(share * loader.num_batches))) as batches:
        next(batches)
        elapsed_s = time.perf_counter() - started_s
    pipe.send(elapsed_s)
    pipe.recv()  # until this process is ended


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtraError("cordee bench data", "parquet") from None
    return pyarrow, pyarrow.parquet
