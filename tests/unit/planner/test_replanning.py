"""A team of another size: what a run says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_auto import job, know_the_machine, of_the_rule

from cordee.monitoring import AnyEvent
from cordee.monitoring.events import Generation, Plan, Warned
from cordee.planner.auto import Replanner
from cordee.planner.measurements import keep
from cordee.planner.profiling import assemble_alone, profile_key, take_profile


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))


def hear(replanner: Replanner, *sizes: int) -> None:
    for number, size in enumerate(sizes, start=1):
        replanner.emit(Generation(generation=number, members=list(range(size))))


def test_every_new_size_is_planned_once() -> None:
    parts = assemble_alone(job(1))
    keep("profiles", profile_key(parts), take_profile(parts, budget_s=0.05))
    know_the_machine(all_reduce=5.0)
    heard: list[AnyEvent] = []
    replanner = Replanner(job(3), of_the_rule(job(3)), heard.append)
    hear(replanner, 3, 3)
    assert not heard  # as it was planned before the run
    hear(replanner, 2, 2, 1)
    two, proposal, one = heard
    assert isinstance(two, Plan) and isinstance(proposal, Warned) and isinstance(one, Plan)
    assert (two.workers, two.strategy) == (2, "data_parallel")
    assert two.predicted_step_seconds and two.best_step_seconds
    assert two.predicted_step_seconds > 5.0 > two.best_step_seconds > 0
    assert proposal.message.startswith(f"with 2 workers {two.best}")
    assert proposal.message.endswith(f"continue with --resume --workers 2 --strategy {two.best}")
    assert (one.workers, one.best) == (1, "single")
    assert one.predicted_step_seconds == pytest.approx(one.best_step_seconds)


def test_what_is_not_known_is_said() -> None:
    heard: list[AnyEvent] = []
    hear(Replanner(job(2), of_the_rule(job(2)), heard.append), 3)
    (plan,) = heard
    assert isinstance(plan, Plan) and plan.predicted_step_seconds is None and "cordee plan" in plan.reason
