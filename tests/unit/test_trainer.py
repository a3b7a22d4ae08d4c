"""Training in one process: how long, what is measured and saved when, how it ends, how it continues."""

from __future__ import annotations

import json
import math
import operator
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from small_jobs import BATCHES_PER_EPOCH, copy_as_killed_after, events_of, run, saved_steps, small_job
from torch import nn
from torch.utils.data import Dataset

from cordee import checkpoint
from cordee.core import Job, Use
from cordee.core.errors import DataError, JobError, RunDirectoryError, StorageError, TrainingError
from cordee.monitoring.summary import read_summary
from cordee.tools.export import export_run

# How long ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "steps", "epochs", "samples"),
    [
        ({"epochs": 1}, 5, 1, 38),
        ({"epochs": 3}, 15, 3, 114),
        ({"steps": 7}, 7, 1, 38 + 16),
        ({"steps": 10}, 10, 2, 76),
        ({"steps": 2}, 2, 0, 16),
        ({"batch_size": 38, "epochs": 2}, 2, 2, 76),
    ],
)
def test_epochs_or_steps(tmp_path: Path, training: dict[str, int], steps: int, epochs: int, samples: int) -> None:
    summary = run(small_job(training=training), tmp_path / "run").summary
    assert (summary.status, summary.stopped_by) == ("completed", None)
    assert (summary.steps, summary.epochs, summary.samples) == (steps, epochs, samples)


def test_a_job_that_says_neither_trains_for_one_epoch(tmp_path: Path) -> None:
    table = small_job().to_dict()
    del table["training"]["epochs"]
    assert run(Job.from_dict(table), tmp_path / "run").summary.steps == 5


# Evaluation and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "steps", "epochs"),
    [
        ({}, [5, 10, 15], [1, 2, 3]),
        ({"every_epochs": 2}, [10, 15], [2, 3]),
        ({"every_epochs": 0}, [15], [3]),
        ({"every_epochs": 0, "every_steps": 4}, [4, 8, 12, 15], [1, 2, 3, 3]),
        ({"every_epochs": 1, "every_steps": 5}, [5, 10, 15], [1, 2, 3]),
    ],
)
def test_when_it_is_evaluated(tmp_path: Path, evaluation: Any, steps: list[int], epochs: list[int]) -> None:
    result = run(small_job(training={"epochs": 3}, evaluation=evaluation), tmp_path / "run")
    found = events_of(result, "evaluation")
    assert [event["step"] for event in found] == steps
    assert [event["epoch"] for event in found] == epochs
    assert all(event["samples"] == 20 for event in found)
    assert result.summary.test_loss == found[-1]["test_loss"]
    assert result.summary.test_accuracy == found[-1]["test_accuracy"]


def test_without_a_test_set_nothing_is_evaluated(tmp_path: Path) -> None:
    result = run(small_job(data=small_jobs.samples(), model="mlp"), tmp_path / "run")
    assert events_of(result, "evaluation") == []
    assert (result.summary.test_loss, result.summary.test_accuracy) == (None, None)
    assert result.summary.train_loss is not None


@pytest.mark.parametrize(
    ("settings", "saved", "kept"),
    [
        ({"every_steps": 3, "keep": 2}, [3, 6, 9, 10], [9, 10]),
        ({"every_steps": 5, "keep": 9}, [5, 10], [5, 10]),
        ({"every_steps": 0, "keep": 1}, [10], [10]),
        ({}, [10], [10]),
    ],
)
def test_when_it_is_saved_and_what_is_kept(tmp_path: Path, settings: Any, saved: list[int], kept: list[int]) -> None:
    result = run(small_job(checkpoint=settings), tmp_path / "run")
    assert [event["step"] for event in events_of(result, "checkpoint")] == saved
    assert saved_steps(result.directory) == kept


