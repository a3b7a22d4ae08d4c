"""Measuring a model on a whole data set, each sample once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cordee.compute.computation import Computation, split_batch
from cordee.compute.job_metrics import NamedMetric
from cordee.compute.metrics import SummedMetric
from cordee.core.batch import Batch, Pieces
from cordee.core.errors import TrainingError

_NUM_FIXED = 6  # what `_measure` returns


@dataclass(frozen=True)
class Metrics:
    """Means over `num_samples` samples; accuracies are None where targets are not classes."""

    loss: float
    accuracy: float | None
    top5_accuracy: float | None  # also None with five classes or fewer, where it says nothing
    num_samples: int
    seconds: float
    named: dict[str, float] = field(default_factory=dict)  # those of [metrics]

    def get(self, name: str) -> float | None:
        """Return what was measured by a name of [metrics], or by one that is always measured."""
        if name in self.named:
            return self.named[name]
        value: float | None = getattr(self, name)
        return value


@dataclass
class Rows:
    """What one member computed: rows of all its parts, one after the other, and how many each part has."""

    counts: list[int]  # part by part of the first batch, then of the second
    outputs: Tensor
    targets: Tensor

    @classmethod
    def join(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Rows:
        return cls([len(targets) for _, targets in parts], *_cat([part for part in parts if len(part[1])]))


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch | Pieces],
    computation: Computation,
    *,
    num_classes: int | None,
    metrics: Sequence[NamedMetric] = (),
    should_stop: Callable[[], bool] = lambda: False,
    num_parts: int = 1,
    combine: Callable[[Sequence[float]], list[float]] = list,
    share_rows: Callable[[Rows], list[Rows]] = lambda own: [own],
    take_part: Callable[[], object] = lambda: None,
) -> Metrics | None:
    """Return the metrics over all `batches`, or None if `should_stop` said so before the end.

    The model is put into evaluation mode for the time and then back. In a team each member has its share of
    the batches; `combine` sums over the members and `should_stop` agrees with them, both collective. Each batch
    is computed in `num_parts` parts, and `combine` is given the sums of the first parts, then of the second ones.
    `share_rows` returns the rows of all members in their order; it is called where a metric needs them, and collective.
    `take_part` is called in place of the model where this member has no sample of a part.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    summed = [metric for metric in metrics if isinstance(metric.metric, SummedMetric)]
    of_rows = [metric for metric in metrics if not isinstance(metric.metric, SummedMetric)]
    sums = [[0.0] * _NUM_FIXED for _ in range(num_parts)]
    own_sums = [[torch.zeros(_num_sums(metric), dtype=torch.float64) for metric in summed] for _ in range(num_parts)]
    rows: list[tuple[Tensor, Tensor]] = []
    wants_top5 = num_classes is not None and num_classes > 5
    try:
        # Not inference_mode: what a model caches in there (a mask, say) could not be trained with afterwards.
        with torch.no_grad(), computation.autocast():
            for batch in batches:
                if should_stop():
                    return None
                for part, own, totals in zip(split_batch(batch, num_parts), sums, own_sums, strict=True):
                    kept = (torch.empty(0), torch.empty(0))
                    if part.num_samples:
                        part = computation.to_device(part)
                        outputs, targets = computation.outputs(model, part), part.targets
                        measured = _measure(outputs, part, computation, wants_top5)
                        if metrics:
                            outputs, targets = computation.compared(outputs, targets)
                        own[:] = [a + b for a, b in zip(own, measured, strict=True)]
                        for metric, total in zip(summed, totals, strict=True):
                            total += metric.measure(outputs, targets)
                        kept = (outputs, targets)
                    else:
                        take_part()
                    if of_rows:
                        rows.append((_on_host(kept[0]), kept[1].cpu()))
    finally:
        model.train(was_training)
    flat = [[*own, *(value for total in totals for value in total.tolist())] for own, totals in zip(sums, own_sums)]
    combined = combine([value for own in flat for value in own])
    loss_sum, count, num_items, right, right5, num_samples = combined[:_NUM_FIXED]
    has_accuracy = computation.counts_classes and num_items > 0
    named = _finish(summed, combined[_NUM_FIXED:]) if num_samples else {}
    if of_rows and num_samples:
        outputs, targets = in_order(share_rows(Rows.join(rows)), len(rows) // num_parts)
        named |= {metric.name: metric.compute(outputs, targets) for metric in of_rows}
    return Metrics(
        loss=loss_sum / count if count else float("nan"),
        accuracy=right / num_items if has_accuracy else None,
        top5_accuracy=right5 / num_items if has_accuracy and wants_top5 else None,
        num_samples=int(num_samples),
        seconds=time.perf_counter() - started,
        named={metric.name: named.get(metric.name, float("nan")) for metric in metrics},
    )


def _measure(outputs: Any, batch: Batch, computation: Computation, wants_top5: bool) -> list[float]:
    """Return the sum of the losses and their count, the number of labels, of right ones, of those right among five,
    and of samples.
    """
    targets = batch.targets
    count = computation.loss.count_batch(batch)
    loss_sum = computation.loss.of(outputs, targets).item() * count if count else 0.0
    num_items, right, right5 = 0, 0, 0
    if computation.counts_classes:
        num_items = computation.loss.num_items(targets)
        right = computation.count_right(outputs, targets)
        right5 = computation.count_right(outputs, targets, top=5) if wants_top5 else 0
    return [loss_sum, float(count), float(num_items), float(right), float(right5), float(batch.num_samples)]


def _num_sums(metric: NamedMetric) -> int:
    assert isinstance(metric.metric, SummedMetric) and metric.metric.num_sums, "it was not tried"
    return metric.metric.num_sums


def _finish(summed: Sequence[NamedMetric], sums: Sequence[float]) -> dict[str, float]:
    parts = (
        torch.split(torch.tensor(sums, dtype=torch.float64), [_num_sums(metric) for metric in summed]) if summed else ()
    )
    return {metric.name: metric.finish(part) for metric, part in zip(summed, parts, strict=True)}


def _on_host(outputs: Tensor) -> Tensor:
    """Return outputs for a function of the user's own: not in 16 bits, which NumPy and others do not know."""
    kept = outputs.detach().cpu()
    return kept.float() if kept.dtype in (torch.bfloat16, torch.float16) else kept


def _cat(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if not parts:
        return torch.empty(0), torch.empty(0)
    try:
        return torch.cat([outputs for outputs, _ in parts]), torch.cat([targets for _, targets in parts])
    except RuntimeError as error:
        raise TrainingError(
            f"a metric that needs the outputs of all samples at once cannot put them together: {error}. All batches "
            "must have outputs of one shape"
        ) from error


def in_order(members: Sequence[Rows], num_batches: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and targets of all samples in the order of the test set, however members shared them out."""
    split = [
        list(zip(torch.split(rows.outputs, rows.counts), torch.split(rows.targets, rows.counts), strict=True))
        for rows in members
    ]
    ordered = []
    for batch in range(num_batches):
        for parts in split:
            num_parts = len(parts) // num_batches
            ordered += [part for part in parts[batch * num_parts : (batch + 1) * num_parts] if len(part[1])]
    return _cat(ordered)
