"""Loops of a user's own give the same on any number of workers, whatever they prepare and in which order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from differences.running import RUN_TIMEOUT_S, WarmServer

SCRIPT = str(Path(__file__).with_name("own_loop.py"))
TOLERANCE = 1e-9  # models compute in double precision
BLOCKS = ("linear", "relu", "layer_norm", "group_norm", "twice", "tied", "frozen", "half_frozen", "scalar", "buffers")
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= 6 else []) for seed in range(60)]


def draw(seed: int) -> tuple[dict[str, Any], int]:
    """Return the choices of a loop, and on how many workers it is run."""
    rng = random.Random(f"loop {seed}")
    choices = {
        "seed": seed,
        "blocks": [rng.choice(BLOCKS) for _ in range(rng.randint(1, 3))],
        "num_models": rng.choice([1, 1, 2, 3]),
        "optimizer": rng.choice(["SGD", "Adam", "AdamW", "RMSprop"]),
        "loader": rng.choice(["shuffled", "dropped", "backwards", "in order", "generated"]),
        "size": rng.randint(9, 33),
        "test_size": rng.randint(3, 13),
        "batch_size": rng.choice([3, 4, 5, 8]),
        "loss": rng.choice(["mean", "sum", "ignored", "weighted"]),
        "epochs": rng.choice([1, 2]),
        "prepares_apart": rng.random() < 0.5,
        "evaluates": rng.random() < 0.5,
        "accumulates": rng.random() < 0.3,
        "clips": rng.random() < 0.3,
    }
    return choices, rng.choice([2, 2, 3, 4])


def run(server: WarmServer, folder: Path, num_workers: int) -> dict[str, torch.Tensor]:
    """Run the script and return what its first worker wrote."""
    result = folder / f"{num_workers}.safetensors"
    arguments = (SCRIPT, str(folder / "choices.json"), str(result))
    if num_workers == 1:
        process = server.python(*arguments, folder=folder)
    else:
        process = server.cordee("run", "-n", str(num_workers), *arguments, folder=folder)
    _, message = process.communicate(RUN_TIMEOUT_S)
    assert process.returncode == 0, message
    return load_file(result)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_own_loops(seed: int, server: WarmServer, tmp_path: Path) -> None:
    choices, num_workers = draw(seed)
    (tmp_path / "choices.json").write_text(json.dumps(choices))
    alone, together = run(server, tmp_path, 1), run(server, tmp_path, num_workers)
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(
            together[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