def test_evaluating_and_saving_do_not_change_the_weights(tmp_path: Path) -> None:
    plain = run(small_job(), tmp_path / "a").summary.weights_sha256
    busy = small_job(evaluation={"every_steps": 1}, checkpoint={"every_steps": 1}, monitoring={"every_steps": 1})
    assert run(busy, tmp_path / "b").summary.weights_sha256 == plain


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = checkpoint.save, []

    def full_at_first(*args: Any, **settings: Any) -> Path:
        calls.append(args[1])
        if len(calls) <= 2:
            raise StorageError("cannot save: No space left on device")
        return save(*args, **settings)

    monkeypatch.setattr("cordee.checkpoint.writing.save", full_at_first)
    result = run(small_job(checkpoint={"every_steps": 3}), tmp_path / "run")
    assert result.status == "completed"
    assert calls == [3, 6, 9, 10]
    warnings = [event["message"] for event in events_of(result, "warning")]
    assert [message.split(":")[0] for message in warnings] == [
        "checkpoint at step 3 was not saved",
        "checkpoint at step 6 was not saved",
    ]
    assert saved_steps(result.directory) == [9, 10]


class HeldSave:
    """A disk that takes nothing before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.steps = threading.Event(), list[int]()
        self._save = checkpoint.save
        monkeypatch.setattr("cordee.checkpoint.writing.save", self)

    def __call__(self, root: Path, step: int, *args: Any, **settings: Any) -> Path:
        self.steps.append(step)
        assert self.release.wait(30)
        return self._save(root, step, *args, **settings)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(small_job(checkpoint={"every_steps": 3, "keep": 9, "asynchronous": False}), tmp_path / "plain")
    held, reached = HeldSave(monkeypatch), []

    class WatchingNet(small_jobs.Net):
        @staticmethod
        def at_step(now: int) -> None:
            reached.append((now, list(held.steps)))
            if now == 6:  # the next checkpoint would wait for the first
                held.release.set()

    job = small_job(model=WatchingNet, checkpoint={"every_steps": 3, "keep": 9})
    result = run(job, tmp_path / "held")
    assert (6, [3]) in reached, "steps 4 to 6 were begun before the checkpoint of step 3 was written"
    assert [event["step"] for event in events_of(result, "checkpoint")] == [3, 6, 9, 10]
    stalls = [event["stall_s"] for event in events_of(result, "checkpoint")]
    assert result.summary.checkpoint_stall_seconds == pytest.approx(sum(stalls))
    assert saved_steps(plain.directory) == saved_steps(result.directory)


def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path) -> None:
    settings = {"every_steps": 1, "keep": 20}
    apart = run(small_job(checkpoint=settings), tmp_path / "apart").directory / "checkpoints"
    at_once = run(small_job(checkpoint={**settings, "asynchronous": False}), tmp_path / "at-once").directory
    for path in checkpoint.list_checkpoints(apart):
        mine, other = checkpoint.load(path), checkpoint.load(at_once / "checkpoints" / path.name)
        assert mine.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in mine.tensors.items()), path.name
        assert {**mine.values["progress"], "elapsed_s": 0, "metrics": 0} == {
            **other.values["progress"],
            "elapsed_s": 0,
            "metrics": 0,
        }


def test_an_error_of_the_users_does_not_lose_the_checkpoint_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldSave(monkeypatch)

    class FailingNet(small_jobs.Net):
        @staticmethod
        def at_step(now: int) -> None:
            if now == 5:
                assert held.steps == [3]
                threading.Timer(0.2, held.release.set).start()
                raise ZeroDivisionError("the user's own mistake")

    with pytest.raises(TrainingError, match="step 5 raised ZeroDivisionError"):
        run(small_job(model=FailingNet, checkpoint={"every_steps": 3}), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [3]


def test_a_full_disk_in_the_background_fails_the_run_only_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(root: Path, step: int, *args: Any, **settings: Any) -> Path:
        raise StorageError("cannot save: No space left on device")

    monkeypatch.setattr("cordee.checkpoint.writing.save", full)
    with pytest.raises(StorageError, match="step 10 was reached, but its weights could not be saved"):
        run(small_job(checkpoint={"every_steps": 5}), tmp_path / "run")  # the last one is also one in between
    assert len(events_of(tmp_path / "run", "warning")) == 2


def test_a_slow_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.training.checkpointer.WORTH_SAYING_S", 0.01)
    save = checkpoint.save

    def slow(*args: Any, **settings: Any) -> Path:
        time.sleep(0.1)
        return save(*args, **settings)

    monkeypatch.setattr("cordee.checkpoint.writing.save", slow)
    result = run(small_job(checkpoint={"every_steps": 1}), tmp_path / "run")
    (warning,) = events_of(result, "warning")
    assert "s for the checkpoint of step 1, which was still being written" in warning["message"]


def test_the_best_is_kept(tmp_path: Path) -> None:
    # The accuracy of this model rises and falls again, as the rate is far too high.
    job = small_job(
        optimizer={"use": "sgd", "lr": 3.0},
        training={"epochs": 6},
        evaluation={"every_steps": 3},
        checkpoint={"every_steps": 10, "keep": 1, "keep_best": True},
    )
    result = run(job, tmp_path / "run")
    evaluations = events_of(result, "evaluation")
    best = max(evaluations, key=lambda event: (event["test_accuracy"], -event["step"]))
    assert 0 < best["step"] < 30, "otherwise this proves nothing"
    assert result.summary.best_step == best["step"]
    assert saved_steps(result.directory) == [best["step"], 30]
    kept = checkpoint.load(result.directory / "checkpoints" / f"step-{best['step']}")
    assert kept.values["progress"]["best_step"] == best["step"]
    (weights,) = export_run(result.directory, [tmp_path / "best.pt"], takes_best=True)
    assert checkpoint.weights_sha256(torch.load(weights)) == checkpoint.weights_sha256(kept.part("model").tensors)


def test_the_best_needs_a_test_set_and_to_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"checkpoint\.keep_best needs a test set"):
        run(small_job(data=small_jobs.samples(), model="mlp", checkpoint={"keep_best": True}), tmp_path / "a")
    run(small_job(), tmp_path / "b")
    with pytest.raises(RunDirectoryError, match=r"kept no best checkpoint: train with checkpoint\.keep_best = true"):
        export_run(tmp_path / "b", [tmp_path / "best.pt"], takes_best=True)
    with pytest.raises(JobError, match="--best and --step 3 contradict each other"):
        export_run(tmp_path / "b", [tmp_path / "best.pt"], step=3, takes_best=True)


# Ends that went well ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "steps", "reason"),
    [
        ({"accuracy": 0.01}, 5, "accuracy"),
        ({"loss": 100.0}, 5, "loss"),
        ({"time": 1e-9}, 1, "time"),
        ({"steps": 3}, 3, "steps"),
        ({"patience": 2}, 15, "patience"),
    ],
)
def test_every_stop_policy(tmp_path: Path, stop: dict[str, Any], steps: int, reason: str) -> None:
    # A rate this small changes no prediction, so that no evaluation after the first one is better.
    job = small_job(optimizer={"use": "sgd", "lr": 1e-9}, training={"epochs": 9}, stop=stop)
    summary = run(job, tmp_path / "run").summary
    assert (summary.status, summary.stopped_by, summary.steps) == ("stopped", reason, steps)
    assert summary.train_loss is not None and math.isfinite(summary.train_loss)
    assert summary.test_loss is not None, "the end is always measured"
    assert saved_steps(tmp_path / "run") == [steps], "and saved"


def test_whichever_comes_first(tmp_path: Path) -> None:
    summary = run(small_job(stop={"loss": 1e-9, "steps": 3}), tmp_path / "run").summary
    assert (summary.stopped_by, summary.steps) == ("steps", 3)


@pytest.mark.parametrize("stop", [{"accuracy": 0.01}, {"loss": 100.0}, {"accuracy": 0.01, "steps": 5}, {"steps": 5}])
@pytest.mark.parametrize("every_epochs", [0, 1])
def test_a_rule_that_is_met_at_the_last_step_is_named(tmp_path: Path, stop: dict[str, Any], every_epochs: int) -> None:
    """Whether the last evaluation was due or not, and again when the run is resumed."""
    job = small_job(training={"epochs": 1}, evaluation={"every_epochs": every_epochs}, stop=stop)
    summaries = [run(job, tmp_path / "run", resume=resume).summary for resume in (False, True)]
    expected = ("stopped", next(iter(stop)), 5)
    assert [(summary.status, summary.stopped_by, summary.steps) for summary in summaries] == [expected, expected]


# Ends that did not ------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_stops_with_the_step_named(tmp_path: Path) -> None:
    job = small_job(model=small_jobs.NanNet, training={"epochs": 3}, checkpoint={"every_steps": 2})
    with pytest.raises(TrainingError) as caught:
        run(job, tmp_path / "run")
    assert "the loss is nan at step 7 (epoch 2); the last checkpoint is step-6" in str(caught.value)
    assert "optimizer.lr" in str(caught.value)
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary is not None
    assert (summary.status, summary.stopped_by, summary.steps) == ("failed", "error", 6)
    assert summary.error == str(caught.value)
    assert summary.wall_seconds is not None and summary.wall_seconds > 0
    assert saved_steps(tmp_path / "run") == [2, 4, 6]
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "step-6")
    (ended,) = events_of(tmp_path / "run", "run_ended")
    assert ended["status"] == "failed"


@pytest.mark.parametrize(("every_steps", "step"), [(1, 1), (0, 2)])
def test_weights_that_are_not_numbers_are_never_saved(tmp_path: Path, every_steps: int, step: int) -> None:
    job = small_job(model=small_jobs.NanGradientNet, checkpoint={"every_steps": every_steps})
    with pytest.raises(TrainingError, match=rf"at step {step} \(epoch 1\); there is no checkpoint yet"):
        run(job, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_they_are_not_saved_after_the_last_step_either(tmp_path: Path) -> None:
    job = small_job(model=small_jobs.NanGradientNet, training={"steps": 1})
    with pytest.raises(TrainingError, match=r"'model\.root' has values that are not finite at step 1"):
        run(job, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_a_gradient_that_is_not_a_number_cannot_be_clipped(tmp_path: Path) -> None:
    job = small_job(model=small_jobs.NanGradientNet, training={"clip_norm": 1.0})
    with pytest.raises(TrainingError, match=r"norm of the gradient is nan at step 1: lower optimizer.lr"):
        run(job, tmp_path / "run")


def test_infinities_in_a_mask_are_ordinary(tmp_path: Path) -> None:
    assert run(small_job(model=small_jobs.MaskedNet), tmp_path / "run").status == "completed"


def test_an_exception_of_the_users_names_the_step_and_is_in_the_log(tmp_path: Path) -> None:
    job = small_job(model=small_jobs.failing_at(4), checkpoint={"every_steps": 2})
    with pytest.raises(TrainingError, match="step 4 raised ZeroDivisionError: the user's own mistake") as caught:
        run(job, tmp_path / "run")
    log = tmp_path / "run" / "logs" / "worker-0.log"
    assert str(log) in str(caught.value)
    assert "Traceback (most recent call last)" in log.read_text()
    assert "small_jobs.py" in log.read_text()
    assert saved_steps(tmp_path / "run") == [2]
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary is not None and (summary.status, summary.steps) == ("failed", 3)


# Interrupts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_the_step_saved(tmp_path: Path, number: signal.Signals) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = run(small_job(model=small_jobs.interrupted_at(7, number=number)), tmp_path / "run")
    assert (result.status, result.summary.stopped_by, result.summary.steps) == ("interrupted", "interrupt", 7)
    assert saved_steps(result.directory) == [7]
    assert ["stopping after this step" in event["message"] for event in events_of(result, "warning")] == [True]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    class TwiceNet(small_jobs.Net):
        @staticmethod
        def at_step(step: int) -> None:
            if step == 3:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(small_job(model=TwiceNet, checkpoint={"every_steps": 1, "asynchronous": False}), tmp_path / "run")
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary is not None and (summary.status, summary.steps) == ("interrupted", 2)
    assert saved_steps(tmp_path / "run") == [1, 2]


def test_an_interrupt_while_evaluating_is_not_taken_for_a_result(tmp_path: Path) -> None:
    class WhileEvaluating(small_jobs.Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training and self.steps == 5 and len(inputs) == 4:
                signal.raise_signal(signal.SIGINT)
            return super().forward(inputs)

    job = small_job(model=WhileEvaluating, evaluation={"batch_size": 4})
    result = run(job, tmp_path / "run")
    assert (result.status, result.summary.steps, result.summary.test_loss) == ("interrupted", 5, None)
    assert events_of(result, "evaluation") == []
    again = run(small_job(model=WhileEvaluating, evaluation={"batch_size": 20}), tmp_path / "run", resume=True)
    assert [event["step"] for event in events_of(again, "evaluation")] == [5, 10]


def test_interrupted_and_resumed_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = run(small_job(model=small_jobs.Net), tmp_path / "whole")
    interrupted = small_jobs.interrupted_at(3)
    run(small_job(model=interrupted), tmp_path / "run")
    interrupted.at_step = small_jobs.Net.at_step  # type: ignore[method-assign]
    resumed = run(small_job(model=interrupted), tmp_path / "run", resume=True)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert resumed.status == "completed"


# Going on ---------------------------------------------------------------------------------------------------

# Dropout and shuffling are in all of them.
RESUMABLE: dict[str, Job] = {
    "cosine": small_job(schedule={"use": "cosine", "warmup_steps": 2}, training={"clip_norm": 0.5, "accumulate": 2}),
    "patience": small_job(
        optimizer={"use": "adam", "lr": 1e-7},
        training={"epochs": 9},
        evaluation={"every_steps": 2},
        stop={"patience": 3},
    ),
    "accuracy": small_job(
        optimizer={"use": "sgd", "lr": 0.1, "momentum": 0.9},
        training={"epochs": 9},
        evaluation={"every_steps": 3},
        stop={"accuracy": 0.85},
    ),
    "steps": small_job(stop={"steps": 8}),
    "stream": small_job(data=small_jobs.StreamData(), training={"epochs": 2}),
    "random-transforms": small_job(data=small_jobs.MapData(), training={"steps": 8}),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each of the jobs trained to its end, saved after every step."""
    runs = {}
    for name, job in RESUMABLE.items():
        every = job.replace(["checkpoint.every_steps=1", "checkpoint.keep=99"])
        runs[name] = run(every, tmp_path_factory.mktemp("finished") / name)
    return runs


