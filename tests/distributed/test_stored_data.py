"""Data that is read from files block by block trains the same with every strategy, on any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import warm_launch

pytestmark = pytest.mark.timeout(300)

# 100,000 rows take 2 MB: with memory_mb = 1 four windows of blocks in an epoch of 25 steps, of which 28 are made.
JOB = """
model = {{ use = "mlp", hidden = [8] }}
data = {{ use = "parquet", path = "{folder}/*.parquet", memory_mb = 1, test_fraction = 0.02 }}
optimizer = {{ use = "sgd", lr = 0.05 }}
training = {{ batch_size = 4000, steps = 28, threads = 1, reproducible = true }}
evaluation = {{ every_steps = 14 }}
checkpoint = {{ every_steps = 11 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)
    for number in range(2):
        inputs = rng.normal(size=(50_000, 3)).astype(np.float32)
        columns: dict[str, Any] = {f"x{at}": inputs[:, at] for at in range(3)}
        columns["label"] = (inputs[:, 0] > 0).astype(np.int64) + 2 * (inputs[:, 1] > inputs[:, 2]).astype(np.int64)
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=1_500)
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    return folder


def train(folder: Path, run: str, *arguments: str) -> dict[str, Any]:
    process = warm_launch.start("train", "job.toml", "--run-dir", run, *arguments, folder=folder)
    out = "".join(process.communicate(timeout=150))
    assert process.returncode == 0, out
    summary: dict[str, Any] = json.loads((folder / run / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return train(folder, "alone", "--strategy", "single")


@pytest.mark.parametrize(
    ("strategy", "workers", "settings"),
    [
        ("data_parallel", 2, ["data.processes=1"]),
        ("data_parallel", 3, ["data.prefetch=0"]),
        ("parameter_server", 2, []),
        ("parameter_server", 3, ["data.processes=1"]),
    ],
)
def test_the_same_bits_on_any_number_of_workers(
    folder: Path, alone: dict[str, Any], strategy: str, workers: int, settings: list[str]
) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    run = f"{strategy}-{workers}"
    found = train(folder, run, "--strategy", strategy, "--workers", str(workers), *options)
    assert found["weights_sha256"] == alone["weights_sha256"]
    assert found["samples"] == alone["samples"]
    assert found["test_accuracy"] == alone["test_accuracy"]


@pytest.mark.parametrize("strategy", ["sharded", "pipeline", "tensor"])
def test_strategies_that_split_the_model(folder: Path, strategy: str) -> None:
    plain = ["--set", "training.reproducible=false"]
    reference = train(folder, f"plain-{strategy}", "--strategy", "single", *plain)
    found = train(folder, strategy, "--strategy", strategy, "--workers", "2", *plain)
    assert found["samples"] == reference["samples"]
    # Sums of other orders: float32 of a few thousand samples.
    assert found["test_loss"] == pytest.approx(reference["test_loss"], rel=1e-4)


def test_resumed_in_the_middle_of_an_epoch_with_another_number_of_workers(folder: Path, alone: dict[str, Any]) -> None:
    stopped = train(folder, "resumed", "--strategy", "single", "--set", "stop.steps=13")
    assert stopped["steps"] == 13
    again = train(
        folder, "resumed", "--resume", "--strategy", "data_parallel", "--workers", "2", "--set", "stop.steps=99"
    )
    assert again["steps"] == 28 and again["weights_sha256"] == alone["weights_sha256"]


def test_the_samples_are_those_of_the_files_in_memory(folder: Path) -> None:
    """Rows that fit into memory train bit for bit as the same arrays do; here as a job of Python's."""
    import torch

    import cordee

    table = pq.read_table(folder / "0.parquet")
    inputs = torch.from_numpy(np.stack([table[f"x{at}"].to_numpy() for at in range(3)], axis=1))
    targets = torch.from_numpy(table["label"].to_numpy().copy())
    shared: dict[str, Any] = {
        "model": {"use": "mlp", "hidden": [8]},
        "training": {"batch_size": 4000, "steps": 14, "threads": 1},
        "evaluation": {"every_epochs": 0},
    }
    data = [
        (inputs, targets),
        {"use": "parquet", "path": str(folder / "0.parquet")},
        table,
    ]
    hashes = {
        cordee.train(
            cordee.Job(name=f"in-memory-{number}", data=one, **shared), run_dir=folder / f"memory-{number}", quiet=True
        ).summary.weights_sha256
        for number, one in enumerate(data)
    }
    assert len(hashes) == 1
