"""What `auto` becomes: from what the cache knows, and never at the cost of a slow start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import cordee
from cordee.cluster import Team
from cordee.planner.auto import Decision, decide, plans_first, predict_as
from cordee.planner.measurements import Exchange, Machine, keep
from cordee.planner.planning import machine_key
from cordee.planner.profiling import assemble_alone, profile_key, take_profile
from cordee.training.components import Components, assemble

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send", "copy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))
    monkeypatch.setattr("cordee.planner.auto.is_busy", lambda: False)  # whatever else this machine does


def job(workers: int = 2, **strategy: object) -> cordee.Job:
    return cordee.Job(
        model={"use": "mlp", "hidden": [64]},  # type: ignore[arg-type]
        data="digits",  # type: ignore[arg-type]
        training={"batch_size": 32, "threads": 1, "steps": 4},  # type: ignore[arg-type]
        strategy={"workers": workers, **strategy},  # type: ignore[arg-type]
    )


def of_the_rule(asked: cordee.Job) -> Components:
    name = "single" if asked.strategy.workers == 1 else "data_parallel"
    plain = msgspec.structs.replace(asked, strategy=msgspec.structs.replace(asked.strategy, name=name))
    return assemble(plain, Team(num_workers=asked.strategy.workers))


def decided(asked: cordee.Job) -> Decision:
    return decide(asked, of_the_rule(asked))


def know_the_machine(**seconds: float) -> None:
    """Make 2 workers exchange anything in a microsecond, but for the kinds given."""
    exchanges = tuple(
        Exchange(kind=kind, num_processes=2, sizes=(1, 1 << 30), seconds=(seconds.get(kind, 1e-6),) * 2)
        for kind in KINDS
    )
    keep("machines", machine_key(), Machine(cores=2, exchanges=exchanges, slowdowns={2: 1.0}))


def test_with_an_empty_cache_the_plain_rule_decides_and_says_so() -> None:
    alone, two = decided(job(1)), decided(job(2))
    assert (alone.job.strategy.name, two.job.strategy.name) == ("single", "data_parallel")
    assert alone.prediction is None and two.prediction is None
    assert "cordee plan" in two.reason
    assert not plans_first(job(2))


def test_a_small_model_is_profiled_on_the_spot_once_the_machine_is_known() -> None:
    know_the_machine()
    assert plans_first(job(2)) and not plans_first(job(2, name="data_parallel"))
    found = decided(job(2))
    assert found.prediction is not None and found.prediction.step_s > 0
    # Kept: what follows predicts without measuring, whatever the strategy.
    assert decided(job(2, name="data_parallel")).prediction is not None
    assert decided(job(1)).prediction is not None


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "data_parallel"},
        {"name": "sharded"},
        {"name": "tensor"},
        {"name": "parameter_server", "servers": 1},
        {"name": "pipeline"},
        {"name": "pipeline", "schedule": "gpipe", "microbatches": 2},
        {"name": "hybrid", "mesh": {"data": 1, "pipeline": 2}},
    ],
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_every_strategy_that_is_asked_for_by_name_is_predicted(strategy: dict[str, object]) -> None:
    know_the_machine()
    decided(job(2))  # profiles the model
    asked = job(2, **strategy)
    found = predict_as(asked, of_the_rule(job(2)))
    assert found is not None and found.step_s > 0 and found.strategy == strategy["name"]


def test_a_schedule_that_the_model_has_too_few_blocks_for_is_not_predicted() -> None:
    know_the_machine()
    decided(job(2))
    asked = job(2, name="pipeline", schedule="interleaved")  # four chunks of one block each
    assert predict_as(asked, of_the_rule(job(2))) is not None
    shallow = {"model": cordee.Use("mlp", hidden=[])}
    few = msgspec.structs.replace(job(2), **shallow)
    decided(few)
    assert predict_as(msgspec.structs.replace(asked, **shallow), of_the_rule(few)) is None


def test_the_faster_strategy_is_taken_and_the_reason_names_both() -> None:
    know_the_machine(all_reduce=5.0)
    found = decided(job(2))
    assert found.job.strategy.name not in ("single", "data_parallel")
    assert found.prediction is not None and found.prediction.strategy == found.job.strategy.name
    assert "data_parallel would take 5" in found.reason
    assemble(found.job, Team(num_workers=2))  # it runs as it is


def test_a_profile_of_a_busy_machine_is_marked_and_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    know_the_machine(all_reduce=5.0)
    monkeypatch.setattr("cordee.planner.auto.is_busy", lambda: True)
    found = decided(job(2))
    assert found.job.strategy.name == "data_parallel" and not found.is_sure
    assert "other programs were using the machine" in found.reason


def test_a_setting_that_only_one_strategy_has_decides() -> None:
    know_the_machine(all_reduce=5.0)
    found = decided(job(2, compression="fp16"))
    assert found.job.strategy.name == "data_parallel"
    assert found.job.strategy.settings == {"compression": "fp16"}


def test_what_does_not_run_on_this_optimizer_is_passed_over() -> None:
    know_the_machine(all_reduce=5.0)
    asked = msgspec.structs.replace(job(2), optimizer=cordee.Use("adafactor", lr=0.001))
    assert decided(asked).job.strategy.name != "sharded"  # a pipeline has whole parameters, if not all of them


def test_one_worker_is_predicted_from_the_cache_alone() -> None:
    parts = assemble_alone(job(1))
    profile = take_profile(parts, budget_s=0.05)
    keep("profiles", profile_key(parts), profile)
    found = decided(job(1))
    assert found.prediction is not None
    assert found.prediction.step_s == pytest.approx(profile.step(32).step_s)
