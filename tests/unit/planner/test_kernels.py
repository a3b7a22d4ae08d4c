"""Which kernels a run gets: decided from measurements, measured where that is cheap, kept by a resumed run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cordee
from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.settings import Training
from cordee.monitoring import read_events
from cordee.planner import kernels as planner_kernels
from cordee.planner.kernels import Choice, Kernels, Measured, Trial, choose_kernels, decide, is_settled, measure
from cordee.planner.measurements import keep, read_kept
from cordee.training.components import Components, assemble

PLAIN = Kernels()
LAST = Kernels(memory_format="channels_last")
HALF = Kernels(precision="bf16")
LAST_HALF = Kernels(memory_format="channels_last", precision="bf16")


class Net(nn.Sequential):
    """A convolution, and what follows it in the memory format that it gives."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


class Viewing(nn.Module):
    """Takes the memory of what a convolution gives for contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).view(len(x), -1))
        return out


class Noisy(nn.Sequential):
    """Draws its noise in the order of memory: another format gets other noise."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 10))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measurable(monkeypatch: pytest.MonkeyPatch) -> list[list[Kernels]]:
    """Have channels-last measured as twice as fast as plain, and bf16 as half; return what was asked for."""
    asked: list[list[Kernels]] = []

    def take(parts: Components, wanted: Any, **options: Any) -> list[Trial]:
        asked.append(list(wanted))
        return [Trial(kernels=way, gain=_gain(way)) for way in wanted]

    monkeypatch.setattr(planner_kernels, "measure", take)
    monkeypatch.setattr(planner_kernels, "is_busy", lambda: False)
    return asked


def _gain(way: Kernels) -> float:
    return (2.0 if way.memory_format == "channels_last" else 1.0) * (0.5 if way.precision == "bf16" else 1.0)


def job(model: str = "Net", **training: Any) -> dict[str, Any]:
    return {
        "model": {"use": f"{__file__}:{model}"} if model[0].isupper() else {"use": model},
        "data": {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 10, "size": 16, "test_size": 4},
        "optimizer": {"use": "sgd", "lr": 0.01},
        "training": {"batch_size": 8, "steps": 3, "threads": 1, **training},
        "evaluation": {"every_epochs": 0},
    }


def choice(table: dict[str, Any], **options: Any) -> Choice:
    asked = Job.from_dict(table)
    return choose_kernels(asked.training, assemble(asked, Team()), **options)


def measured(**gains: float) -> Measured:
    ways = {"plain": PLAIN, "last": LAST, "half": HALF, "last_half": LAST_HALF}
    return Measured(trials=tuple(Trial(kernels=ways[name], gain=gain) for name, gain in gains.items()))


def test_the_fastest_way_is_taken() -> None:
    found = decide(Training(), Training().plain(), [PLAIN, LAST], measured(plain=1.0, last=1.27))
    assert found.training.memory_format == "channels_last"
    assert found.text == "channels-last, 1.27× of plain (measured)"


def test_what_is_hardly_faster_is_not_taken() -> None:
    found = decide(Training(), Training().plain(), [PLAIN, LAST], measured(plain=1.0, last=1.02))
    assert found.training.memory_format == "contiguous"
    assert found.text == "plain (channels-last 1.02×; measured)"


def test_what_a_busy_machine_measured_needs_a_larger_gain() -> None:
    for gain, taken in ((1.1, PLAIN), (1.2, LAST)):
        trials = (Trial(kernels=PLAIN, gain=1.0), Trial(kernels=LAST, gain=gain))
        found = decide(Training(), Training().plain(), [PLAIN, LAST], Measured(trials=trials, was_busy=True))
        assert found.training.memory_format == taken.memory_format


def test_what_failed_is_not_taken_and_said() -> None:
    trials = (Trial(kernels=PLAIN, gain=1.0), Trial(kernels=LAST, problem="RuntimeError: no"))
    found = decide(Training(), Training().plain(), [PLAIN, LAST], Measured(trials=trials))
    assert found.training.memory_format == "contiguous"
    assert "channels-last is left out: RuntimeError: no" in found.text


