"""The summary: valid JSON with the promised fields, whole or not there."""

from __future__ import annotations

import json
import math

import pytest

from cordee.core.errors import RunDirectoryError, StorageError
from cordee.monitoring import Summary
from cordee.monitoring.summary import read_summary, write_summary

PROMISED = {
    "status", "strategy", "workers", "steps", "epochs", "samples", "wall_seconds", "samples_per_second", "train_loss",
    "test_loss", "test_accuracy", "weights_sha256", "recoveries", "steps_redone", "stopped_by",
}  # fmt: skip


def test_a_summary_comes_back_as_it_was_written(tmp_path):
    summary = Summary(status="stopped", steps=7, epochs=1.5, test_accuracy=0.9, stopped_by="accuracy")
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary
    assert set(json.loads((tmp_path / "summary.json").read_text())) >= PROMISED
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_losses_that_are_not_numbers_are_null(tmp_path):
    write_summary(tmp_path / "s", Summary(status="failed", train_loss=math.nan, test_loss=math.inf, error="NaN"))
    table = json.loads((tmp_path / "s").read_text())
    assert table["train_loss"] is table["test_loss"] is None
    read = read_summary(tmp_path / "s")
    assert read is not None
    assert read.train_loss is None


def test_fields_of_a_later_version_are_passed_over(tmp_path):
    (tmp_path / "s").write_text('{"status": "completed", "colour": "green"}')
    assert read_summary(tmp_path / "s") == Summary(status="completed")


def test_a_summary_that_is_missing_or_damaged(tmp_path):
    assert read_summary(tmp_path / "none") is None
    (tmp_path / "s").write_text('{"status": "comp')
    with pytest.raises(RunDirectoryError, match="is damaged"):
        read_summary(tmp_path / "s")
    with pytest.raises(RunDirectoryError, match="is not a regular file"):
        read_summary(tmp_path)


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="not a directory"):
        write_summary(tmp_path / "file" / "summary.json", Summary(status="completed"))
