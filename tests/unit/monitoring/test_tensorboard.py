"""TensorBoard files: the scalars by step, also after a resume."""

from __future__ import annotations

import sys

import pytest

from cordee.core.errors import MissingExtraError
from cordee.monitoring import Monitor, TensorBoardSink
from cordee.monitoring.events import Evaluation, RunStarted, Step


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_numbers_are_written_by_step_and_a_resume_hides_what_it_does_again(tmp_path):
    pytest.importorskip("tensorboard")
    for start_step in (0, 20):
        with Monitor([TensorBoardSink(tmp_path)]) as monitor:
            monitor.emit(RunStarted(strategy="single", workers=1, start_step=start_step))
            for step in (start_step + 20, start_step + 40):
                monitor.emit(
                    Step(step=step, loss=step / 100, accuracy=None, lr=0.001, samples_per_second=1000.0 + start_step)
                )
            monitor.emit(Evaluation(step=step, test_loss=0.5, test_accuracy=0.75, test_top5_accuracy=None))
    found = scalars(tmp_path)
    assert found["train/loss"] == [(20, 0.2), (40, 0.4), (60, 0.6)]
    assert found["train/samples_per_second"] == [(20, 1000.0), (40, 1020.0), (60, 1020.0)]
    assert found["train/lr"] == [(20, 0.001), (40, 0.001), (60, 0.001)]
    assert found["test/loss"] == [(60, 0.5)]
    assert found["test/accuracy"] == [(60, 0.75)]
    assert set(found) == {"train/loss", "train/lr", "train/samples_per_second", "test/loss", "test/accuracy"}


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"cordee\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_a_sink_without_events_writes_nothing(tmp_path):
    pytest.importorskip("tensorboard")
    TensorBoardSink(tmp_path / "tb").close()
    assert not (tmp_path / "tb").exists()