def test_bf16_is_only_taken_where_the_precision_allows_it() -> None:
    gains = measured(plain=1.0, last=1.3, half=1.1, last_half=1.9)
    asked = Training(precision="auto")
    found = decide(asked, asked.plain(), [PLAIN, HALF, LAST, LAST_HALF], gains)
    assert (found.training.precision, found.training.memory_format) == ("bf16", "channels_last")
    found = decide(Training(), Training().plain(), [PLAIN, LAST], gains)
    assert (found.training.precision, found.training.memory_format) == ("fp32", "channels_last")


def test_bf16_that_is_slower_is_kept_and_said() -> None:
    asked = Training(precision="bf16")
    gains = measured(plain=1.0, last=1.2, half=0.4, last_half=0.6)
    found = decide(asked, asked.plain(), [HALF, LAST_HALF], gains)
    assert (found.training.precision, found.training.memory_format) == ("bf16", "channels_last")
    assert "'bf16' is slower here than 'fp32': 0.50×" in found.warning


def test_a_short_run_measures_nothing(measurable: list[list[Kernels]]) -> None:
    assert choice(job()) == Choice(Training(batch_size=8, steps=3, threads=1).plain())
    assert not measurable


def test_a_short_run_takes_what_the_cache_knows(measurable: list[list[Kernels]]) -> None:
    assert choice(job(steps=2000)).training.memory_format == "channels_last"
    assert choice(job()).training.memory_format == "channels_last"
    assert measurable == [[PLAIN, LAST]]


@pytest.mark.parametrize(
    "table",
    [
        {**job("mlp", steps=2000)},
        {**job(steps=2000, memory_format="contiguous")},
        {**job(steps=2000, reproducible=True)},
        {**job(steps=2000), "stop": {"steps": 10}},
        {**job(steps=2000), "stop": {"time": "1ms"}},
    ],
    ids=["no convolution", "set", "reproducible", "stopped early", "stopped soon"],
)
def test_nothing_is_measured_where_there_is_no_choice(table: dict[str, Any], measurable: list[list[Kernels]]) -> None:
    found = choice(table)
    assert found.training.memory_format == "contiguous" and not found.text
    assert not measurable


def test_the_number_of_workers_does_not_matter(measurable: list[list[Kernels]]) -> None:
    choice(job(steps=2000))
    two = Job.from_dict({**job(), "strategy": {"name": "data_parallel", "workers": 2}})
    found = choose_kernels(two.training, assemble(two, Team(num_workers=2, num_local_workers=2)))
    assert found.training.memory_format == "channels_last"


def test_a_plan_shows_what_each_way_would_bring(measurable: list[list[Kernels]]) -> None:
    found = cordee.plan(job(), workers=1, budget_s=0.05)
    assert found.kernels == "channels-last, 2.00× of plain (measured)"
    lines = found.explain()
    assert any("bf16 0.50×" in line for line in lines), lines


def test_a_plan_of_a_model_without_convolutions_shows_bf16(measurable: list[list[Kernels]]) -> None:
    found = cordee.plan(job("mlp"), workers=1, budget_s=0.05)
    assert measurable == [[PLAIN, HALF]] and found.kernels == "plain"
    assert "measured against plain kernels: bf16 0.50×" in found.explain()


def test_fewer_threads_are_taken_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_kernels, "usable_cores", lambda: 4)
    monkeypatch.setattr(
        planner_kernels,
        "measure",
        lambda parts, wanted: [Trial(kernels=way, gain=1.5 if way.threads == 2 else 1.0) for way in wanted],
    )
    table = {**job("mlp", steps=2000, threads="auto")}
    found = choice(table)
    assert found.training.threads == 2
    assert found.text == "2 threads, 1.50× of plain (measured)"
    assert choice(job("mlp", threads="auto")).training.threads == 2  # a short run: by the cache


def test_measuring_leaves_the_threads_as_they_were() -> None:
    parts = assemble(Job.from_dict(job("mlp", threads=2)), Team())
    assert torch.get_num_threads() == 2
    one = measure(parts, [PLAIN, Kernels(threads=1)], budget_s=0.01)[1]
    assert one.gain > 0 and torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_measuring_compares_with_the_plain_way() -> None:
    parts = assemble(Job.from_dict(job()), Team())
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    trials = {trial.kernels: trial for trial in measure(parts, [PLAIN, LAST, HALF], budget_s=0.01)}
    assert trials[PLAIN].gain == 1.0 and not any(trial.problem for trial in trials.values()), trials
    assert all(trial.gain > 0 for trial in trials.values())
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())