STEPS = {"cosine": range(1, 11), "patience": range(1, 7), "steps": range(5, 9), "stream": [3, 5, 7, 10]}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, step) for name, steps in STEPS.items() for step in steps),
        ("accuracy", 4),
        ("accuracy", 9),
        ("random-transforms", 4),
    ],
)
def test_killed_after_any_step_and_resumed_it_ends_the_same(
    tmp_path: Path, finished: dict[str, Any], name: str, step: int
) -> None:
    whole = finished[name]
    assert 1 <= step <= whole.summary.steps
    copy = copy_as_killed_after(whole.directory, step, tmp_path / "run")
    resumed = run(RESUMABLE[name].replace(["checkpoint.every_steps=1", "checkpoint.keep=99"]), copy, resume=True)
    fields = ("status", "stopped_by", "steps", "epochs", "samples", "test_loss", "test_accuracy", "weights_sha256")
    for field in fields:
        assert getattr(resumed.summary, field) == getattr(whole.summary, field), field
    # A mean of the same numbers, added up in the same order.
    assert resumed.summary.train_loss == whole.summary.train_loss
    assert events_of(resumed, "run_started")[-1]["start_step"] == step


def test_the_jobs_above_end_as_they_should(finished: dict[str, Any]) -> None:
    assert {name: result.summary.stopped_by for name, result in finished.items()} == {
        "cosine": None,
        "patience": "patience",
        "accuracy": "accuracy",
        "steps": "steps",
        "stream": None,
        "random-transforms": None,
    }
    assert finished["patience"].summary.steps == 6, "evaluated at 2, 4, 5 and 6"
    assert finished["accuracy"].summary.steps == 9


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(small_job(), tmp_path / "run").summary
    result = run(small_job(), tmp_path / "run", resume=True)
    assert [event["step"] for event in events_of(result, "checkpoint")] == [10], "it is saved already"
    again = result.summary
    for field in ("status", "steps", "epochs", "samples", "test_loss", "test_accuracy", "train_loss", "weights_sha256"):
        assert getattr(again, field) == getattr(first, field), field


