"""Federated runs of real processes: the same bits on any number of workers, and whoever is killed. Losses are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from launching import run, started

pytestmark = pytest.mark.timeout(240)

Table = dict[str, Any]


def write_job(folder: Path, name: str, strategy: Table, **sections: Table) -> Path:
    table = {
        "name": name,
        "model": {"use": "mlp", "hidden": [16]},
        "data": {"use": "digits"},
        "optimizer": {"use": "sgd", "lr": 0.1},
        "training": {"batch_size": 16},
        "checkpoint": {"every_steps": 2},
        "strategy": {"name": "federated", "workers": 2, "rounds": 4, "partition": {"clients": 20}, **strategy},
        **sections,
    }
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def events(run_dir: Path, kind: str) -> list[Table]:
    with contextlib.suppress(FileNotFoundError):
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["type"] == kind]
    return []


def summary(run_dir: Path) -> Table:
    found: Table = json.loads((run_dir / "summary.json").read_text())
    return found


def train(folder: Path, name: str, strategy: Table, *arguments: str, **sections: Table) -> tuple[Table, list[Table]]:
    job = write_job(folder, name, strategy, **sections)
    ended = run("train", str(job), "--run-dir", str(folder / name), *arguments)
    assert ended.code == 0, ended.stdout + ended.stderr
    return summary(folder / name), events(folder / name, "round")


def refusal(folder: Path, strategy: Table, **sections: Table) -> str:
    job = write_job(folder, "refused", strategy, **sections)
    ended = run("train", str(job), "--run-dir", str(folder / "refused"), "--dry-run")
    assert ended.code == 2, ended.stdout
    return " ".join(ended.stderr.split())


# Everything that clients or the server keep: control variates, personal layers, residuals.
STATEFUL: Table = {
    "algorithm": "scaffold",
    "clients_per_round": 8,
    "personal": ["classifier.*"],
    "compress": {"use": "topk", "share": 0.2},
    "client_test": 0.2,
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 20, "min_samples": 3},
}


@pytest.mark.parametrize("strategy", [{}, STATEFUL], ids=["fedavg", "stateful"])
def test_the_number_of_workers_changes_no_bit(tmp_path: Path, strategy: Table) -> None:
    numbers = (1, 2) if strategy else (1, 4)
    results = [train(tmp_path, f"on-{n}", {**strategy, "workers": n}) for n in numbers]
    (one, rounds_of_one), (other, rounds_of_other) = results
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["test_loss"] == other["test_loss"]
    for a, b in zip(rounds_of_one, rounds_of_other, strict=True):
        assert {**a, "time": 0, "seconds": 0} == {**b, "time": 0, "seconds": 0}
    assert len(rounds_of_one) == one["steps"] == 4
    if strategy:
        assert rounds_of_one[-1]["worst_decile_accuracy"] <= rounds_of_one[-1]["client_accuracy"]
        assert len(rounds_of_one[0]["asked"]) == 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    found, _ = train(folder, "undisturbed", {**STATEFUL, "local_epochs": 20})
    return str(found["weights_sha256"])


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def in_mid_round(folder: Path) -> Iterator[tuple[Any, Path]]:
    """A run in whose second round some clients are done and others are not."""
    job = write_job(folder, "killed", {**STATEFUL, "local_epochs": 20})
    run_dir = folder / "killed"
    with started("train", str(job), "--run-dir", str(run_dir)) as command:
        wait_for(lambda: len(events(run_dir, "round")) >= 1)
        wait_for(lambda: bool(list((run_dir / "rounds").glob("leaf-1-*"))) or len(events(run_dir, "round")) > 1)
        yield command, run_dir


def test_a_worker_that_is_killed_costs_its_client_only(tmp_path: Path, undisturbed: str) -> None:
    with in_mid_round(tmp_path) as (command, run_dir):
        worker = events(run_dir, "worker_started")[0]
        os.kill(worker["pid"], signal.SIGKILL)
        ended = command.finish()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert events(run_dir, "worker_lost"), "it was killed too late"
    assert summary(run_dir)["weights_sha256"] == undisturbed
    assert summary(run_dir)["recoveries"] == 1


def test_a_coordinator_that_is_killed_continues_with_the_very_round(tmp_path: Path, undisturbed: str) -> None:
    with in_mid_round(tmp_path) as (command, run_dir):
        pid = events(run_dir, "coordinator_started")[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        ended = command.finish()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert events(run_dir, "coordinator_lost"), "it was killed too late"
    assert summary(run_dir)["weights_sha256"] == undisturbed
    assert [event["round"] for event in events(run_dir, "round")] == [1, 2, 3, 4], "a round was done twice, or left out"


@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_has_the_same_weights(tmp_path: Path, undisturbed: str) -> None:
    with in_mid_round(tmp_path) as (command, run_dir):
        wait_for(lambda: len(events(run_dir, "round")) >= 2)
        command.process.kill()
    ended = run("train", str(tmp_path / "killed.toml"), "--resume", "--run-dir", str(run_dir))
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "continues after round 2" in ended.stdout or len(events(run_dir, "round")) >= 4
    assert summary(run_dir)["weights_sha256"] == undisturbed


PRIVATE: Table = {
    "sampling": "poisson",
    "fraction": 0.5,
    "privacy": {"clip_norm": 1.0, "noise": 1.0, "delta": 1e-3, "accountant": "rdp"},
}


def test_epsilon_is_that_of_the_library_and_the_run_ends_before_it_is_passed(tmp_path: Path) -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    whole, rounds = train(tmp_path, "private", PRIVATE)
    spent = [event["epsilon"] for event in rounds]
    for number, epsilon in enumerate(spent, 1):
        accountant = rdp.RdpAccountant()
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.0)), number)
        assert epsilon == accountant.get_epsilon(1e-3)
    assert whole["epsilon"] == spent[-1]
    assert all(event["update_norm"] <= 1.0 + 1e-6 for event in rounds), "clients clip what they send"
    limit = (spent[1] + spent[2]) / 2
    limited = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "max_epsilon": limit}}
    ended, rounds = train(tmp_path, "limited", limited)
    assert (ended["steps"], ended["stopped_by"], ended["epsilon"]) == (2, "epsilon", spent[1])
    resumed = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "max_epsilon": 0.0}}
    again, _ = train(tmp_path, "limited", resumed, "--resume")
    assert (again["weights_sha256"], again["epsilon"]) == (whole["weights_sha256"], whole["epsilon"])
    assert "epsilon" in refusal(tmp_path, {**PRIVATE, "privacy": {**PRIVATE["privacy"], "max_epsilon": 0.01}})


@pytest.mark.long
def test_robust_rules_hold_where_some_clients_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "flipping.py").write_text(
        "from dataclasses import replace\n"
        "import torch\n"
        "from cordee.strategies.federated.algorithms import Finished\n"
        "from cordee.strategies.federated.algorithms.fedavg import fedavg\n"
        "def flipped():\n"
        "    def finish(local):\n"
        "        difference = local.here - local.start\n"
        "        is_wrong = int(difference[:8].abs().sum() * 1e6) % 5 == 0\n"
        "        return Finished(difference * (-20.0 if is_wrong else 1.0), {}, {})\n"
        "    return replace(fedavg(), finish=finish)\n"
    )
    own = {"algorithm": "flipping:flipped", "rounds": 6}
    found = {
        rule: train(tmp_path, rule or "mean", {**own, **({"robust": {"use": rule, "wrong": 0.4}} if rule else {})})[0]
        for rule in ("", "median", "trimmed_mean")
    }
    clean, _ = train(tmp_path, "clean", {"rounds": 6})
    assert found[""]["test_accuracy"] < clean["test_accuracy"] - 0.2, "wrong clients did no harm"
    for rule in ("median", "trimmed_mean"):
        assert found[rule]["test_accuracy"] > clean["test_accuracy"] - 0.1


def test_late_and_failing_clients_are_told_of(tmp_path: Path) -> None:
    strategy = {"deadline": "0.1s", "clock": {"stragglers": 0.3, "failures": 0.2}, "weights": "equal"}
    _, rounds = train(tmp_path, "late", strategy)
    for event in rounds:
        assert event["num_took_part"] == event["num_asked"] - len(event["late"]) - len(event["dropped"])
    assert any(event["late"] for event in rounds) and any(event["dropped"] for event in rounds)


@pytest.mark.long
def test_asynchronous_rounds_are_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    strategy = {
        "algorithm": "fedbuff", "clients_per_round": 4, "rounds": 6, "clock": {"stragglers": 0.3, "slowdown": 10.0},
    }  # fmt: skip
    found = [train(tmp_path, f"async-{n}", {**strategy, "workers": n})[0]["weights_sha256"] for n in (1, 2)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"clients_per_round": 21}, "clients_per_round = 21 is more than there are clients: 20"),
        ({"partition": {"clients": 5000}}, "more than the training set has"),
        ({"partition": {"kind": "dirichlet", "alpha": 0.001, "clients": 400}}, "is empty"),
        ({"partition": {"kind": "labels", "per_client": 11}}, "more than there are classes"),
        ({"partition": {"kind": "key", "key": "writer"}}, "no input of this data has this name"),
        ({"local_epochs": 1, "local_steps": 3}, "contradict each other"),
        ({"fraction": 0.5, "clients_per_round": 3}, "contradict each other"),
        ({"sampling": "poisson"}, "set strategy.fraction"),
        ({"algorithm": "fedavgg"}, "did you mean 'fedavg'"),
        ({"algorithm": {"use": "fedprox", "nu": 1.0}}, "no setting 'nu'"),
        ({"robust": "median", "secure": True}, "the server has their sum only"),
        ({"secure": True}, "is for real sites"),
        ({"privacy": {"noise": 1.0}}, "needs 'clip_norm'"),
        ({"personal": ["tail.*"]}, "matches no parameter"),
        ({"max_norm": -1.0}, "must be at least 0"),
        ({"most_samples": 0}, "must be at least 1"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(tmp_path: Path, strategy: Table, message: str) -> None:
    job = write_job(tmp_path, "refused", strategy)
    assert message in refused_here(job)


def refused_here(job: Path) -> str:
    """Return why a job is refused. In this process: the check is the launcher's, and starts nothing."""
    from cordee.core.errors import CordeeError
    from cordee.launch import check_job

    with pytest.raises(CordeeError) as caught:
        check_job(job)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_planner_says_that_rounds_are_not_predicted(tmp_path: Path) -> None:
    from cordee.core.errors import JobError
    from cordee.planner.planning import plan

    with pytest.raises(JobError, match="is not predicted, as a round takes as long as its clients"):
        plan(write_job(tmp_path, "planned", {}))


def test_training_length_is_that_of_the_rounds(tmp_path: Path) -> None:
    job = write_job(tmp_path, "refused", {}, training={"epochs": 3})
    assert "Remove training.epochs" in refused_here(job)
    job = write_job(tmp_path, "refused", {"algorithm": "scaffold"}, optimizer={"use": "adam", "lr": 0.01})
    assert "set optimizer.use = 'sgd'" in refused_here(job)


def test_other_strategies_do_not_continue_from_its_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, "rounds", {"rounds": 2, "local_steps": 2})
    job = tmp_path / "rounds.toml"
    ended = run(
        "train", str(job), "--resume", "--run-dir", str(tmp_path / "rounds"), "--set", "strategy.name=single",
        "--set", "strategy.workers=1", "--set", "training.epochs=5",
    )  # fmt: skip
    assert ended.code != 0, ended.stdout
    assert "it is of rounds of clients" in " ".join(ended.stderr.split())
