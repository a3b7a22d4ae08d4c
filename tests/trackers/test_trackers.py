"""MLflow and Weights & Biases with the real packages, offline. Run by `make test-trackers`, which installs them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cordee.monitoring import Monitor
from cordee.monitoring import events as kinds
from cordee.monitoring.pictures import encode_png
from cordee.monitoring.summary import Summary
from cordee.monitoring.trackers import MlflowSink, WandbSink, flatten

SETTINGS = flatten({"seed": 0, "model": {"use": "mlp", "hidden": [8, 8]}})
pytestmark = pytest.mark.timeout(240)


def started(start_step: int = 0) -> kinds.RunStarted:
    return kinds.RunStarted(strategy="single", workers=1, start_step=start_step, time=1000.0)


def step(number: int, loss: float) -> kinds.Step:
    return kinds.Step(step=number, loss=loss, time=1000.0 + number)


def evaluated(number: int, accuracy: float) -> kinds.Evaluation:
    return kinds.Evaluation(step=number, test_accuracy=accuracy, metrics={"f1": 0.5, "odd": None}, time=1000.5 + number)


PICTURE = kinds.Picture(step=1, name="filter", png=encode_png(np.zeros((4, 6))), time=1001.2)
ENDED = kinds.RunEnded.of(Summary(status="completed", weights_sha256="ab"))


@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy, for what MLflow does
def test_mlflow_has_the_numbers_the_job_and_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for emitted in ((started(), step(1, 2.0), PICTURE, evaluated(1, 0.5)), (started(1), step(2, 1.5), ENDED)):
        with Monitor([MlflowSink(tmp_path, "digits", SETTINGS)]) as monitor:
            for event in emitted:
                monitor.emit(event)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model.use"] == "mlp"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")] == [(1, 2.0), (2, 1.5)]
    assert run.data.metrics["test/f1"] == 0.5
    (file,) = (tmp_path / "mlflow").rglob("logged/filter-step-1.png")
    assert file.read_bytes() == PICTURE.png


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    before = dict(os.environ)
    with Monitor([WandbSink(tmp_path, "digits", SETTINGS)]) as monitor:
        for event in (started(), step(1, 2.0), PICTURE, evaluated(1, 0.5), step(2, 1.5), ENDED):
            monitor.emit(event)
    wandb.teardown()  # ends its own process, which a program does at its end
    for name in os.environ.keys() - before.keys():  # what the library leaves behind
        monkeypatch.delenv(name)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    logged: list[tuple[str, str]] = []
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        logged += [("".join(item.nested_key) or item.key, item.value_json) for item in record.history.item]
    assert [float(value) for key, value in logged if key == "train/loss"] == [2.0, 1.5]
    assert ("test/f1", "0.5") in logged
    assert ("logged/filterwidth", "6") in logged and ("logged/filterheight", "4") in logged
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/files/media/images/logged/*.png")
    assert kept.is_file()
