"""Predictions of `cordee simulate` for published tables, made before these were read, and their errors.

    python benchmarks/blind.py predict                writes benchmarks/results/blind-predictions-DATE.json
    python benchmarks/blind.py compare PREDICTIONS    compares it with what benchmarks/blind/published.toml says

The file of predictions was committed before published.toml was written. Inputs and their sources: blind/inputs.toml.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

from cordee.planner.simulator import read_scenario, simulate

FOLDER = Path(__file__).parent
INPUTS, PUBLISHED = FOLDER / "blind" / "inputs.toml", FOLDER / "blind" / "published.toml"


def predict(case: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast as `base` workers each number of workers is."""
    base, samples_per_s = case["base"], {}
    for workers in case["workers"]:
        # A batch that is divided is a shorter step for each worker; else each has a batch of its own.
        share = base / workers if case.get("divides_batch") else 1.0
        table = {**case["scenario"], "step": case["scenario"]["step"] * share, "workers": [workers]}
        (outcome,) = simulate(read_scenario({"name": case["name"], **table}, []))
        samples_per_s[workers] = share * workers / outcome.step_s
    return {str(workers): round(rate / samples_per_s[base], 3) for workers, rate in samples_per_s.items()}


def compare(predictions: dict[str, dict[str, float]], published: dict[str, Any]) -> dict[str, Any]:
    """Return the error of each prediction, as a share of what was published, and the median and the largest of all."""
    cases: dict[str, Any] = {}
    errors = []
    for name, table in published.items():
        rows = {}
        for workers, speedup in table["speedup"].items():
            error = predictions[name][workers] / speedup - 1
            rows[workers] = {"published": speedup, "predicted": predictions[name][workers], "error": round(error, 4)}
            errors.append(abs(error))
        cases[name] = {"source": table["source"], "rows": rows}
    return {"cases": cases, "median_error": statistics.median(errors), "largest_error": max(errors), "num": len(errors)}


def main(action: str, *arguments: str) -> None:
    if action == "predict":
        cases = tomllib.loads(INPUTS.read_text())["case"]
        today = datetime.datetime.now(datetime.UTC).date()
        path = FOLDER / "results" / f"blind-predictions-{today}.json"
        path.write_text(json.dumps({case["name"]: predict(case) for case in cases}, indent=1) + "\n")
        print(path)
        return
    (source,) = arguments
    found = compare(json.loads(Path(source).read_text()), tomllib.loads(PUBLISHED.read_text()))
    Path(source.replace("predictions", "errors")).write_text(json.dumps(found, indent=1) + "\n")
    for name, case in found["cases"].items():
        for workers, row in case["rows"].items():
            print(f"{name:26} {workers:>5} {row['published']:8.2f} {row['predicted']:8.2f} {row['error']:+8.1%}")
    print(f"{found['num']} figures: median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
