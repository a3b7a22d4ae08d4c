"""What recording the timeline costs: one worker in one process, with the record and without, interleaved.

.venv/bin/python benchmarks/timeline_cost.py [--rounds 5] [--calls] [-o FILE]

`--calls` measures only the processor time of what a step and a second of recording call, which needs no quiet machine.

`share` is the time inside the recording, where the clock of the measurement is part of it; `with_over_without` is the
speed with the record over the speed without, which the machine's noise is in.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cordee
from cordee import launch
from cordee.monitoring.timeline import Phase, Timeline, TimelineFolder

# A usual step, and the shortest that the examples have.
JOBS: dict[str, dict[str, Any]] = {
    "lenet": {"model": "lenet", "data": {"use": "synthetic", "shape": [1, 28, 28], "size": 6400}, "steps": 400},
    "mlp of the digits": {"model": "mlp", "data": {"use": "digits"}, "steps": 6000},
}
MODES = ("recorded", "not recorded", "timed")


def timed(spent: list[float]) -> None:
    """Have the methods of the timeline add the seconds that they take to `spent`."""
    depth = 0
    for name in ("switch", "end_step", "enter", "_flush"):
        method = getattr(Timeline, name)

        def measured(self: Timeline, *arguments: Any, method: Any = method) -> Any:
            nonlocal depth
            begun_s, depth = time.perf_counter(), depth + 1
            try:
                return method(self, *arguments)
            finally:
                depth -= 1
                if not depth:
                    spent[0] += time.perf_counter() - begun_s

        setattr(Timeline, name, measured)


def train(name: str, mode: str) -> dict[str, float]:
    """Train once in this process; return the speed, and the share of recording where it is timed."""
    spent, work = [0.0], JOBS[name]
    if mode == "not recorded":
        launch.Timeline = lambda *arguments: Timeline()  # type: ignore[assignment, misc]  # a process of its own
    elif mode == "timed":
        timed(spent)
    job = {
        "name": "cost", "model": {"use": work["model"]}, "data": work["data"],
        "optimizer": {"use": "sgd", "lr": 0.01}, "strategy": {"name": "single", "workers": 1},
        "training": {"batch_size": 64, "steps": work["steps"], "threads": 1},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = cordee.train(cordee.Job.from_dict(job), run_dir=Path(folder) / "run", quiet=True)
        file = Path(folder) / "run" / "timeline" / "worker-0.jsonl"
        has_rows = file.is_file() and re.search(r'"step":\[\d', file.read_text()) is not None
    assert has_rows == (mode != "not recorded")
    speed = run.summary.samples_per_second
    assert speed is not None
    seconds = 64 * work["steps"] / speed
    return {"samples_per_second": speed, "share": spent[0] / seconds}


def processor_times() -> dict[str, float]:
    """Return the processor time of the calls of one step, and of writing the line of one second."""
    num_steps, num_lines = 50_000, 200
    with tempfile.TemporaryDirectory() as place:
        folder = TimelineFolder(Path(place))
        timeline = Timeline("worker-0", lambda line: folder.write("worker-0", line))
        timeline.enter("training")
        timeline.switch(Phase.COMPUTE)
        begun_s = time.process_time()
        for step in range(num_steps):
            timeline.switch(Phase.DATA)
            timeline.switch(Phase.COMPUTE)
            timeline.end_step(step)
        step_us = 1e6 * (time.process_time() - begun_s) / num_steps
        begun_s = time.process_time()
        for _ in range(num_lines):
            timeline._rows.extend(range(900))  # 100 rows, the most that a second has
            timeline.note()
        line_us = 1e6 * (time.process_time() - begun_s) / num_lines
        timeline.close()
    return {"step_us": step_us, "line_of_a_second_us": line_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(train(*asked.one)))
        return
    if asked.calls:
        calls = [processor_times() for _ in range(asked.rounds)]
        middle = {key: statistics.median(each[key] for each in calls) for key in calls[0]}
        print(json.dumps(middle, indent=1))
        if asked.output is not None:
            asked.output.write_text(json.dumps({"median": middle, "raw": calls}, indent=1) + "\n")
        return
    raw: dict[str, dict[str, list[dict[str, float]]]] = {name: {mode: [] for mode in MODES} for name in JOBS}
    for number in range(asked.rounds):
        for name in JOBS:
            for mode in MODES if number % 2 else reversed(MODES):
                done = subprocess.run([sys.executable, __file__, "--one", name, mode], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                raw[name][mode].append(json.loads(done.stdout.splitlines()[-1]))
    found = {
        name: {
            "samples_per_second": statistics.median(one["samples_per_second"] for one in modes["recorded"]),
            "share": statistics.median(one["share"] for one in modes["timed"]),
            "with_over_without": statistics.median(
                one["samples_per_second"] / other["samples_per_second"]
                for one, other in zip(modes["recorded"], modes["not recorded"], strict=True)
            ),
        }
        for name, modes in raw.items()
    }
    print(json.dumps(found, indent=1))
    if asked.output is not None:
        asked.output.write_text(json.dumps({"rounds": asked.rounds, "median": found, "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
