"""From a run directory to files that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.checkpoint.layout import memory_of
from cordee.checkpoint.optimizer import find_in_state
from cordee.compute import averaging, make_loss
from cordee.core import Job
from cordee.core.errors import CheckpointError, DataError, JobError, ModelError, RunDirectoryError
from cordee.data import load_data
from cordee.training.components import build_model


def export_run(
    run: Path,
    outputs: Sequence[Path],
    *,
    step: int | None = None,
    takes_best: bool = False,
    takes_trained: bool = False,
) -> list[Path]:
    """Write the weights of `run` to each of `outputs` (.safetensors, .pt, .onnx) and return their paths.

    With `training.ema` these are the moving averages, as they were evaluated, unless `takes_trained`. Takes the
    checkpoint of `step`, that of the best evaluation, or the newest. Raises CheckpointError if that is
    damaged: older weights are given only to those who ask for them. Nothing of the run is changed.
    """
    if not (run / "job.toml").is_file():
        raise RunDirectoryError(f"{run} is not a run directory: it has no job.toml")
    if takes_best and step is not None:
        raise JobError(f"--best and --step {step} contradict each other: give one of them")
    state = _state(run, _best_step(run) if takes_best else step)
    if not takes_trained:
        state = _with_averages(state)
    model, example = _model_and_example(run) if any(o.suffix == ".onnx" for o in outputs) else (None, None)
    return [checkpoint.export(state, output, model=model, example=example) for output in outputs]


def _with_averages(state: State) -> State:
    """Return the state with the moving averages of the weights in their places, where there are any."""
    optimizer = state.part("optimizer")
    averages = find_in_state(optimizer, averaging.KEY) if optimizer.values else {}
    # A weight with several names is one piece of memory.
    by_memory = {memory_of(state.tensors[f"model.{name}"]): average for name, average in averages.items()}
    tensors = {
        name: by_memory.get(memory_of(tensor), tensor) if name.startswith("model.") else tensor
        for name, tensor in state.tensors.items()
    }
    return State(tensors, state.values)


def _newest(run: Path) -> checkpoint.Verified | None:
    found = checkpoint.newest_whole(run / "checkpoints")
    if found is not None and found.damaged:
        path, reason = found.damaged[0]
        whole = found.path.name.removeprefix("step-")
        raise CheckpointError(
            f"the newest checkpoint, {path}, is damaged ({reason}): --step {whole} is the newest whole"
        )
    return found


def _best_step(run: Path) -> int:
    found = _newest(run)
    step = checkpoint.read_values(found.path)["progress"].get("best_step", -1) if found else -1
    if step < 0 or not Job.load(run / "job.toml").checkpoint.keep_best:
        raise RunDirectoryError(f"{run} has kept no best checkpoint: train with checkpoint.keep_best = true")
    return int(step)


def _state(run: Path, step: int | None) -> State:
    folder = run / "checkpoints"
    if step is not None:
        checkpoint.refuse_link(folder)
        path = folder / f"step-{step}"
        if not path.is_dir():
            kept = ", ".join(p.name for p in checkpoint.list_checkpoints(folder)) or "none"
            raise RunDirectoryError(f"{run} has no checkpoint of step {step} (it has: {kept})")
        return checkpoint.map_verified(path)
    found = _newest(run)
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet")
    return checkpoint.map_state(found.path)


def _model_and_example(run: Path) -> tuple[nn.Module, Tensor]:
    """Return the run's model, to be traced, and two samples to trace it with."""
    job = Job.load(run / "job.toml")
    ignored = make_loss(job.loss, job.python_path).ignored
    splits = load_data(job.data, seed=job.seed, python_path=job.python_path, ignored=ignored)
    if splits.train.num_samples is None:
        raise DataError(f"ONNX export traces the model with samples, and data {splits.name!r} has no random access")
    inputs = splits.train.gather(torch.arange(2) % splits.train.num_samples).inputs
    if not isinstance(inputs, Tensor):
        raise ModelError("ONNX export traces a model of one tensor, and this one takes several: export .safetensors")
    return build_model(job, splits), inputs