def test_a_finished_run_can_be_taken_further(tmp_path: Path) -> None:
    whole = run(small_job(training={"epochs": 4}), tmp_path / "whole").summary
    run(small_job(training={"epochs": 2}), tmp_path / "run")
    further = run(small_job(training={"epochs": 4}), tmp_path / "run", resume=True).summary
    assert (further.steps, further.epochs, further.weights_sha256) == (20, 4, whole.weights_sha256)


def test_a_stopped_run_can_be_taken_further(tmp_path: Path) -> None:
    whole = run(small_job(), tmp_path / "whole").summary
    run(small_job(stop={"steps": 3}), tmp_path / "run")
    assert run(small_job(), tmp_path / "run", resume=True).summary.weights_sha256 == whole.weights_sha256


def test_resuming_with_a_changed_job_names_the_key(tmp_path: Path) -> None:
    run(small_job(), tmp_path / "run")
    with pytest.raises(JobError, match=r"optimizer\.lr was 0\.01, is 0\.5.*Put it back to resume"):
        run(small_job(optimizer={"use": "adam", "lr": 0.5}), tmp_path / "run", resume=True)
    assert run(small_job(), tmp_path / "run", resume=True).status == "completed"


def test_a_run_without_a_checkpoint_starts_again_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        run(small_job(model=small_jobs.failing_at(3)), tmp_path / "run")
    result = run(small_job(model=small_jobs.failing_at(99)), tmp_path / "run", resume=True)
    assert result.summary.steps == 10
    assert ["no checkpoint yet" in event["message"] for event in events_of(result, "warning")] == [True]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    job = small_job(checkpoint={"every_steps": 2, "keep": 9})
    whole = run(job, tmp_path / "run").summary
    copy = copy_as_killed_after(tmp_path / "run", 6, tmp_path / "copy")
    (copy / "checkpoints" / "step-6" / "model.safetensors").write_bytes(b"damaged")
    resumed = run(job, copy, resume=True)
    assert resumed.summary.weights_sha256 == whole.weights_sha256
    (warning,) = events_of(resumed, "warning")
    assert warning["message"].startswith("checkpoint step-6 is damaged")
    assert events_of(resumed, "run_started")[-1]["start_step"] == 4


