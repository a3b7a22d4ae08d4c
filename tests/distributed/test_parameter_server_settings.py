"""Each setting of `parameter_server` changes what it says it changes, in real processes and against `single`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_parameter_server import events, go, largest_difference, weights, with_servers

from cordee.core.errors import JobError
from cordee.run import Run

pytestmark = pytest.mark.timeout(150)

# Five batches an epoch. With one worker, plain SGD and one rate, the sum of the gradients of local steps moves the
# servers' parameters to where the local steps took the worker's: what `single` computes, but for rounding.
HERE = str(Path(__file__).parent)
EXACT: dict[str, Any] = {
    "model": {"dropout": 0.0},
    "data": {"use": "synthetic", "shape": [12], "num_classes": 3, "size": 60, "test_size": 40},
    "optimizer": {"use": "sgd", "lr": 0.05},
    "schedule": {"use": "constant"},
    "training": {"batch_size": 12, "steps": 18},
}


@pytest.mark.parametrize("first", ["single", "parameter_server"])
def test_pushes_of_several_steps_count_every_batch_once(tmp_path: Path, first: str) -> None:
    """In one go, or where another strategy or an early end left off, in the middle of an exchange."""
    local_steps = with_servers(1, staleness=1, push_every=4)
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **EXACT)
    strategy = {"name": "single"} if first == "single" else local_steps
    go(tmp_path / "run", strategy=strategy, stop={"steps": 7}, **EXACT)
    run = go(tmp_path / "run", strategy=local_steps, resume=True, **EXACT)
    assert (run.summary.status, run.summary.steps, run.summary.samples) == ("completed", 18, 216)
    assert largest_difference(run, alone) <= 1e-5
    reported = [event["step"] for event in events(run, "step") if event["step"] > 7]
    assert reported == [9, 10, 14, 15, 18]


@pytest.mark.parametrize("size", [60, 65])
def test_local_steps_are_those_of_the_batches(tmp_path: Path, size: int) -> None:
    """A push of one batch is a local step too, and a last, smaller batch is a batch of its own."""
    sections = {**EXACT, "data": {**EXACT["data"], "size": size}}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=with_servers(1, staleness=1, push_every=4, pull_every=3), **sections)
    assert (run.summary.steps, run.summary.samples) == (alone.summary.steps, alone.summary.samples)
    assert largest_difference(run, alone) <= 1e-5


def test_the_schedule_follows_the_steps_that_were_taken(tmp_path: Path) -> None:
    sections = {**EXACT, "schedule": {"use": "cosine", "warmup_steps": 3}}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=with_servers(2, staleness=1, push_every=4), **sections)
    rates = {event["step"] - 1: event["lr"] for event in events(alone, "step")}
    before = [0, 4, 5, 9, 10, 14, 15]  # steps taken before each exchange
    assert [event["lr"] for event in events(run, "step")] == pytest.approx([rates[step] for step in before])
    assert run.summary.steps == alone.summary.steps == 18
    assert weights(run).keys() == weights(alone).keys()


def test_a_layer_used_twice_under_re_entrant_checkpointing(tmp_path: Path) -> None:
    """Its gradient is complete only at the end of the backward pass. What is never used is left alone, decay or not."""
    sections = {
        **EXACT,
        "model": {"use": "networks:Recomputed"},
        "python_path": [HERE],
        "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    }
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=with_servers(1, servers=4), **sections)
    assert run.summary.weights_sha256 == alone.summary.weights_sha256


def test_clipping_in_reproducible_mode_gives_the_bits_of_single(tmp_path: Path) -> None:
    sections = {"training": {"reproducible": True, "clip_norm": 0.05, "steps": 12}}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=with_servers(2, servers=2), **sections)
    norms = [[event["gradient_norm"] for event in events(each, "step")] for each in (alone, run)]
    assert norms[0] == norms[1] and min(norms[0]) > 0.05
    assert run.summary.weights_sha256 == alone.summary.weights_sha256


def test_local_steps_take_the_rate_of_the_optimizer(tmp_path: Path) -> None:
    """Its default, where the job sets none. Without one look at the servers the worker must be where they are."""
    training = {"batch_size": 12, "steps": 200}
    sections = {**EXACT, "optimizer": {"use": "torch.optim:SGD"}, "training": training}  # 0.001, says torch
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=with_servers(1, staleness="unbounded", pull_every=200), **sections)
    assert {event["lr"] for event in events(run, "step")} == {event["lr"] for event in events(alone, "step")} == {1e-3}
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"weight_decay": 0.1}, {"optimizer": {"use": "sgd", "lr": 0.05, "weight_decay": 0.1}}),
        ({"clip_norm": 0.1}, {"training": {**EXACT["training"], "clip_norm": 0.1}}),
        ({"clip_norm": 0.1, "staleness": 1}, {"training": {**EXACT["training"], "clip_norm": 0.1}}),
    ],
)
def test_what_servers_do_is_what_the_optimizer_does(
    tmp_path: Path, settings: dict[str, Any], same: dict[str, Any]
) -> None:
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **{**EXACT, **same})
    plain = go(tmp_path / "plain", strategy={"name": "single"}, **EXACT)
    run = go(tmp_path / "run", strategy=with_servers(1, servers=2, **settings), **EXACT)
    assert largest_difference(run, alone) <= 1e-5 < 1e-3 < largest_difference(run, plain)


@pytest.mark.long
def test_the_rate_follows_the_number_of_workers_of_the_job(tmp_path: Path) -> None:
    scaled, twice = ({**EXACT["training"], "lr_scale": scale} for scale in ("linear", "none"))
    run = go(tmp_path / "scaled", strategy=with_servers(2), **{**EXACT, "training": scaled})
    optimizer = {"use": "sgd", "lr": 2 * EXACT["optimizer"]["lr"]}
    other = go(tmp_path / "twice", strategy=with_servers(2), **{**EXACT, "training": twice, "optimizer": optimizer})
    assert run.summary.weights_sha256 == other.summary.weights_sha256
    assert [event["lr"] for event in events(run, "step")] == [event["lr"] for event in events(other, "step")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_settings_that_approximate_change_the_outcome(tmp_path: Path) -> None:
    """With one worker all else is exact, so that a difference is the setting's. Adam shows local steps of SGD."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp16": {"compression": "fp16"},
        "int8": {"compression": "int8"},
        "a tenth": {"compression": "topk", "topk": 0.1},
        "a half": {"compression": "topk", "topk": 0.5},
        "free": {"staleness": 1},
        "local": {"staleness": 1, "pull_every": 4},
        "together": {"staleness": 1, "push_every": 4},
    }
    runs: dict[str, Run] = {}
    for name, settings in cases.items():
        optimizer = {"use": "adam", "lr": 0.01}
        runs[name] = go(tmp_path / name, strategy=with_servers(1, **settings), **{**EXACT, "optimizer": optimizer})
    hashes = {name: run.summary.weights_sha256 for name, run in runs.items()}
    assert hashes.pop("free") == hashes["plain"], "one worker alone is never late"
    assert len(set(hashes.values())) == len(hashes)
    assert largest_difference(runs["fp16"], runs["plain"]) < 0.01


