"""What federated algorithms learn: unequal clients, wrong clients, slow clients. No times are measured.

    python benchmarks/federated_quality.py OUTPUT.json [mnist|wrong|seeds|slow]…

mnist: FedAvg, SCAFFOLD, FedProx and FedNova, 10 clients with shares of each class from Dir(0.5), batches of 64, the two
convolutions of 6 and 16 filters that the published figures (50 rounds of 10 epochs) have, with average pooling.
wrong: Fashion-MNIST, 10 equal clients, 2 of which send the opposite of their update, ten times as large.
seeds: the same with other seeds, for the rules that hold.
slow: FedBuff beside FedAvg where a fifth of 20 clients is 10 times slower; virtual time to the lower
of both last accuracies.
Each run is written as soon as it is done; runs that OUTPUT has already are not made again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cordee
from cordee.bench.harness import describe_machine
from cordee.core.errors import CordeeError

SGD = {"use": "sgd", "lr": 0.01, "momentum": 0.9}
FASHION = {"use": "fashion-mnist", "train_limit": 20_000, "test_limit": 5000}
PUBLISHED = {"fedavg": 0.989, "scaffold": 0.991, "fedprox": 0.990, "fednova": 0.980}  # Li et al. 2022, Dir(0.5), MNIST


def runs() -> dict[str, dict[str, Any]]:
    """Return the strategy and the data of each run."""
    unequal = {"kind": "dirichlet", "alpha": 0.5, "clients": 10}
    equal = {"clients": 10}
    found: dict[str, dict[str, Any]] = {}
    for name in PUBLISHED:
        strategy = {"algorithm": name, "rounds": 6, "local_epochs": 2, "partition": unequal}
        found[f"mnist/{name}"] = {"data": {"use": "mnist"}, "strategy": strategy}
    flipped = {"algorithm": "sign_flipping:sign_flipping", "rounds": 10, "partition": equal}
    found["wrong/clean"] = {"data": FASHION, "strategy": {**flipped, "algorithm": "fedavg"}}
    found["wrong/fedavg"] = {"data": FASHION, "strategy": flipped}
    for rule in ("median", "trimmed_mean", "krum"):
        found[f"wrong/{rule}"] = {"data": FASHION, "strategy": {**flipped, "robust": {"use": rule, "wrong": 0.2}}}
    for seed in (1, 2, 3, 4):
        found[f"seeds/clean/{seed}"] = {**found["wrong/clean"], "seed": seed}
        for rule in ("median", "trimmed_mean", "krum"):
            found[f"seeds/{rule}/{seed}"] = {**found[f"wrong/{rule}"], "seed": seed}
    slow = {"partition": {"clients": 20}, "clock": {"stragglers": 0.2, "slowdown": 10.0}}
    found["slow/fedavg"] = {"data": FASHION, "strategy": {**slow, "rounds": 14}}
    buffered = {"use": "fedbuff", "concurrency": 20}
    found["slow/fedbuff"] = {
        "data": FASHION,
        "strategy": {**slow, "algorithm": buffered, "clients_per_round": 10, "rounds": 30},
    }
    return found


def run(tables: dict[str, Any]) -> dict[str, Any]:
    job = cordee.Job.from_dict(
        {
            "model": {"use": "lenet"},
            "optimizer": SGD,
            "training": {"batch_size": 64, "threads": 1},
            "checkpoint": {"every_steps": 0},
            **tables,
            "strategy": {"name": "federated", "workers": 2, **tables["strategy"]},
        },
        python_path=[str(Path(__file__).parent)],
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        try:
            status = cordee.train(job, run_dir=run_dir, quiet=True).summary.status
        except CordeeError as error:  # wrong clients can make everybody's loss infinite
            status = f"failed: {error}"
        lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        clock = {event["round"]: event["clock_seconds"] for event in lines if event["type"] == "round"}
        curve = [(e["step"], clock[e["step"]], e["test_accuracy"]) for e in lines if e["type"] == "evaluation"]
        return {**tables, "test_accuracy": curve[-1][2], "status": status, "curve": curve}


def main(output: Path, wanted: list[str]) -> None:
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"machine": describe_machine()}
    for name, tables in sorted(runs().items(), key=lambda one: one[0], reverse=True):
        if name not in found and (not wanted or name.partition("/")[0] in wanted):
            found[name] = run(tables)
            if found[name]["status"] == "interrupted":  # Ctrl-C, or a limit of time: it is made again
                raise SystemExit(f"{name} was interrupted")
            output.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {found[name]['test_accuracy']:.4f} {found[name]['status']}", flush=True)
    if "slow/fedavg" in found and "slow/fedbuff" in found:
        both = [found[name]["curve"] for name in ("slow/fedbuff", "slow/fedavg")]
        goal = min(curve[-1][2] for curve in both)
        fedbuff_s, fedavg_s = (next(at_s for _, at_s, accuracy in curve if accuracy >= goal) for curve in both)
        print(f"slow: {goal:.1%} after {fedbuff_s:.1f} s of the virtual clock, FedAvg {fedavg_s:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
