"""Parameter servers in real processes, against the single-process run on the same data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cordee import Job
from cordee.checkpoint import load, load_newest
from cordee.core.errors import JobError, TrainingError
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.run import Run

pytestmark = pytest.mark.timeout(150)

NUM_STEPS = 20


def job(**sections: Any) -> Job:
    table: dict[str, Any] = {
        "name": "servers",
        "model": {"use": "mlp", "hidden": [33, 20], "dropout": 0.2},
        "data": {"use": "synthetic", "shape": [12], "num_classes": 3, "size": 150, "test_size": 40},
        "optimizer": {"use": "adam", "lr": 0.01},
        "schedule": {"use": "cosine", "warmup_steps": 3},
        "training": {"batch_size": 16, "steps": NUM_STEPS, "threads": 1, "device": "cpu"},
        "cluster": {"failure_timeout": "10s"},
        "monitoring": {"every_steps": 1},
    }
    for key, section in sections.items():
        is_other = not isinstance(section, dict) or section.get("use", "adam") not in ("adam", "sgd", "cosine")
        table[key] = section if is_other else {**table.get(key, {}), **section}
    return Job.from_dict(table)


def with_servers(workers: int, **settings: Any) -> dict[str, Any]:
    return {"name": "parameter_server", "workers": workers, **settings}


def go(path: Path, resume: bool = False, **sections: Any) -> Run:
    return train(job(**sections), run_dir=path, quiet=True, resume=resume)


def weights(run: Run) -> dict[str, torch.Tensor]:
    loaded = load_newest(run.directory / "checkpoints")
    assert loaded is not None
    return loaded.state.part("model").tensors


def largest_difference(one: Run, other: Run) -> float:
    """The largest difference of any weight, relative to the largest weight of its tensor."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-12)) for name in ours
    )


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory / "events.jsonl") if event["type"] == kind]


