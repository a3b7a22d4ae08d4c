"""Each setting of `parameter_server` changes what it says it changes, in real processes and against `single`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_parameter_server import events, go, largest_difference, served, weights

pytestmark = pytest.mark.timeout(150)

# Five batches an epoch. With one worker, plain SGD and one rate, the sum of the gradients of local steps moves the
# servers' parameters to where the local steps took the worker's: what `single` computes, but for rounding.
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
    local_steps = served(1, staleness=1, push_every=4)
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **EXACT)
    strategy = {"name": "single"} if first == "single" else local_steps
    go(tmp_path / "run", strategy=strategy, stop={"steps": 7}, **EXACT)
    run = go(tmp_path / "run", strategy=local_steps, resume=True, **EXACT)
    assert (run.summary.status, run.summary.steps, run.summary.samples) == ("completed", 18, 216)
    assert largest_difference(run, alone) <= 1e-5
    reported = [event["step"] for event in events(run, "step") if event["step"] > 7]
    assert reported == [9, 10, 14, 15, 18]


def test_the_schedule_follows_the_steps_that_were_taken(tmp_path: Path) -> None:
    sections = {**EXACT, "schedule": {"use": "cosine", "warmup_steps": 3}}
    alone = go(tmp_path / "alone", strategy={"name": "single"}, **sections)
    run = go(tmp_path / "run", strategy=served(2, staleness=1, push_every=4), **sections)
    rates = {event["step"] - 1: event["lr"] for event in events(alone, "step")}
    before = [0, 4, 5, 9, 10, 14, 15]  # steps taken before each exchange
    assert [event["lr"] for event in events(run, "step")] == pytest.approx([rates[step] for step in before])
    assert run.summary.steps == alone.summary.steps == 18
    assert weights(run).keys() == weights(alone).keys()
