"""Random federated jobs come to what plain rounds come to, and to the same bits on any number of workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from cordee.core import Job
from differences.comparing import is_clear
from differences.federated import draw_federated, federated_table, judge_federated, report, run_job, smallest
from differences.generator import PLAIN
from differences.running import Runner

FIXED_SEEDS = range(1000, 1010)
MINUTES = float(os.environ.get("CORDEE_DIFFERENCE_MINUTES", "60")) / 6
FIRST_SEED = int(os.environ.get("CORDEE_DIFFERENCE_SEED", "0")) or time.time_ns() // 1_000_000_000
ROUNDS: dict[str, Any] = {
    "steps": 0,
    "double": True,
    "evaluation": {"every_epochs": 1},
    "checkpoint": {"every_steps": 1, "keep": 9},
    "blocks": ["linear"],
}
PLAIN_ROUNDS: dict[str, Any] = {"name": "federated", "workers": 2, "rounds": 3, "partition": {"clients": 4}}
FOUND: dict[str, dict[str, Any]] = {
    # The picture of the partition took the labels of tokens for one class each, which ended the run.
    "tokens": {"data": "tokens", "blocks": ["embedding"], "ignored": 0.3},
    # A mask of infinities among the buffers was taken for a broken update.
    "buffers with infinities": {"blocks": ["buffers"]},
    # Decay moved parameters that nobody uses, where an algorithm corrects gradients.
    "unused parameters": {
        "blocks": ["unused"],
        "optimizer": {"use": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "strategy": {"algorithm": {"use": "fedprox", "mu": 0.3}},
    },
    "unused parameters and control variates": {
        "blocks": ["unused"],
        "optimizer": {"use": "sgd", "lr": 0.1, "weight_decay": 0.1},
        "strategy": {"algorithm": "scaffold"},
    },
    # A client that came back before the update was asked again from the same parameters: its difference counted twice,
    # and what it kept was that of whichever of the two was done last.
    "clients that come back soon": {
        "seed": 3,
        "strategy": {
            "algorithm": {"use": "fedbuff", "concurrency": 2},
            "clients_per_round": 3,
            "clock": {"stragglers": 0.5, "slowdown": 20.0},
            "compress": {"use": "topk", "share": 0.1},
        },
    },
    # What clients under way had been sent was not in the checkpoint.
    "clients under way": {
        "seed": 3,
        "resume_at": 2,
        "strategy": {
            "algorithm": "fedbuff",
            "rounds": 5,
            "clients_per_round": 2,
            "clock": {"stragglers": 0.5, "slowdown": 4.0},
        },
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_fixed_seeds(seed: int, tmp_path: Path) -> None:
    choices = draw_federated(seed)
    verdict, problems = judge_federated(choices, tmp_path)
    assert verdict != "different", report(seed, choices, problems)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FOUND)
def test_what_differed_once(name: str, tmp_path: Path) -> None:
    found = FOUND[name]
    choices = {**PLAIN, **ROUNDS, **found, "strategy": {**PLAIN_ROUNDS, **found.get("strategy", {})}}
    verdict, problems = judge_federated(choices, tmp_path)
    assert verdict == "same", report(0, choices, problems)


def test_all_trials_are_jobs_and_most_settings_are_drawn() -> None:
    trials = [draw_federated(seed) for seed in range(300)]
    for trial in trials:
        Job.from_dict(federated_table(trial))
    drawn = {key for trial in trials for key in trial["strategy"]}
    assert {
        "algorithm",
        "personal",
        "compress",
        "robust",
        "privacy",
        "max_norm",
        "most_samples",
        "client_test",
    } <= drawn
    assert any(trial["resume_at"] for trial in trials)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_processes_come_to_what_tasks_in_one_process_come_to(seed: int, runner: Runner, tmp_path: Path) -> None:
    choices = draw_federated(seed)
    table = federated_table(choices)
    outcome = runner.train_in_two(table, choices["resume_at"])
    if outcome.code != 0:
        assert is_clear(outcome), outcome.message
        assert judge_federated(choices, tmp_path)[0] in ("refused", "nobody counts"), outcome.message
        return
    ours = run_job({**choices, "resume_at": 0}, Job.from_dict(table), tmp_path, 1)
    summary, last = outcome.summary, ours.rounds[-1]
    assert summary["weights_sha256"] == ours.digest
    assert (summary["steps"], summary["epochs"]) == (len(ours.rounds), len(ours.rounds))
    assert summary["samples"] == ours.samples and not outcome.unsound
    assert summary["train_loss"] == (last["loss_sum"] / last["loss_count"] if last["loss_count"] else None)
    assert summary["test_loss"] == (last["metrics"]["loss"] if "metrics" in last else None)


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 600)
def test_fresh_seeds(tmp_path: Path) -> None:
    end_s, seed = time.monotonic() + 60 * MINUTES, FIRST_SEED
    print(f"the first seed is {seed}: CORDEE_DIFFERENCE_SEED={seed} repeats this")
    reports: list[str] = []
    while time.monotonic() < end_s and len(reports) < 5:
        choices, folder = draw_federated(seed), tmp_path / str(seed)
        verdict, problems = judge_federated(choices, folder)
        if verdict == "different":
            reports.append(report(seed, smallest(choices, folder / "smaller"), problems))
        seed += 1
    assert not reports, "\n\n".join(reports)
