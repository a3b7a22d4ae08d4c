"""The generator and the shrinking, without a run."""

from __future__ import annotations

import json

from cordee.core import Job
from differences.comparing import expect
from differences.generator import DATA, ODD_BLOCKS, OPTIMIZERS, PLAIN, Table, draw_trials, job_table, reference, simpler
from differences.shrinking import shrink

MANY = range(400)


def test_a_seed_always_gives_the_same_trials() -> None:
    assert draw_trials(7) == draw_trials(7)
    assert draw_trials(7) != draw_trials(8)


def test_all_trials_are_jobs() -> None:
    for seed in MANY:
        for trial in draw_trials(seed):
            assert set(trial) == set(PLAIN)
            Job.from_dict(job_table(trial))
            Job.from_dict(job_table(reference(trial)))
            json.dumps(trial)  # a report repeats it from its text


def test_every_choice_is_drawn_some_time() -> None:
    trials = [trial for seed in MANY for trial in draw_trials(seed)]
    assert {trial["data"] for trial in trials} == set(DATA)
    assert set(ODD_BLOCKS) <= {block for trial in trials for block in trial["blocks"]}
    assert {json.dumps(optimizer) for optimizer in OPTIMIZERS} <= {json.dumps(t["optimizer"]) for t in trials}
    names = {trial["strategy"]["name"] for trial in trials}
    assert names == {"data_parallel", "parameter_server", "sharded", "pipeline", "tensor", "hybrid", "local_sgd"}
    assert {trial["strategy"]["workers"] for trial in trials} == {1, 2, 3, 4}
    # A comparison of counts alone proves less: most trials compare weights, and many bit for bit.
    straight = [trial["strategy"] for trial in trials if trial["model"] == "straight"]
    tolerances = [expect(trial).tolerance for trial in trials if trial["model"] != "straight"]
    assert sum(tolerance is not None for tolerance in tolerances) > 0.6 * len(tolerances)
    assert sum(tolerance == 0.0 for tolerance in tolerances) > 0.2 * len(tolerances)
    assert any("compression" in one and one["push_every"] > 1 for one in straight if "push_every" in one)
    assert any("compress" in one and one.get("workers_per_group", 1) > 1 for one in straight)


def test_shrinking_ends_at_the_cause() -> None:
    trial = next(t for seed in MANY for t in draw_trials(seed) if "tied" in t["blocks"] and t["before"] is not None)

    def fails(choices: Table) -> bool:
        return "tied" in choices["blocks"]

    smallest = shrink(trial, fails, most_tries=1000)
    assert smallest["blocks"] == ["tied"]
    assert {key for key in smallest if smallest[key] != PLAIN[key]} <= {"blocks", "steps", "strategy"}


def test_simpler_trials_are_jobs() -> None:
    for seed in range(20):
        for trial in draw_trials(seed):
            for candidate in simpler(trial):
                Job.from_dict(job_table(candidate))
