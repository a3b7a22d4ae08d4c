"""The numbers of a run under one name in all sinks, and the table metrics.csv. tests/trackers has the trackers."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

from cordee.core.errors import MissingExtraError, StorageError
from cordee.monitoring import Monitor
from cordee.monitoring import events as kinds
from cordee.monitoring.csv_file import CsvSink
from cordee.monitoring.scalars import scalars_of
from cordee.monitoring.trackers import MlflowSink, WandbSink, flatten

SETTINGS = flatten({"seed": 0, "model": {"use": "mlp", "hidden": [8, 8]}})


def started(start_step: int = 0) -> kinds.RunStarted:
    return kinds.RunStarted(strategy="single", workers=1, start_step=start_step, time=1000.0)


def step(number: int, loss: float) -> kinds.Step:
    return kinds.Step(step=number, loss=loss, time=1000.0 + number)


def evaluated(number: int, accuracy: float) -> kinds.Evaluation:
    return kinds.Evaluation(step=number, test_accuracy=accuracy, metrics={"f1": 0.5, "odd": None}, time=1000.5 + number)


def test_numbers_have_one_name_in_all_sinks() -> None:
    assert scalars_of(step(3, 0.5)) == {"train/loss": 0.5}
    assert scalars_of(evaluated(3, 0.9)) == {"test/accuracy": 0.9, "test/f1": 0.5}
    assert scalars_of(kinds.Logged(step=1, values={"a": 1.0, "b": None})) == {"logged/a": 1.0}
    assert scalars_of(started()) == {}
    assert SETTINGS == {"seed": 0, "model.use": "mlp", "model.hidden": "[8, 8]"}


def rows(path: Path) -> list[tuple[int, str, float]]:
    return [
        (int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(path.read_text().splitlines())
    ]


def test_a_table_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with Monitor([CsvSink(path)]) as monitor:
        for event in (started(), step(1, 2.0), evaluated(1, 0.5), step(2, 1.5)):
            monitor.emit(event)
    with path.open("ab") as file:
        file.write(b"1003.0,3,tra")  # a machine that crashed
    with Monitor([CsvSink(path)]) as monitor:
        for event in (started(1), step(2, 1.25)):
            monitor.emit(event)
    expected = [(1, "train/loss", 2.0), (1, "test/accuracy", 0.5), (1, "test/f1", 0.5), (2, "train/loss", 1.25)]
    assert rows(path) == expected


def test_a_table_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "missing" / "metrics.csv")
    with pytest.raises(StorageError, match="training continues"):
        sink.emit(started())


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
def test_mlflow_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"cordee\[mlflow\]"):
        MlflowSink(tmp_path, "digits", SETTINGS)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"cordee\[wandb\]"):
        WandbSink(tmp_path, "digits", SETTINGS)
