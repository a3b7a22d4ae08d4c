"""What the training loop costs: LeNet, batch 32, one worker, one kernel thread.

The hand-written loop gathers whole batches from the same normalised tensors, and is measured with torch's
default optimizer as well as with the fused one that Cordée picks by itself. Accelerate and Lightning get the
same tensors through a DataLoader that gathers whole batches too (a per-sample DataLoader, the usual one,
would be several times slower). Setting up, evaluating and saving are left out for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.bench.harness import Contestant, Loop, Report, compare_speeds, compete, describe_machine
from cordee.bench.loops import cordee_loop, image_data, installed_peers, torch_loop

BATCH_SIZE = 32
NUM_STEPS = 600


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    data = image_data()
    say(f"data: {data.use}; {NUM_STEPS} steps of {BATCH_SIZE} per contestant and round")
    work: dict[str, Any] = {"model": "lenet", "data": data, "batch_size": BATCH_SIZE}
    loops: dict[str, Loop] = {
        "hand-written": partial(torch_loop, **work),
        "hand-written, fused": partial(torch_loop, **work, tuned=True),
        "cordee": partial(cordee_loop, **work),
        **{name: partial(loop, **work) for name, loop in installed_peers(say).items()},
    }
    raw, _ = compete({name: Contestant(loop, 1, NUM_STEPS, BATCH_SIZE) for name, loop in loops.items()}, rounds, say)
    rows = [{**row, "us_per_step": BATCH_SIZE / row["samples_per_second"] * 1e6} for row in compare_speeds(raw)]
    settings = {**work, "data": data.use, "steps": NUM_STEPS, "threads": 1, "rounds": rounds}
    return Report("overhead", describe_machine(), settings, raw, "samples/s", rows)