def test_one_worker_gives_the_bits_of_single_and_of_its_metrics(tmp_path: Path) -> None:
    alone = go(tmp_path / "alone", strategy={"name": "single"})
    settings = {"every_steps": 9, "keep": 1, "keep_best": True}
    evaluation = {"every_steps": 4}
    one = go(tmp_path / "one", strategy=with_servers(1, servers=2), checkpoint=settings, evaluation=evaluation)
    assert one.summary.weights_sha256 == alone.summary.weights_sha256
    assert one.summary.test_loss == alone.summary.test_loss
    assert (one.summary.steps, one.summary.samples) == (alone.summary.steps, alone.summary.samples)
    losses = [[event["loss"] for event in events(run, "step")] for run in (alone, one)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    roles = {(event["role"], event["worker"]) for event in events(one, "worker_started")}
    assert roles == {("worker", 0), ("server", 0), ("server", 1), ("evaluator", 0)}
    stalls = [event["stall_s"] for event in events(one, "checkpoint")]
    assert one.summary.checkpoint_stall_seconds == pytest.approx(sum(stalls)) and min(stalls) > 0
    best = max(events(one, "evaluation"), key=lambda event: (event["test_accuracy"], -event["step"]))["step"]
    kept = {path.name for path in (one.directory / "checkpoints").iterdir()}
    assert (one.summary.best_step, kept) == (best, {f"step-{best}", f"step-{NUM_STEPS}"})


def test_another_strategy_goes_on_without_the_settings_of_servers(tmp_path: Path) -> None:
    alone = go(tmp_path / "alone", strategy={"name": "single"})
    run_dir = tmp_path / "run"
    go(run_dir, strategy=with_servers(1, servers=2, staleness=0), stop={"steps": 7})
    overrides = ["strategy.name=single", "stop.steps=99"]
    with pytest.raises(JobError, match=r"strategy\.servers is a setting of 'parameter_server'"):
        asked_for = [*overrides, "strategy.servers=2"]
        train(run_dir / "job.toml", overrides=asked_for, run_dir=run_dir, resume=True, quiet=True)
    after = train(run_dir / "job.toml", overrides=overrides, run_dir=run_dir, resume=True, quiet=True)
    assert (after.summary.steps, after.summary.weights_sha256) == (NUM_STEPS, alone.summary.weights_sha256)
    assert [event["message"] for event in events(after, "warning")] == [
        "left out, since the run continues with 'single' and not with 'parameter_server': "
        "strategy.servers = 2, strategy.staleness = 0"
    ]
    assert Job.load(run_dir / "job.toml").strategy.settings == {}


def test_a_resumed_run_with_compression_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """What workers left out is in the checkpoint; each worker has its own share of every step."""
    settings = with_servers(2, servers=2, compression="int4")
    saving = {"every_steps": 10, "keep": 5}
    whole = go(tmp_path / "whole", strategy=settings, checkpoint=saving)
    run_dir = tmp_path / "run"
    go(run_dir, strategy=settings, checkpoint=saving, stop={"steps": 10})
    again = train(run_dir / "job.toml", overrides=["stop.steps=99"], run_dir=run_dir, resume=True, quiet=True)
    assert (again.summary.steps, again.summary.residuals_lost) == (NUM_STEPS, 0)
    assert again.summary.weights_sha256 == whole.summary.weights_sha256
    saved = load_newest(run_dir / "checkpoints")
    assert saved is not None
    left = saved.state.part("residual")
    assert left.values == {"workers": 2, "weight": 0.5}
    assert {name.partition(".")[0] for name, tensor in left.tensors.items() if bool(tensor.any())} == {"0", "1"}


def test_workers_in_step_equal_single_and_lost_messages_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD, without dropout, whose random numbers are drawn share by share: within 1e-5 after 20 steps.

    The clean and the disturbed run sum in the same order and must agree to the bit.
    """
    sections = {
        "model": {"dropout": 0.0},
        "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9},
        "training": {"clip_norm": 0.5},
    }
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    clean = go(tmp_path / "clean", strategy=with_servers(3, servers=2), **sections)
    assert largest_difference(clean, alone) <= 1e-5
    assert clean.summary.staleness == {"0": 3 * NUM_STEPS}
    monkeypatch.setenv("CORDEE_LOSE_MESSAGES", "0.1")
    disturbed = go(tmp_path / "disturbed", strategy=with_servers(3, servers=2), **sections)
    assert disturbed.summary.weights_sha256 == clean.summary.weights_sha256


@pytest.mark.parametrize("model", [pytest.param("mlp", marks=pytest.mark.long), "resnet", "odd"])
def test_reproducible_runs_have_the_bits_of_single(tmp_path: Path, model: str) -> None:
    """On any number of workers and servers: dropout in the one, batch norms in the other, Adam in both."""
    sections: dict[str, Any] = {"training": {"reproducible": True, "steps": 12}}
    if model == "resnet":
        sections["training"] = {"reproducible": True, "steps": 3}
        sections["model"] = {"use": "resnet", "depth": 20}
        sections["data"] = {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 3, "size": 48, "test_size": 8}
    if model == "odd":  # rows and weights that begin at every alignment, at which kernels add in other orders
        sections["model"] = {"use": "mlp", "hidden": [33, 9]}
        sections["data"] = {"use": "synthetic", "shape": [5], "num_classes": 3, "size": 97, "test_size": 23}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    for workers in (1, 3):
        run = go(tmp_path / f"{workers}", strategy=with_servers(workers, servers=workers), **sections)
        for key in ("weights_sha256", "test_loss"):
            assert getattr(run.summary, key) == getattr(alone.summary, key), key


def test_batch_norm_statistics_are_those_of_the_workers(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"use": "resnet", "depth": 20},
        "data": {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 3, "size": 48, "test_size": 8},
        "training": {"steps": 3},
        "optimizer": {"use": "sgd", "lr": 0.01},
    }
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    one = go(tmp_path / "one", strategy=with_servers(1), **sections)
    assert one.summary.weights_sha256 == alone.summary.weights_sha256


@pytest.mark.parametrize("first", ["single", "parameter_server"])
def test_checkpoints_go_to_and_fro(tmp_path: Path, first: str) -> None:
    strategies = {"single": {"name": "single"}, "parameter_server": with_servers(1, servers=2)}
    second = next(name for name in strategies if name != first)
    whole = go(tmp_path / "whole", strategy={"name": "single"})
    path = tmp_path / "parts"
    go(path, strategy=strategies[first], stop={"steps": 9})
    after = go(path, strategy=strategies[second], resume=True)
    assert after.summary.steps == NUM_STEPS
    assert after.summary.weights_sha256 == whole.summary.weights_sha256


def test_a_stop_rule_ends_the_run_where_it_ends_single_and_for_good(tmp_path: Path) -> None:
    rules = {"stop": {"loss": 1.0}, "evaluation": {"every_steps": 3}, "checkpoint": {"every_steps": 0}}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **rules)
    run = go(tmp_path / "servers", strategy=with_servers(1), **rules)
    assert (run.summary.status, run.summary.stopped_by) == ("stopped", "loss")
    assert run.summary.steps == alone.summary.steps < NUM_STEPS
    assert run.summary.weights_sha256 == alone.summary.weights_sha256
    steps = [event["step"] for event in events(run, "evaluation")]
    assert steps == sorted(set(steps)), "a step was measured twice"
    again = go(tmp_path / "servers", strategy=with_servers(1), resume=True, **rules)
    assert (again.summary.stopped_by, again.summary.steps) == ("loss", alone.summary.steps)
    assert again.summary.weights_sha256 == alone.summary.weights_sha256


def test_free_running_workers_with_everything_on(tmp_path: Path) -> None:
    settings = {
        "servers": 2,
        "staleness": "unbounded",
        "staleness_lr": "inverse",
        "delay_compensation": 0.04,
        "compression": "int8",
        "weight_decay": 1e-4,
        "clip_norm": 5.0,
        "push_every": 2,
        "pull_every": 2,
        "replicas": 2,
    }
    run = go(tmp_path / "run", strategy=with_servers(2, **settings), training={"steps": 60}, stop={"time": "60s"})
    assert run.summary.status == "completed"
    assert run.summary.samples >= 60 * 15
    losses = [event["loss"] for event in events(run, "step")]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert sum((run.summary.staleness or {}).values()) > 0
    ended = events(run, "worker_ended")
    assert len(ended) == 2 and all(event["units"] > 0 for event in ended)


def test_nan_gradients_are_refused_and_named_and_training_goes_on(tmp_path: Path) -> None:
    run = go(
        tmp_path / "run",
        model={"use": "nan_net:NanNet"},
        python_path=[str(Path(__file__).parent)],
        strategy=with_servers(2, staleness=1),
    )
    assert run.summary.status == "completed"
    messages = [event["message"] for event in events(run, "warning")]
    assert any("the gradient of worker-" in message and "is not finite" in message for message in messages)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(run).values())


def test_an_error_in_a_worker_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"worker-\d raised RuntimeError: at its end \(in step \d+\); its log is"):
        go(
            tmp_path / "run",
            model={"use": "nan_net:FailingNet"},
            python_path=[str(Path(__file__).parent)],
            strategy=with_servers(2),
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"]) == ("failed", "error")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"servers": 0}, "strategy.servers = 0 must be at least 1"),
        ({"servers": 1000}, "strategy.servers = 1000 must be at most 64"),
        ({"staleness": 2, "aggregate": "sum"}, "aggregate = 'sum' is for the gradients of a step"),
        ({"topk": 0.5}, "strategy.topk = 0.5 is for compression = 'topk'"),
        ({"servers": 60, "workers": 2}, "strategy.servers = 60 is too many"),
        ({"staleness": -1}, "staleness = -1 must be at least 0"),
        ({"staleness": "bounded"}, "strategy.staleness"),
        ({"push_every": 2}, "staleness = 0 exchanges at every step"),
        ({"delay_compensation": 0.1}, "staleness = 0 has no old gradients"),
        ({"compression": "zip"}, "strategy.compression"),
        ({"replicas": 3}, "strategy.replicas"),
        ({"staleness": 2, "delay_compensation": float("inf")}, "delay_compensation = inf must be a finite number"),
        ({"workers": 17}, "no sample for each of 17 workers"),
        ({"clip_norm": 1.0, "training": {"clip_norm": 1.0}}, "both set"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    training = settings.pop("training", {})
    with pytest.raises(JobError, match=message):
        go(tmp_path / "run", strategy={**with_servers(2), **settings}, training=training)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_knows_what_was_measured_at_its_step(tmp_path: Path) -> None:
    """A run that is resumed from it knows its best evaluation, how long ago it was, and whether it had to stop."""
    every = {"checkpoint": {"every_steps": 5, "keep": 10}, "evaluation": {"every_steps": 5}}
    runs = [go(tmp_path / s["name"], strategy=s, **every) for s in ({"name": "single"}, with_servers(1))]
    for step in (5, 10, 15, 20):
        alone, together = (load(run.directory / "checkpoints" / f"step-{step}").values["progress"] for run in runs)
        assert together["evaluated_at"] == step
        for key in ("evaluated_at", "best_step", "patience"):
            assert together[key] == alone[key], (step, key)
        assert together["metrics"]["loss"] == alone["metrics"]["loss"]


def test_a_resumed_run_continues_with_its_batch_norms(tmp_path: Path) -> None:
    """Workers keep running means of their own; those of a resumed run, and of a replacement, begin with the run's."""
    table: dict[str, Any] = {"model": {"use": "resnet", "depth": 20}, "strategy": with_servers(1)}
    table["data"] = {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 3, "size": 150, "test_size": 40}
    whole = go(tmp_path / "whole", **table)
    go(tmp_path / "parts", **table, stop={"steps": 9})
    parts = go(tmp_path / "parts", resume=True, **table)
    assert parts.summary.weights_sha256 == whole.summary.weights_sha256
    assert parts.summary.test_loss == whole.summary.test_loss
