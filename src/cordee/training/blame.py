"""Whose fault a loss is that is not finite: a sample, and the worker that had it."""

from __future__ import annotations

from cordee.compute import find_unsound
from cordee.core import Batch
from cordee.core.batch import Pieces
from cordee.core.errors import TrainingError
from cordee.training.components import Components
from cordee.training.progress import Progress


def blame_sample(components: Components, progress: Progress, batch: Batch | Pieces) -> str | None:
    """Return which sample of the batch, on which worker, has values that are not finite. Collective."""
    found = find_unsound(batch)
    code = -1
    if found is not None:
        numbers = components.train.sample_numbers(progress.epoch, progress.batch)
        row, part = found
        code = 2 * (row if numbers is None else numbers[row]) + int(part == "target")
    codes = components.team.gather(code)
    worker = next((index for index, code in enumerate(codes) if code >= 0), None)
    if worker is None:
        return None
    part = "target" if codes[worker] % 2 else "input"
    is_numbered = components.splits.train.num_samples is not None
    place = "the training set" if is_numbered else f"the share of worker {worker} in this batch"
    return (
        f"The {part} of sample {codes[worker] // 2} of {place}, which worker {worker} computed, has a value that "
        "is infinite or not a number: remove or fix such samples"
    )


def not_finite_error(
    what: str, step: int, epoch: int, last_checkpoint: str | None, advice: str | None = None
) -> TrainingError:
    """Return what to raise where something is not finite, with what is kept and what to change."""
    last = f"the last checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
    usual = "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set training.clip_norm = 1.0"
    return TrainingError(f"{what} at step {step} (epoch {epoch}); {last}. {advice or usual}")
