"""Walks the fault points of runs whose model is spread over the workers: `sharded`, `pipeline` and `tensor`.

    PYTHONPATH=tests:tests/faults python -m fault_walk_split sharded [kill freeze error]

A part of the model is lost with its worker: the run starts again from its last checkpoint, or ends with a saved state
that `--resume` continues. Either way the weights must be those of the undisturbed run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fault_trials import Scenario, Walker
from fault_walk import JOB, STEP, WALK, Case, cases, walk_all

from cordee.core.fault_points import Action, Fault
from warm_launch import WarmServer

STRATEGIES = ("sharded", "pipeline", "tensor")
SCENARIOS = {
    "plain": Scenario(),
    "final save": Scenario(settings=("checkpoint.every_steps=1000",)),
    "loss": Scenario(base=(Fault(STEP, "worker-1", "kill", 6),)),
}


def make_walker(server: WarmServer, folder: Path, strategy: str) -> Walker:
    job = JOB.replace("reproducible = true\n", "").replace('name = "data_parallel"', f'name = "{strategy}"')
    return Walker(server, folder, strategy, job, SCENARIOS)


def choose(walker: Walker, actions: Sequence[Action] = ("kill", "freeze", "error")) -> list[Case]:
    """Return the trials of the team's walk whose points such a run passes as often."""
    passed = {name: walker.visits(name) for name in SCENARIOS}
    return [
        case._replace(may_end_early=True)
        for case in cases(WALK)
        if case.scenario in SCENARIOS
        and case.fault.action in actions
        and passed[case.scenario].get((case.fault.point, case.fault.process), 0) >= case.fault.visit
    ]


def main() -> int:
    strategy, actions = sys.argv[1], sys.argv[2:] or ["kill", "freeze", "error"]
    num_failed = 0
    with WarmServer() as server:
        walker = make_walker(server, Path(tempfile.mkdtemp(prefix="fault-walk-")), strategy)
        chosen = choose(walker, actions)  # type: ignore[arg-type]
        for case, result in zip(chosen, walk_all(walker, chosen), strict=True):
            num_failed += bool(result.problem)
            what = f"FAILED {result.problem} {result.folder}" if result.problem else f"ok, {result.ended}"
            print(f"{result.seconds:6.1f} s  {case.name}: {what}", flush=True)
    print(f"{len(chosen)} trials, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
