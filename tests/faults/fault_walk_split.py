"""Walks the fault points of runs whose model is spread over the workers: `sharded`, `pipeline` and `tensor`.

    PYTHONPATH=tests:tests/faults python -m fault_walk_split [--strategy sharded] [--action kill] [--sample]

A part of the model is lost with its worker: the run starts again from its last checkpoint, or ends with a saved state
that `--resume` continues. Either way the weights must be those of the undisturbed run.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from fault_trials import Scenario, Walker, job_text
from fault_walk import MODEL, STEP, WALK
from walking import Case, Walk, cases, main, of

from cordee.core.fault_points import Fault
from warm_launch import WarmServer

# Stages by hand: measured on a busy machine they can differ from run to run, and with them the masks of the dropout.
STRATEGIES = {
    "sharded": "",
    "pipeline": 'placement = [["flatten", "linear1", "activation1", "dropout1"], ["classifier"]]',
    "tensor": "",
}
SCENARIOS = {
    "plain": Scenario(),
    "final save": Scenario(settings=("checkpoint.every_steps=1000",)),
    "loss": Scenario(base=(Fault(STEP, "worker-1", "kill", 6),)),
}
# All members write their slices of a checkpoint (training/slice_saving.py). Teams whose members have everything do not.
SAVED_TOGETHER = (
    of("plain", "worker-0", 1, 2, 3),
    of("plain", "worker-1", 1, 2, 3),
    of("final save", "worker-0"),
    of("final save", "worker-1"),
    of("loss", "worker-0", 2),
)
SLICES_WALK = {point: Walk(SAVED_TOGETHER) for point in ("slices.begun", "slices.written", "slices.agreed")}


def make_walker(server: WarmServer, folder: Path, strategy: str) -> Walker:
    lines = f'name = "{strategy}"\n{STRATEGIES[strategy]}'
    job = job_text(MODEL, lines, steps=12, save_every=4, is_reproducible=False)
    return Walker(server, folder, strategy, job, SCENARIOS)


def choose(walker: Walker) -> list[Case]:
    """Return the trials of the team's walk whose points such a run passes as often."""
    passed = {name: walker.visits(name) for name in SCENARIOS}
    return [
        case._replace(may_end_early=True)
        for case in cases({**WALK, **SLICES_WALK})
        if case.scenario in SCENARIOS
        and passed[case.scenario].get((case.fault.point, case.fault.process), 0) >= case.fault.visit
    ]


if __name__ == "__main__":
    makers = {strategy: functools.partial(make_walker, strategy=strategy) for strategy in STRATEGIES}
    sys.exit(main(__doc__, makers, choose))
