"""The summary of a served run."""

from __future__ import annotations

import time
from typing import Any

import torch

from cordee.core import Job
from cordee.monitoring import Summary
from cordee.monitoring.summary import Status
from cordee.progress import Progress
from cordee.served.memory import Outcome
from cordee.served.processes import RunMemory
from cordee.version import __version__


def sum_up(
    job: Job,
    described: dict[str, Any],
    progress: Progress,
    outcome: Outcome,
    memory: RunMemory,
    *,
    is_cut_short: bool,
    samples_per_second: float | None,
) -> Summary:
    """Return the summary of a run that ended as `outcome` says; `described` is what `run_started` tells."""
    metrics = outcome.metrics if outcome.metrics and progress.evaluated_at == progress.step else None
    stopped_by = outcome.stopped_by or ("steps" if is_cut_short else None)
    status: Status = "interrupted" if stopped_by == "interrupt" else "stopped" if stopped_by else "completed"
    ages = {str(age): count for age, count in enumerate(outcome.ages) if count}
    return Summary(
        status=status,
        name=job.name,
        strategy=job.strategy.name,
        workers=job.strategy.workers,
        device=described["device"],
        parameters=described["parameters"],
        steps=progress.step,
        epochs=progress.epoch,
        samples=progress.samples,
        wall_seconds=progress.elapsed_s,
        samples_per_second=samples_per_second,
        checkpoint_stall_seconds=outcome.stall_s,
        best_step=progress.best_step if progress.best_step >= 0 else None,
        step_seconds=progress.samples / progress.step / samples_per_second if samples_per_second else None,
        peak_memory_bytes=memory.peak_memory_bytes or None,
        train_loss=progress.train_loss,
        test_loss=metrics.loss if metrics else None,
        test_accuracy=metrics.accuracy if metrics else None,
        test_top5_accuracy=metrics.top5_accuracy if metrics else None,
        weights_sha256=outcome.weights_sha256 or None,
        recoveries=memory.recoveries,
        staleness=ages or None,
        stopped_by=stopped_by,
        cordee_version=__version__,
        torch_version=str(torch.__version__),
        started=memory.started,
        ended=time.time(),
    )
