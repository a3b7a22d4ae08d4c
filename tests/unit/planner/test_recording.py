"""Which time of a run is counted, and what is kept of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cordee
from cordee.cluster import Team
from cordee.monitoring import AnyEvent, Summary, events
from cordee.monitoring.timeline import Phase, Timeline, TimelineFolder
from cordee.planner.history import PastRuns
from cordee.planner.measurements import keep, read_kept
from cordee.planner.recording import (
    Look,
    StepTimer,
    forget_runs,
    history_key,
    is_calm,
    look_around,
    phase_shares,
    read_runs,
    record_run,
)
from cordee.training.components import Components, assemble


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))


def parts(workers: int = 1, strategy: str = "single", **sections: Any) -> Components:
    table: dict[str, Any] = {
        "model": {"use": "mlp", "hidden": [8]},
        "data": "digits",
        "training": {"batch_size": 32, "threads": 1, "steps": 4},
        "strategy": {"name": strategy, "workers": workers},
        **sections,
    }
    return assemble(cordee.Job.from_dict(table), Team(num_workers=workers))


class FakeMachine:
    """Has two cores, of which this run uses 30 % and others a share."""

    def __init__(self, others: float) -> None:
        self.now_s, self._others = 0.0, others

    def clock(self) -> float:
        return self.now_s

    def look(self) -> Look:
        return Look(self.now_s, 2 * self.now_s * (0.3 + self._others), 2 * self.now_s * 0.3)


def timed(speeds: list[float], *disturbing: AnyEvent, others: float = 0.0) -> StepTimer:
    """Return a timer that has seen step events, ten steps and eleven seconds apart."""
    machine = FakeMachine(others)
    timer = StepTimer(machine.look, machine.clock, num_cores=2)
    for event in disturbing:
        timer.emit(event)
    for number, speed in enumerate(speeds):
        machine.now_s += 11.0
        timer.emit(events.Step(step=1 + 10 * number, samples_per_second=speed))
    return timer


def test_others_that_use_the_cores() -> None:
    def after(own_s: float, used_s: float) -> bool:
        return is_calm(Look(0.0, 0.0, 0.0), Look(1.0, used_s, own_s), num_cores=2)

    assert after(2.0, 2.0) and after(1.0, 1.15)
    assert not after(1.0, 1.5)
    assert not is_calm(Look(1.0, 0.0, 0.0), Look(1.0, 0.0, 0.0), num_cores=2)


def test_this_process_is_its_own() -> None:
    before = look_around()
    deadline = time.process_time() + 0.05
    while time.process_time() < deadline:
        pass
    after = look_around()
    assert after.own_s >= before.own_s + 0.03 and after.used_s >= before.used_s and after.at_s > before.at_s


def test_the_median_of_windows_counts_without_the_first() -> None:
    timer = timed([1.0, 5.0, 999.0, 100.0, 100.0, 50.0, 100.0])
    assert timer.result(batch_size=200) == (2.0, 40)


def test_too_few_windows_say_nothing() -> None:
    assert timed([100.0] * 5).result(32) is None
    assert timed([]).result(32) is None


def test_time_beside_other_programs_does_not_count() -> None:
    assert timed([100.0] * 20, others=0.0).result(100) == (1.0, 170)
    assert timed([100.0] * 20, others=0.2).result(100) is None


@pytest.mark.parametrize(
    "event",
    [
        events.WorkerLost(worker=1, step=3, reason="was killed"),
        events.Recovery(lost=[1], seconds=1.0),
        events.Scale(workers=3, before=2, step=5),
        events.Straggler(worker=1, step=3, seconds=1.0, median_seconds=0.1),
        events.Fault(fault="freeze", target="worker 1"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_run_that_was_disturbed_does_not_count(event: AnyEvent) -> None:
    assert timed([100.0] * 9, event).result(100) is None


def test_a_team_that_was_formed_again_does_not_count() -> None:
    first, second = (events.Generation(generation=n, members=[0, 1]) for n in (1, 2))
    assert timed([100.0] * 9, first).result(100) is not None
    assert timed([100.0] * 9, first, second).result(100) is None


def test_a_run_is_kept_and_read_for_the_same_job_only(tmp_path: Path) -> None:
    timer, done = timed([100.0] * 9), Summary(status="completed", peak_memory_bytes=1000)
    record_run(parts(), timer, tmp_path, done)
    (way,) = read_runs(parts()).ways
    assert (way.strategy, way.workers, way.settings) == ("single", 1, {})
    assert [(run.step_s, run.steps, run.peak_bytes) for run in way.runs] == [(0.32, 60, 1000)]
    # How often it saves, evaluates or for how long it trains does not change its steps.
    longer = parts(training={"batch_size": 32, "threads": 1, "epochs": 3}, seed=5, evaluation={"every_epochs": 0})
    assert read_runs(longer) == read_runs(parts())
    # The same job on two workers: another way of the same job.
    record_run(parts(2, "data_parallel"), timer, tmp_path, done)
    assert [(way.strategy, way.workers) for way in read_runs(parts()).ways] == [("single", 1), ("data_parallel", 2)]
    forget_runs(parts())
    assert read_runs(parts()) == PastRuns()


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"batch_size": 64, "threads": 1}},
        {"training": {"batch_size": 32, "threads": 2}},
        {"training": {"batch_size": 32, "threads": 1, "precision": "bf16"}},
        {"training": {"batch_size": 32, "threads": 1, "reproducible": True}},
        {"training": {"batch_size": 32, "threads": 1, "ema": 0.9}},
        {"training": {"batch_size": 32, "threads": 1, "accumulate": 2}},
        {"training": {"batch_size": 32, "threads": 1, "memory_format": "channels_last"}},
        {"model": {"use": "mlp", "hidden": [9]}},
        {"optimizer": {"use": "sgd", "lr": 0.1}},
        {"data": {"use": "digits", "processes": 1}},
    ],
    ids=str,
)
def test_whatever_changes_the_time_is_another_job(sections: dict[str, Any]) -> None:
    assert history_key(parts(**sections)) != history_key(parts())


def test_another_machine_or_version_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    before = history_key(parts())
    monkeypatch.setattr("cordee.planner.profiling.describe_machine", lambda: "another")
    assert history_key(parts()) != before


def test_code_that_was_changed_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "changed_net.py"
    monkeypatch.syspath_prepend(tmp_path)
    source = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(64, 10)\n"
    file.write_text(source)
    own = {"model": {"use": "changed_net:Net"}, "python_path": [str(tmp_path)]}
    flat = {"data": {"use": "synthetic", "shape": [64], "num_classes": 10, "size": 64, "test_size": 8}}
    before = history_key(parts(**own, **flat))
    file.write_text(source + "    def forward(self, x):\n        return super().forward(x) * 2\n")
    assert history_key(parts(**own, **flat)) != before


def test_what_is_defined_in_this_process_only_is_not_kept(tmp_path: Path) -> None:
    from torch import nn

    job = cordee.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),  # type: ignore[arg-type]
        data="digits",  # type: ignore[arg-type]
        training={"batch_size": 32, "threads": 1},  # type: ignore[arg-type]
        strategy={"name": "single"},  # type: ignore[arg-type]
    )
    live = assemble(job, Team())
    assert history_key(live) is None and read_runs(live) == PastRuns()
    record_run(live, timed([100.0] * 9), tmp_path, Summary(status="completed"))
    assert not (tmp_path / "cache" / "runs").exists()


@pytest.mark.parametrize("changes", [{"status": "failed"}, {"recoveries": 1}], ids=str)
def test_runs_that_failed_or_lost_somebody_are_not_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    done = msgspec.structs.replace(Summary(status="completed"), **changes)
    record_run(parts(), timed([100.0] * 9), tmp_path, done)
    assert read_runs(parts()) == PastRuns()


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    key = history_key(parts())
    assert key is not None
    keep("runs", key, PastRuns())
    (file,) = (tmp_path / "cache" / "runs").iterdir()
    for damaged in (b"", b"{", b'{"ways": [{"strategy": "single"}]}', b"\xff\xfe", b'{"ways": 3}'):
        file.write_bytes(damaged)
        assert read_kept("runs", key, PastRuns) is None and read_runs(parts()) == PastRuns()


def test_shares_of_phases_are_read_from_the_timelines(tmp_path: Path) -> None:
    assert phase_shares(tmp_path) == (0.0, 0.0, 0.0)
    folder = TimelineFolder(tmp_path)
    timeline = Timeline("worker-0", lambda line: folder.write("worker-0", line))
    timeline.enter("training")
    timeline.switch(Phase.COMPUTE)
    time.sleep(0.02)
    timeline.end_step(1)
    timeline.close()
    compute, exchange, wait = phase_shares(tmp_path)
    assert compute > 0.9 and compute + exchange + wait == pytest.approx(1.0)
