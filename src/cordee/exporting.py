"""From a run directory to files that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cordee import checkpoint
from cordee.assembly import build_model
from cordee.core import Job
from cordee.core.errors import RunDirectoryError
from cordee.data import load_data


def export_run(run: Path, outputs: Sequence[Path], *, step: int | None = None) -> list[Path]:
    """Write the weights of `run` to each of `outputs` (.safetensors, .pt, .onnx) and return their paths.

    Takes the checkpoint of `step`, or the newest that is whole. Nothing of the run is changed.
    """
    if not (run / "job.toml").is_file():
        raise RunDirectoryError(f"{run} is not a run directory: it has no job.toml")
    for output in outputs:
        checkpoint.check_export_target(output)
    state = _state(run / "checkpoints", step)
    weights = {name.removeprefix("model."): t for name, t in state.tensors.items() if name.startswith("model.")}
    written = []
    for output in outputs:
        if output.suffix == ".onnx":
            job = Job.load(run / "job.toml")
            splits = load_data(job.data, seed=job.seed, python_path=job.python_path)
            model = build_model(job, splits)
            checkpoint.load_model_state(model, state.tensors)
            written.append(checkpoint.export_onnx(model, _example(splits), output))
        else:
            written.append(checkpoint.export_weights(weights, output))
    return written