@pytest.mark.parametrize(("model", "problem"), [("Viewing", "view size is not compatible"), ("Noisy", "more than rou")])
def test_a_way_that_fails_or_changes_results_is_a_problem(model: str, problem: str) -> None:
    parts = assemble(Job.from_dict(job(model)), Team())
    plain, last = measure(parts, [PLAIN, LAST], budget_s=0.01)
    assert not plain.problem and problem in last.problem


def test_what_the_cache_says_of_another_version_of_the_model_is_tried(measurable: list[list[Kernels]]) -> None:
    """A model that was changed since: its layers are the same, and it does not go with the format any more."""
    parts = assemble(Job.from_dict(job("Viewing", steps=2000)), Team())
    found = choose_kernels(Training(threads=1), parts)
    assert found.training.memory_format == "contiguous"
    assert "view size is not compatible" in found.text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (job(memory_format="channels-last"), "training.memory_format = 'channels-last'.*channels_last"),
        (job(threads="all"), "training.threads = 'all'"),
        (job(precision="bfloat16"), "training.precision = 'bfloat16'"),
        (job("Viewing", memory_format="channels_last"), "does not go with the model .*reshape"),
        (
            {**job("mlp", memory_format="channels_last"), "data": {"use": "iris"}},
            "memory_format = 'channels_last' is for images",
        ),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        assemble(Job.from_dict(table), Team())


def test_a_run_records_its_choice_and_a_resumed_one_keeps_it(tmp_path: Path, measurable: list[list[Kernels]]) -> None:
    run_dir = tmp_path / "run"
    table = job(steps=2000)
    run = cordee.train({**table, "stop": {"steps": 3}}, run_dir=run_dir, quiet=True)
    assert run.status == "stopped" and not measurable  # too short
    recorded = tomllib.loads((run_dir / "job.toml").read_text())["training"]
    assert recorded["memory_format"] == "contiguous"
    choice(table)  # now the cache knows that channels-last is faster
    cordee.train({**table, "stop": {"steps": 5}}, run_dir=run_dir, resume=True, quiet=True)
    assert tomllib.loads((run_dir / "job.toml").read_text())["training"]["memory_format"] == "contiguous"
    with pytest.raises(JobError, match="memory_format was 'contiguous', is 'channels_last'"):
        changed = {**table, "training": {**table["training"], "memory_format": "channels_last"}}
        cordee.train(changed, run_dir=run_dir, resume=True, quiet=True)


def test_a_run_says_what_it_computes_with(tmp_path: Path, measurable: list[list[Kernels]]) -> None:
    choice(job(steps=2000))
    run = cordee.train(job(), run_dir=tmp_path / "run", quiet=True)
    (said,) = [event for event in read_events(run.directory / "events.jsonl") if event["type"] == "kernels"]
    assert said["memory_format"] == "channels_last"
    assert said["reason"] == "channels-last, 2.00× of plain (measured)"
    assert tomllib.loads((run.directory / "job.toml").read_text())["training"]["memory_format"] == "channels_last"


def test_measurements_are_kept_and_read_again() -> None:
    found = measured(plain=1.0, last=1.25)
    keep("kernels", "a", found)
    assert read_kept("kernels", "a", Measured) == found


def test_rounds_end_when_more_of_them_would_change_nothing() -> None:
    steady = [1.0, 1.001, 0.999, 1.0, 1.002]
    assert is_settled([steady, [0.5 * each for each in steady]])
    assert is_settled([[1.0, 2.0, 4.0, 1.0, 3.0], [0.5, 1.0, 2.0, 0.5, 1.5]])  # the machine drifts, and the ratio stays
    assert not is_settled([steady, [0.5, 0.6, 0.4, 0.55, 0.45]])
    assert not is_settled([steady[:4], steady[:4]]) and not is_settled([])
