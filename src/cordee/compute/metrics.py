"""What a model can be measured by, besides its loss: kinds of metrics, and those that are built in.

A metric is right across workers in one of two ways. A `SummedMetric` gives numbers that are added over all parts of the
test set, and the value is made of their sums. Any other is computed from the outputs and targets of all samples
(`RowMetric`), put together in the order of the test set. No value is ever a mean of means.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cordee.core.errors import JobError, nearest
from cordee.core.references import bind

Direction = Literal["higher", "lower"]
ALWAYS_MEASURED: Mapping[str, Direction] = {"loss": "lower", "accuracy": "higher", "top5_accuracy": "higher"}


@dataclass(frozen=True)
class Task:
    """What metrics have to know of outputs and targets."""

    num_classes: int | None  # None: targets are numbers
    is_binary: bool = False  # an output is the logit of a target that is 0 or 1
    ignored: int | None = None  # a label that does not count


class SummedMetric(ABC):
    """A metric that is made of sums over the samples."""

    better: Direction | None = "higher"
    num_sums = 0  # as `try_metrics` found it: members without samples give as many zeros

    @abstractmethod
    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what has to be added up over all parts of the test set: a vector of float64."""

    @abstractmethod
    def finish(self, sums: Tensor) -> float:
        """Return the value, given the sums."""


@dataclass
class RowMetric:
    """A metric that needs the outputs and targets of all samples at once."""

    compute: Callable[[Tensor, Tensor], float]
    better: Direction | None = None


Metric = SummedMetric | RowMetric


class ValueProblemError(ValueError):
    """Says in words of this project what is wrong with a value."""


# Of classes.


