"""A first look, in about a minute: three strategies with two workers each, one worker killed and back, one report.

python examples/quickstart.py [FOLDER]      without a folder, as make quickstart: a new one in runs/
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = Path(__file__).with_name("digits.toml")
CORDEE = [sys.executable, "-m", "cordee"]
EPOCHS = {"all-reduce": 150}  # longer, so that the killed worker is back before the end
OTHER_EPOCHS = 30
EVALUATE_EVERY = 5  # epochs, for all: the time to an accuracy is known as closely as that
# The name of the run, what is trained by, and what that means.
RUNS = [
    ("all-reduce", ["--strategy", "data_parallel"], "both workers average their gradients at every step"),
    ("servers", ["--strategy", "parameter_server"], "workers push gradients to parameter servers"),
    ("local", ["--strategy", "local_sgd", "--set", "strategy.sync_every=8"], "workers agree at every eighth step only"),
]
KILLED = RUNS[0][0]


def pid_of_worker(run: Path, worker: int) -> int | None:
    """Return the process of a worker by the events of the run, when the run has taken some steps."""
    try:
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    except (OSError, ValueError):  # not there yet, or being written
        return None
    if not any(line["type"] == "evaluation" for line in lines):
        return None
    return next((line["pid"] for line in lines if line["type"] == "worker_started" and line["worker"] == worker), None)


def train(folder: Path, name: str, options: list[str]) -> None:
    """Train one run; kill worker 1 of the first half-way."""
    run = folder / name
    epochs = EPOCHS.get(name, OTHER_EPOCHS)
    settings = [
        "--workers",
        "2",
        "--set",
        f"training.epochs={epochs}",
        "--set",
        f"evaluation.every_epochs={EVALUATE_EVERY}",
    ]
    settings += ["--run-dir", str(run)]
    process = subprocess.Popen([*CORDEE, "train", str(JOB), *options, *settings])
    while name == KILLED and process.poll() is None:
        if (pid := pid_of_worker(run, 1)) is not None:
            print(f"\n--- kill -9 {pid}: worker 1 dies, the other continues, and a new one joins ---", flush=True)
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    if process.wait() != 0:
        sys.exit(process.returncode)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}")
    begun_s = time.monotonic()
    for name, options, meaning in RUNS:
        print(f"\n=== {name}: {meaning} ===", flush=True)
        train(folder, name, options)
    runs = [str(folder / name) for name, _, _ in RUNS]
    report, picture = folder / "report.html", folder / "report.png"
    print("\n=== the three runs beside each other ===", flush=True)
    subprocess.run([*CORDEE, "runs", str(folder)], check=True)
    subprocess.run([*CORDEE, "compare", *runs, "-o", str(report), "--png", str(picture)], check=True)
    then = {
        f"cordee show {folder / KILLED}": "what happened when the worker was killed",
        f"cordee dashboard --runs {folder}": "the same runs in a web page (extra dashboard)",
        f"cordee plan {os.path.relpath(JOB)}": "which strategy is the fastest here, and why",
        "cordee new my-job": "a job file of your own to change",
    }
    width = max(map(len, then))
    print(f"\nthat took {time.monotonic() - begun_s:.0f} s\nnext")
    print(f"  open {report.absolute()} in a browser, or {picture}")
    for command, what in then.items():
        print(f"  {command:{width}}  {what}")


if __name__ == "__main__":
    main()