def test_processes_read_what_a_worker_is_handed_out(tmp_path: Path) -> None:
    runs = []
    for processes in (0, 2):
        file = tmp_path / f"readers-{processes}"
        data = {"use": "odd_data:recording", "file": str(file), "processes": processes}
        sections = {**EXACT, "data": data, "python_path": [HERE]}
        runs.append(go(tmp_path / f"run-{processes}", strategy=with_servers(2), **sections))
        readers = file.read_text().split()
        num_steps = EXACT["training"]["steps"]
        if processes:  # what is read before the first step is read without them
            assert readers.count("0") == readers.count("1") == num_steps * 12 // 2
        else:
            assert set(readers) == {"-1"}
    assert runs[0].summary.weights_sha256 == runs[1].summary.weights_sha256


def test_prefetching_is_refused_where_there_is_no_next_batch(tmp_path: Path) -> None:
    sections = {**EXACT, "data": {**EXACT["data"], "prefetch": 5}}
    with pytest.raises(JobError, match=r"data.prefetch = 5 .* with strategy.push_every = 1 there is no next one"):
        go(tmp_path / "refused", strategy=with_servers(1), **sections)
    run = go(tmp_path / "run", strategy=with_servers(1, staleness=1, push_every=4), **sections)
    assert run.summary.steps == 18