def _labels(outputs: Tensor, targets: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return outputs as rows of class scores, or of one logit, and their labels, without those that do not count."""
    if task.is_binary:
        return outputs.reshape(-1), targets.reshape(-1)
    rows, labels = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    if task.ignored is None:
        return rows, labels
    is_counted = labels != task.ignored
    return rows[is_counted], labels[is_counted]


class TopK(SummedMetric):
    """The share of labels that are among the `k` highest outputs."""

    def __init__(self, task: Task, k: int) -> None:
        if k < 1:
            raise JobError(f"k = {k} must be at least 1")
        if task.is_binary and k > 1:
            raise JobError(f"the targets are 0 or 1, and top_{k} needs classes: use 'accuracy'")
        if task.num_classes is not None and k > task.num_classes:
            raise JobError(f"k = {k} is more than the {task.num_classes} classes of the data")
        self._task, self._k = task, k

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels = _labels(outputs, targets, self._task)
        if self._task.is_binary:
            is_right = (rows > 0) == (labels > 0.5)
        elif self._k == 1:
            is_right = rows.argmax(dim=-1) == labels
        else:
            is_right = (rows.topk(self._k, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1)
        return torch.tensor([float(is_right.sum()), float(len(labels))], dtype=torch.float64)

    def finish(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


class OfClasses(SummedMetric):
    """F1, precision or recall, from how often each class was right, predicted and there."""

    def __init__(self, task: Task, kind: Literal["f1", "precision", "recall"], average: str) -> None:
        self._task, self._kind, self._average = task, kind, average

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels = _labels(outputs, targets, self._task)
        if self._task.is_binary:
            number, predicted, actual = 2, (rows > 0).long(), (labels > 0.5).long()
        else:
            number, predicted, actual = rows.shape[-1], rows.argmax(dim=-1), labels
        right = torch.bincount(actual[predicted == actual], minlength=number)
        counts = [right, torch.bincount(predicted, minlength=number), torch.bincount(actual, minlength=number)]
        return torch.cat(counts).double().cpu()

    def finish(self, sums: Tensor) -> float:
        right, predicted, actual = sums.view(3, -1)
        if self._task.is_binary:  # of the positive class
            right, predicted, actual = right[1:], predicted[1:], actual[1:]
        elif self._average == "micro":
            right, predicted, actual = right.sum()[None], predicted.sum()[None], actual.sum()[None]
        among = {"f1": (predicted + actual) / 2, "precision": predicted, "recall": actual}[self._kind]
        # As scikit-learn and torchmetrics have it: 0 where there is nothing to divide by.
        values = torch.where(among > 0, right / among.clamp(min=1e-30), torch.zeros_like(right))
        if self._average == "weighted" and not self._task.is_binary:
            return float((values * actual).sum() / actual.sum())
        is_there = (predicted + actual) > 0  # classes that are neither predicted nor there say nothing
        return float(values[is_there].mean()) if bool(is_there.any()) else 0.0


class Perplexity(SummedMetric):
    """The exponential of the mean cross entropy of the labels, without weights and smoothing."""

    better = "lower"

    def __init__(self, task: Task) -> None:
        self._task = task

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels = _labels(outputs, targets, self._task)
        total = F.cross_entropy(rows.float(), labels, reduction="none").double().sum()
        return torch.tensor([float(total), float(len(labels))], dtype=torch.float64)

    def finish(self, sums: Tensor) -> float:
        mean = float(sums[0] / sums[1])
        return math.exp(mean) if mean < 700 else math.inf


# Of numbers.


def _columns(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and targets as columns of float64. Raises ValueError if they do not fit."""
    outputs = outputs.squeeze(-1) if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1 else outputs
    targets = targets.squeeze(-1) if targets.ndim == outputs.ndim + 1 and targets.shape[-1] == 1 else targets
    if outputs.shape != targets.shape:
        raise ValueProblemError(
            f"it compares number by number, and outputs have the shape {tuple(outputs.shape)}, targets "
            f"{tuple(targets.shape)}"
        )
    return outputs.double().reshape(len(targets), -1), targets.double().reshape(len(targets), -1)


class MeanError(SummedMetric):
    """The mean of the absolute or squared errors, or the root of the latter."""

    better = "lower"

    def __init__(self, kind: Literal["mae", "mse", "rmse"]) -> None:
        self._kind = kind

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, actual = _columns(outputs, targets)
        errors = (predicted - actual).abs() if self._kind == "mae" else (predicted - actual).square()
        return torch.tensor([float(errors.sum()), float(errors.numel())], dtype=torch.float64)

    def finish(self, sums: Tensor) -> float:
        mean = float(sums[0] / sums[1])
        return math.sqrt(mean) if self._kind == "rmse" else mean


class R2(SummedMetric):
    """The coefficient of determination; the mean over the columns of targets with several."""

    def __init__(self, offset: Tensor) -> None:
        """`offset` is about the size of the targets: sums of squares of large numbers would lose the differences."""
        self._offset = offset.double().reshape(1, -1)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, actual = _columns(outputs, targets)
        moved = actual - self._offset.to(actual.device)
        sums = [(predicted - actual).square().sum(0), moved.sum(0), moved.square().sum(0)]
        return torch.cat([*sums, torch.tensor([float(len(actual))], device=actual.device)]).double().cpu()

    def finish(self, sums: Tensor) -> float:
        residual, total, squares = sums[:-1].view(3, -1)
        spread = squares - total.square() / sums[-1]
        if float(sums[-1]) < 2:
            return math.nan  # of a single sample there is none
        # As scikit-learn has it for targets that are all the same.
        constant = torch.where(residual > 0, torch.zeros_like(residual), torch.ones_like(residual))
        return float(torch.where(spread > 0, 1 - residual / spread.clamp(min=1e-300), constant).mean())


# By name.


def _need_classes(name: str, task: Task) -> None:
    if task.num_classes is None and not task.is_binary:
        raise JobError(f"'{name}' needs classes, and the targets are numbers: use mae, mse, rmse or r2")


def _need_numbers(name: str, task: Task) -> None:
    if task.num_classes is not None or task.is_binary:
        raise JobError(f"'{name}' compares numbers, and the targets are classes: use accuracy, f1 or top_3, say")


def _make_of_classes(kind: Literal["f1", "precision", "recall"], task: Task, average: str) -> Metric:
    _need_classes(kind, task)
    known = ("macro", "micro", "weighted")
    if average not in known:
        raise JobError(f"average = {average!r} is not known{nearest(average, known)} (one of: {', '.join(known)})")
    return OfClasses(task, kind, average)


def _make_top_k(task: Task, k: int) -> Metric:
    _need_classes(f"top_{k}", task)
    return TopK(task, k)


def _make_perplexity(task: Task) -> Metric:
    if task.num_classes is None:
        raise JobError("'perplexity' needs classes, and the targets are numbers")
    return Perplexity(task)


def _make_error(kind: Literal["mae", "mse", "rmse"], task: Task) -> Metric:
    _need_numbers(kind, task)
    return MeanError(kind)


def _make_r2(task: Task, offset: Tensor) -> Metric:
    _need_numbers("r2", task)
    return R2(offset)


_OF_CLASSES = ("f1", "precision", "recall")
BUILTIN_METRICS = ("accuracy", *_OF_CLASSES, "mae", "mse", "perplexity", "r2", "rmse", "top_k")


def make_builtin(name: str, args: Mapping[str, Any], task: Task, example: Tensor, section: str) -> Metric:
    """Return a metric of `BUILTIN_METRICS`. Raises JobError that names `section` for settings that do not fit."""

    def f1(*, average: str = "macro") -> Metric:
        return _make_of_classes(name, task, average)  # type: ignore[arg-type]

    def top_k(*, k: int) -> Metric:
        return _make_top_k(task, k)

    makers: dict[str, Callable[..., Metric]] = {
        "accuracy": lambda: _make_top_k(task, 1),
        **dict.fromkeys(_OF_CLASSES, f1),
        "top_k": top_k,
        "perplexity": lambda: _make_perplexity(task),
        **{kind: functools.partial(_make_error, kind, task) for kind in ("mae", "mse", "rmse")},
        "r2": lambda: _make_r2(task, example[0]),
    }
    try:
        made: Metric = bind(section, makers[name], args)()
    except JobError as error:
        message = str(error)
        raise JobError(message if message.startswith(section) else f"{section}: {message}") from None
    return made
