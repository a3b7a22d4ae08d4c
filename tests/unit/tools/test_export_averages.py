"""With `training.ema` the averages are evaluated and exported, and the weights themselves on request."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import cordee
from cordee.checkpoint import load_newest
from cordee.checkpoint.optimizer import find_in_state
from cordee.compute.averaging import KEY
from cordee.tools.export import export_run


def test_averages_are_exported(tmp_path: Path) -> None:
    table = {
        "model": {"use": "mlp", "hidden": [4]},
        "data": {"use": "synthetic", "shape": [3], "num_classes": 2, "size": 24, "test_size": 6},
        "training": {"batch_size": 8, "epochs": 2, "threads": 1, "ema": 0.9},
    }
    run = cordee.train(table, run_dir=tmp_path / "r", quiet=True)
    loaded = load_newest(run.directory / "checkpoints")
    assert loaded is not None
    averages = find_in_state(loaded.state.part("optimizer"), KEY)
    (path,) = export_run(run.directory, [tmp_path / "averaged.safetensors"])
    averaged = load_file(path)
    assert averages.keys() == averaged.keys() and all(torch.equal(averaged[n], averages[n]) for n in averages)
    (path,) = export_run(run.directory, [tmp_path / "trained.safetensors"], takes_trained=True)
    trained = load_file(path)
    weights = run.model.state_dict()
    assert all(torch.equal(trained[name], weights[name]) for name in weights)
    assert not any(torch.equal(trained[name], averaged[name]) for name in weights)
