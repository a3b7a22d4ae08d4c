"""Forward and backward passes over the parts of a batch, weighted so that the parts make the whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cordee.compute.losses import LossFunction, require_even_parts
from cordee.core.batch import Batch


class Votes(NamedTuple):
    """How many workers want to stop after this step, and why. They travel with the gradients."""

    interrupt: int = 0
    time: int = 0


NO_VOTES = Votes()

_ALIGNMENT_BYTES = 64  # of what torch allocates


@dataclass(frozen=True, slots=True)
class Loss:
    """What a step computed: the mean loss over `count`, and how many of `num_items` were right if that was measured."""

    mean: float
    count: float  # of items, or the sum of their weights
    num_correct: int | None = None
    num_samples: int = 0
    votes: Votes = NO_VOTES
    num_items: int = 0  # that `num_correct` is out of

    def summands(self) -> list[float]:
        """Return what has to be added up over the workers, beside their votes, for `from_totals`."""
        measured = [float(self.num_correct or 0), float(self.num_items)]
        return [self.mean * self.count, float(self.count), *measured, float(self.num_samples)]

    @classmethod
    def from_totals(cls, totals: Sequence[float], *, has_accuracy: bool) -> Loss:
        """Return the loss of all workers: `totals` are their summands and behind them their votes."""
        loss_sum, count, num_correct, num_items, num_samples, *votes = totals
        return cls(
            loss_sum / count if count else 0.0,
            count,
            int(num_correct) if has_accuracy else None,
            int(num_samples),
            Votes(*(int(vote) for vote in votes)),
            int(num_items),
        )

    @classmethod
    def join(cls, losses: Sequence[Loss]) -> Loss:
        """Return the loss of several parts, without votes."""
        totals = [sum(column) for column in zip(*(loss.summands() for loss in losses), strict=True)]
        return cls.from_totals([*totals, *NO_VOTES], has_accuracy=all(loss.num_correct is not None for loss in losses))

    @property
    def accuracy(self) -> float | None:
        return None if self.num_correct is None or not self.num_items else self.num_correct / self.num_items


@dataclass(frozen=True)
class Computation:
    """How a worker computes: the loss, the device, the precision. The same for every strategy."""

    loss: LossFunction
    device: torch.device
    precision: str  # "fp32" or "bf16"
    counts_classes: bool  # targets are classes, so that accuracy means something

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return Batch(batch.inputs.to(self.device, non_blocking=True), batch.targets.to(self.device, non_blocking=True))

    def forward_backward(
        self,
        model: Callable[[Tensor], Tensor],
        parts: Sequence[Batch],
        *,
        total_count: float,
        measure: bool,
        is_share: bool = False,
        join: Callable[[Tensor], None] | None = None,
    ) -> Loss:
        """Add the gradient of the mean loss over `total_count` to the parameters' gradients.

        `parts` may be only some of what is counted (the others being computed elsewhere): each is weighted by its
        count, so the sum over everybody's parts is the gradient of the whole batch; `is_share` says so where
        `total_count` is that of these parts alone. Returns the loss of these
        parts alone, as a mean over their own items. Empty parts are passed over. Models that communicate inside
        need as many passes on every worker: `join` makes one for an empty part, given its inputs.
        """
        weighted_sum, count, num_correct, num_items, num_samples = 0.0, 0.0, 0, 0, 0
        for part in parts:
            inputs, targets = self.to_device(part)
            if not part.num_samples:
                if join is not None:
                    join(inputs)
                continue
            num_samples += part.num_samples
            with self.autocast():
                outputs = model(inputs)
                loss = self.loss.mean(outputs, targets)
                part_count = self.loss.count(targets)
                if is_share or part_count != total_count:
                    require_even_parts(self.loss, outputs, targets)
            if part_count == 0:
                if join is not None:
                    (outputs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            (loss if part_count == total_count else loss * (part_count / total_count)).backward()  # type: ignore[no-untyped-call]
            weighted_sum += loss.item() * part_count
            count += part_count
            if measure and self.counts_classes:
                num_correct += count_correct(outputs, targets, ignored=self.loss.ignored)
                num_items += self.loss.num_items(targets)
        mean = weighted_sum / count if count else 0.0
        measured = num_correct if measure and self.counts_classes else None
        return Loss(mean, count, measured, num_samples, num_items=num_items)


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Cut a batch into `num_parts` parts whose sizes differ by at most one; those of a small batch may be empty."""
    parts = zip(batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts), strict=True)
    return [Batch(_aligned(inputs), _aligned(targets)) for inputs, targets in parts]


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that begins at the alignment of memory that torch allocates.

    At other alignments kernels add in another order: a linear layer of 5 inputs gives other bits for the same rows at
    another place of a batch.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


def find_unsound(batch: Batch) -> tuple[int, str] | None:
    """Return the first sample, by its row, that has a value which is not finite, and whether it is input or target."""
    found = []
    for values, part in ((batch.inputs, "input"), (batch.targets, "target")):
        if values.is_floating_point() and len(values):
            rows = (~torch.isfinite(values)).reshape(len(values), -1).any(dim=1).nonzero()
            found += [(int(row), part) for row in rows[:1, 0]]
    return min(found, default=None)


def count_correct(outputs: Tensor, targets: Tensor, top: int = 1, ignored: int | None = None) -> int:
    """Return for how many targets, but those of the class `ignored`, the right class is among the `top` highest."""
    with torch.no_grad():
        if top == 1:
            is_right = outputs.argmax(dim=-1) == targets
        else:
            best = outputs.topk(min(top, outputs.shape[-1]), dim=-1).indices
            is_right = (best == targets.unsqueeze(-1)).any(dim=-1)
        return int((is_right if ignored is None else is_right & (targets != ignored)).sum())


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> float:
    """Scale gradients so that their norm, taken over all of them, is at most `clip_norm`; return it as it was."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm, error_if_nonfinite=False))


# Measuring a model on a whole data set, each sample once.


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