# The same again ---------------------------------------------------------------------------------------------


def test_two_trainings_in_one_process_give_the_same_weights(tmp_path: Path) -> None:
    first = run(small_job(), tmp_path / "a").summary.weights_sha256
    torch.rand(7)
    assert run(small_job(), tmp_path / "b").summary.weights_sha256 == first
    assert run(small_job(seed=1), tmp_path / "c").summary.weights_sha256 != first


def test_a_run_leaves_torch_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run(small_job(), tmp_path / "run")
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == 2
    torch.manual_seed(3)
    with pytest.raises(TrainingError):
        run(small_job(model=small_jobs.failing_at(2)), tmp_path / "failed")
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == 2


def test_accumulating_gives_the_weights_of_the_whole_batch(tmp_path: Path) -> None:
    net = Use("mlp", hidden=[8])  # without dropout, whose draws depend on the cut
    whole = run(small_job(model=net), tmp_path / "whole").model.state_dict()
    for parts in (2, 3, 8):
        found = run(small_job(model=net, training={"accumulate": parts}), tmp_path / f"{parts}").model.state_dict()
        # Ten steps of Adam, which divides by the root of tiny second moments: rounding grows to about 1e-5.
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    result = run(small_job(training={"precision": "bf16", "epochs": 5}), tmp_path / "run")
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    losses = [event["train_loss"] for event in events_of(result, "evaluation")]
    assert losses[-1] < losses[0]
    assert (
        result.summary.weights_sha256 != run(small_job(training={"epochs": 5}), tmp_path / "b").summary.weights_sha256
    )


