"""What a job says of its evaluations, checked before training: metrics, and the settings that name them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cordee.compute import LossFunction
from cordee.compute.job_metrics import NamedMetric, make_metrics, require_known, try_metrics
from cordee.compute.metrics import Task
from cordee.compute.schedules import follows_metric
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.data import GrowingSource, Splits


class Measured(NamedTuple):
    """The metrics of a job."""

    metrics: tuple[NamedMetric, ...]
    lower_is_better: frozenset[str]
    warnings: tuple[str, ...]


def check_metrics(job: Job, splits: Splits, loss: LossFunction, outputs: Tensor, targets: Tensor) -> Measured:
    """Return the job's metrics, tried on some outputs and targets. Raises JobError."""
    is_binary = splits.num_classes is None and job.loss.use == "binary_cross_entropy"
    task = Task(splits.num_classes, is_binary=is_binary, ignored=loss.ignored if splits.num_classes else None)
    metrics = make_metrics(job.metrics, task, targets, job.python_path)
    warnings: list[str] = []
    if metrics and splits.test is None and not job.data.holdout:
        warnings.append(
            f"[metrics] are measured on a test set, and data {splits.name!r} has none: they are not measured. Set "
            "data.test_fraction = 0.1, say"
        )
    warnings += try_metrics(metrics, outputs.detach(), targets.to(outputs.device))
    keys = {f"stop.metrics.{name}": name for name in job.stop.metrics}
    if follows_metric(job.schedule, job.python_path):
        keys["schedule.metric"] = job.schedule.args.get("metric", "loss")
    keys |= {"stop.patience_metric": job.stop.patience_metric} if job.stop.patience_metric else {}
    keys |= {"checkpoint.keep_best": job.checkpoint.keep_best} if isinstance(job.checkpoint.keep_best, str) else {}
    lower = {name for key, name in keys.items() if _direction(key, name, metrics, splits) == "lower"}
    return Measured(metrics, frozenset({*lower, "loss"}), tuple(warnings))


def _direction(key: str, name: str, metrics: tuple[NamedMetric, ...], splits: Splits) -> str:
    better = require_known(name, key, metrics)
    if name in [metric.name for metric in metrics]:
        return better
    if "accuracy" in name and splits.num_classes is None:
        raise JobError(f"{key} names the metric '{name}', which needs classes, and the targets are numbers")
    if name == "top5_accuracy" and splits.num_classes is not None and splits.num_classes <= 5:
        raise JobError(f"{key} names 'top5_accuracy', which is not measured with five classes or fewer")
    return better


def check_stop_settings(job: Job, splits: Splits) -> None:
    """Raise JobError for settings that need a test set, or classes, where there are none."""
    wants_test = [key for key in ("accuracy", "loss", "patience") if getattr(job.stop, key) is not None]
    wants_test += [f"metrics.{name}" for name in job.stop.metrics]
    wants_test = [f"stop.{key}" for key in wants_test]
    wants_test += ["schedule.use"] if follows_metric(job.schedule, job.python_path) else []
    is_online = isinstance(splits.train, GrowingSource)
    if is_online:
        _check_online(job, splits, wants_test)
        return
    if job.stop.idle is not None:
        raise JobError(f"stop.idle = {job.stop.idle!r} is for data that grows, and {splits.name!r} does not: remove it")
    if wants_test and splits.test is None:
        raise JobError(
            f"{wants_test[0]} is measured on a test set, and data {splits.name!r} has none: "
            "set data.test_fraction = 0.1, say, to set a part of the training set aside"
        )
    if job.checkpoint.keep_best and splits.test is None:
        raise JobError(
            f"checkpoint.keep_best needs a test set, and data {splits.name!r} has none: "
            "set data.test_fraction = 0.1, say, or remove the setting"
        )
    if job.stop.accuracy is not None and splits.num_classes is None:
        raise JobError("stop.accuracy needs classes, and the targets are numbers: use stop.loss instead")


def _check_online(job: Job, splits: Splits, wants_test: list[str]) -> None:
    """Raise JobError for settings that have no meaning where the training set has no end."""
    if job.training.epochs not in (None, 1):
        raise JobError(
            f"training.epochs = {job.training.epochs}, but data that grows is gone through once: set training.steps, "
            "stop.time or stop.idle, or nothing, and it trains for as long as data comes"
        )
    wants_test += ["checkpoint.keep_best"] if job.checkpoint.keep_best else []
    if wants_test and splits.test is None and not job.data.holdout:
        raise JobError(f"{wants_test[0]} is measured on a test set: set data.holdout = 0.1, say, to set samples aside")
    if wants_test and not job.evaluation.every_steps:
        raise JobError(f"{wants_test[0]} is never measured, as growing data has no epochs: set evaluation.every_steps")
    if job.stop.accuracy is not None and splits.num_classes is None:
        raise JobError("stop.accuracy needs classes, and the targets are numbers: use stop.loss instead")
