"""Measuring a model on a whole data set, each sample once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cordee.compute.computation import Computation, count_correct, split_batch
from cordee.core.batch import Batch


@dataclass(frozen=True)
class Metrics:
    """Means over `num_samples` samples; accuracies are None where targets are not classes."""

    loss: float
    accuracy: float | None
    top5_accuracy: float | None  # also None with five classes or fewer, where it says nothing
    num_samples: int
    seconds: float


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    computation: Computation,
    *,
    num_classes: int | None,
    should_stop: Callable[[], bool] = lambda: False,
    num_parts: int = 1,
    combine: Callable[[Sequence[float]], list[float]] = list,
) -> Metrics | None:
    """Return the metrics over all `batches`, or None if `should_stop` said so before the end.

    The model is put into evaluation mode for the time and then back. In a team each member has its share of
    the batches; `combine` sums over the members and `should_stop` agrees with them, both collective. Each batch
    is computed in `num_parts` parts, and `combine` is given the sums of the first parts, then of the second ones.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    sums = [[0.0] * 6 for _ in range(num_parts)]
    wants_top5 = num_classes is not None and num_classes > 5
    try:
        # Not inference_mode: what a model caches in there (a mask, say) could not be trained with afterwards.
        with torch.no_grad(), computation.autocast():
            for batch in batches:
                if should_stop():
                    return None
                for part, own in zip(split_batch(batch, num_parts), sums, strict=True):
                    if part.num_samples:
                        measured = _measure(model, part, computation, wants_top5)
                        own[:] = [a + b for a, b in zip(own, measured, strict=True)]
    finally:
        model.train(was_training)
    loss_sum, count, num_items, right, right5, num_samples = combine([value for own in sums for value in own])
    has_accuracy = computation.counts_classes and num_items > 0
    return Metrics(
        loss=loss_sum / count if count else float("nan"),
        accuracy=right / num_items if has_accuracy else None,
        top5_accuracy=right5 / num_items if has_accuracy and wants_top5 else None,
        num_samples=int(num_samples),
        seconds=time.perf_counter() - started,
    )


def _measure(model: nn.Module, batch: Batch, computation: Computation, wants_top5: bool) -> list[float]:
    """Return the sum of the losses and their count, the number of labels, of right ones, of those right among five,
    and of samples.
    """
    inputs, targets = computation.to_device(batch)
    outputs = model(inputs)
    count = computation.loss.count(targets)
    loss_sum = computation.loss.mean(outputs, targets).item() * count if count else 0.0
    num_items, right, right5 = 0, 0, 0
    if computation.counts_classes:
        ignored, num_items = computation.loss.ignored, computation.loss.num_items(targets)
        right = count_correct(outputs, targets, ignored=ignored)
        right5 = count_correct(outputs, targets, top=5, ignored=ignored) if wants_top5 else 0
    return [loss_sum, float(count), float(num_items), float(right), float(right5), float(len(targets))]