def test_clipping_is_reported(tmp_path: Path) -> None:
    result = run(small_job(training={"clip_norm": 0.01}, monitoring={"every_steps": 1}), tmp_path / "run")
    norms = [event["gradient_norm"] for event in events_of(result, "step")]
    assert len(norms) == 10 and all(norm > 0.01 for norm in norms)


def test_the_rate_follows_the_schedule(tmp_path: Path) -> None:
    job = small_job(schedule={"use": "linear", "warmup_steps": 2}, monitoring={"every_steps": 1})
    rates = [event["lr"] for event in events_of(run(job, tmp_path / "run"), "step")]
    assert rates == pytest.approx([0.005, 0.01, *(0.01 * (1 - k / 8) for k in range(8))])


# Data of all kinds ------------------------------------------------------------------------------------------


def test_regression_on_numbers(tmp_path: Path) -> None:
    job = small_job(
        data={"use": small_jobs.regression_data(), "test_fraction": 0.25},
        model={"use": "mlp", "hidden": []},
        loss="mse",
        optimizer={"use": "adam", "lr": 0.1},
        training={"epochs": 40},
    )
    summary = run(job, tmp_path / "run").summary
    assert summary.test_accuracy is None
    assert summary.test_loss is not None and summary.test_loss < 0.1, "it starts at 10"


@pytest.mark.parametrize(("training", "steps", "epochs"), [({"epochs": 3}, 15, 3), ({"steps": 7}, 7, 1)])
def test_a_stream(tmp_path: Path, training: dict[str, int], steps: int, epochs: int) -> None:
    summary = run(small_job(data=small_jobs.StreamData(), training=training), tmp_path / "run").summary
    assert (summary.status, summary.steps, summary.epochs) == ("completed", steps, epochs)
    assert summary.samples == 38 * (steps // 5) + 8 * (steps % 5)


def test_a_stream_left_in_the_middle_of_an_epoch_is_taken_up_there(tmp_path: Path) -> None:
    stream = small_jobs.StreamData()
    whole = run(small_job(data=stream, training={"steps": 9}), tmp_path / "whole").summary
    run(small_job(data=stream, training={"steps": 7}), tmp_path / "run")
    further = run(small_job(data=stream, training={"steps": 9}), tmp_path / "run", resume=True).summary
    assert further.weights_sha256 == whole.weights_sha256
    assert further.samples == whole.samples


def test_a_stream_that_runs_dry_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gave no samples in epoch 2: .* must start again"):
        run(small_job(data=small_jobs.OneShotData(), training={"steps": 50}), tmp_path / "run")


def test_a_dataset_of_the_users(tmp_path: Path) -> None:
    job = small_job(data={"use": small_jobs.MapData, "test_fraction": 0.2}, training={"epochs": 2})
    summary = run(job, tmp_path / "run").summary
    assert (summary.status, summary.samples) == ("completed", 60)
    assert summary.test_accuracy is not None


def test_iris(tmp_path: Path) -> None:
    job = small_job(
        data={"use": "iris"}, model={"use": "mlp", "hidden": [16]}, training={"epochs": 10, "batch_size": 16}
    )
    accuracy = run(job, tmp_path / "run").test_accuracy
    assert accuracy is not None and accuracy > 0.8


def test_a_module_that_is_already_built_is_trained_itself(tmp_path: Path) -> None:
    model = nn.Linear(small_jobs.NUM_FEATURES, small_jobs.NUM_CLASSES)
    before = model.weight.detach().clone()
    assert run(small_job(model=model), tmp_path / "run").model is model
    assert not torch.equal(model.weight, before)


# What is recorded -------------------------------------------------------------------------------------------


def test_the_summary_is_complete(tmp_path: Path) -> None:
    result = run(small_job(), tmp_path / "run")
    table = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert table | {"status": "completed", "name": "small", "strategy": "single", "workers": 1} == table
    assert table | {"device": "cpu", "parameters": 6 * 8 + 8 + 8 * 3 + 3, "steps": 10, "epochs": 2} == table
    assert table | {"samples": 76, "recoveries": 0, "steps_redone": 0, "stopped_by": None, "error": None} == table
    assert table["wall_seconds"] > 0 and table["samples_per_second"] > 0
    assert 0 < table["train_loss"] < 5 and 0 < table["test_loss"] < 5 and 0 <= table["test_accuracy"] <= 1
    assert table["test_top5_accuracy"] is None, "three classes"
    assert table["ended"] >= table["started"]
    assert table["weights_sha256"] == checkpoint.weights_sha256(result.model.state_dict())
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-10").part("model")
    assert table["weights_sha256"] == checkpoint.weights_sha256(state.tensors)


def test_events_are_in_order(tmp_path: Path) -> None:
    settings = {"every_steps": 4, "asynchronous": False}
    result = run(small_job(checkpoint=settings, monitoring={"every_steps": 5}), tmp_path / "run")
    events = result.events()
    kinds = [event["type"] for event in events if event["type"] != "commit"]
    assert set(kinds[:2]) == {"run_started", "worker_started"}
    assert kinds[2:] == [
        "step",
        "checkpoint",
        "evaluation",
        "step",
        "checkpoint",
        "evaluation",
        "checkpoint",
        "run_ended",
    ]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    started = events_of(result, "run_started")[0]
    assert started | {"total_steps": 10, "epochs": 2, "batch_size": 8, "train_samples": 38, "start_step": 0} == started
    assert (
        events_of(result, "worker_started")[0] | {"worker": 0, "role": "worker"}
        == events_of(result, "worker_started")[0]
    )
    ended = {key: value for key, value in events[-1].items() if key not in ("type", "time", "member")}
    assert ended == json.loads((tmp_path / "run" / "summary.json").read_text())
    steps = events_of(result, "step")
    assert [event["step"] for event in steps] == [1, 6]
    assert all(0 <= event["accuracy"] <= 1 and event["samples_per_second"] > 0 for event in steps)


def test_the_training_loss_is_the_mean_over_the_samples_of_the_last_epoch(tmp_path: Path) -> None:
    result = run(small_job(monitoring={"every_steps": 1}), tmp_path / "run")
    losses = [event["loss"] for event in events_of(result, "step")]
    sizes = [8, 8, 8, 8, 6]
    means = [sum(map(operator.mul, epoch, sizes)) / 38 for epoch in (losses[:5], losses[5:])]
    assert [event["train_loss"] for event in events_of(result, "evaluation")] == pytest.approx(means, rel=1e-12)
    assert result.summary.train_loss == pytest.approx(means[1], rel=1e-12)


def test_an_epoch_that_a_stop_rule_ends_is_finished(tmp_path: Path) -> None:
    assert run(small_job(stop={"steps": BATCHES_PER_EPOCH}), tmp_path).summary.epochs == 1


class Unsound(Dataset[tuple[torch.Tensor, int]]):
    """38 samples, of which sample 17 has an input that is not a number."""

    num_classes = 3

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, targets = small_jobs.samples()
        return inputs[index] * (float("nan") if index == 17 else 1.0), int(targets[index])


def test_a_sample_that_is_not_finite_is_named(tmp_path: Path) -> None:
    job = small_job(data={"use": Unsound, "test_fraction": 0.1}, training={"epochs": 3})
    with pytest.raises(
        TrainingError, match=r"the loss is nan at step \d+ .*The input of sample 17 of the training set"
    ) as caught:
        run(job, tmp_path)
    assert "optimizer.lr" not in str(caught.value)


def test_frozen_parameters_are_told_apart(tmp_path: Path) -> None:
    class Half(small_jobs.Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

    summary = run(small_job(model=Half), tmp_path).summary
    assert (summary.parameters, summary.trainable_parameters) == (6 * 3 + 3 + 6, 6 * 3 + 3)
    (started,) = events_of(tmp_path, "run_started")
    assert (started["parameters"], started["trainable_parameters"]) == (27, 21)
