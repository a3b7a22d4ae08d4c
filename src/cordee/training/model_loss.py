"""What a loss that a model computes itself is the mean over: found out by computing a batch whole and in parts.

Three samples are computed, of which the first has some labels that are ignored. The loss of all three must be the mean
of those of the first two and of the last, weighted by what they count. That tells samples from labels, and labels from
those that a model shifts.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from cordee.compute import Computation, LossFunction
from cordee.compute.losses import count_places, count_samples
from cordee.compute.outputs import model_loss
from cordee.core import Batch
from cordee.core.errors import CordeeError, JobError
from cordee.models.effects import unchanged

_PRECISION = 2e-5  # of a sum of single precision in another order; candidates differ by more, or are told apart so
_ADVICE = (
    "Set loss.count to what the model's loss is the mean over: 'samples', 'labels' (that are not loss.ignore_index), "
    "'next_labels' (the same but for the first of each sequence), or 'module:callable', a function of the targets"
)


class _Trial:
    """The losses of a batch and of its two parts."""

    def __init__(self, whole: float, parts: tuple[float, float], batches: tuple[Batch, Batch]) -> None:
        self._whole, self._parts, self._batches = whole, parts, batches

    @property
    def is_usable(self) -> bool:
        return all(math.isfinite(value) for value in (self._whole, *self._parts))

    def weight(self, loss: LossFunction) -> float | None:
        """Return the share of the first part in what is counted."""
        counts = [loss.count_batch(batch) for batch in self._batches]
        return counts[0] / sum(counts) if sum(counts) else None

    def agrees(self, loss: LossFunction) -> bool:
        weight = self.weight(loss)
        if weight is None:
            return False
        joined = weight * self._parts[0] + (1 - weight) * self._parts[1]
        scale = max(abs(self._whole), *map(abs, self._parts))
        return abs(joined - self._whole) <= _PRECISION * scale + 1e-9


def choose_count(
    model: nn.Module, computation: Computation, example: Batch, cut_by: str | None
) -> tuple[LossFunction, str | None]:
    """Return the loss with what it counts, and a warning if that is not certain. Local, and without an effect.

    `cut_by` says why batches are computed in parts; None if they are not. Then a wrong count would be a wrong gradient:
    raises JobError if what the loss counts is left open and cannot be found out.
    """
    loss = computation.loss
    candidates = [loss] if not loss.is_assumed else _candidates(loss, example)
    agreeing, trials = candidates, []
    for trial in _trials(model, computation, example):
        trials.append(trial)
        agreeing = [one for one in agreeing if trial.agrees(one)]
        if len(agreeing) < 2 and len(trials) > 1:
            break
    if agreeing:
        # Candidates that weigh parts alike in all trials are the same for these data.
        weights = {tuple(trial.weight(one) for trial in trials) for one in agreeing}
        if (trials and len(weights) == 1) or not loss.is_assumed:
            return agreeing[0], None
        if cut_by is not None:
            raise JobError(f"what the model's own loss counts could not be found out. {_ADVICE}")
        return candidates[0], None
    what = "the model's own loss of a batch is not the mean of those of its parts"
    if not loss.is_assumed:
        return loss, f"{what}, weighted by loss.count: the result depends on how a batch is cut"
    if cut_by is not None:
        raise JobError(f"{what}, and with {cut_by} a batch is computed in parts. {_ADVICE}")
    return candidates[0], f"{what}: test_loss depends on evaluation.batch_size"


def _candidates(loss: LossFunction, example: Batch) -> list[LossFunction]:
    """Return what the loss may count, the likelier first."""
    by_samples = replace(loss, count=count_samples, is_assumed=False)
    if not isinstance(example.targets, Tensor) or example.targets.is_floating_point():
        return [by_samples]
    assert loss.ignored is not None
    counts: list[tuple[Callable[[Tensor], float], int]] = [(functools.partial(count_places, 0, loss.ignored), 0)]
    if example.targets.dim() > 1:
        counts.append((functools.partial(count_places, 1, loss.ignored), 1))
    labelled = [replace(loss, count=count, shift=shift, is_assumed=False) for count, shift in counts]
    return [*labelled, by_samples]


def _trials(model: nn.Module, computation: Computation, example: Batch) -> Iterator[_Trial]:
    """Yield trials of the model, then of one with other weights: a new model may give all samples the same loss.

    Several numbers of labels are ignored: with one of them candidates may happen to weigh parts alike.
    """
    plain = example.select(torch.tensor([0, 1 % example.num_samples, 0]))
    batches = [plain]
    ignored = computation.loss.ignored
    if ignored is not None and isinstance(example.targets, Tensor) and not example.targets.is_floating_point():
        num_labels = int((plain.targets[0] != ignored).sum())
        batches = [_with_ignored(plain, ignored, count) for count in sorted({1, num_labels // 2} - {0})]
    is_usable = False
    for is_changed in (False, True):
        tried = _with_other_weights(model) if is_changed else model
        for batch in [*batches, *([] if is_usable else [plain])]:
            trial = _try(tried, computation, batch)
            if trial is not None and trial.is_usable:  # not where a model takes no such label, say
                is_usable = True
                yield trial


def _with_ignored(batch: Batch, ignored: int, count: int) -> Batch:
    """Return a batch of whose first sample the last `count` labels are ignored."""
    targets = batch.targets.clone()
    places = (targets[0] != ignored).reshape(-1).nonzero()[:, 0]
    targets[:1].view(-1)[places[len(places) - count :]] = ignored
    return Batch(batch.inputs, targets)


@torch.no_grad()
def _try(model: nn.Module, computation: Computation, batch: Batch) -> _Trial | None:
    def loss_of(part: Batch) -> float:
        return float(model_loss(computation.outputs(model, part)))

    parts = batch.rows(0, 2), batch.rows(2, 3)
    with unchanged(model):
        model.eval()
        try:
            return _Trial(loss_of(batch), (loss_of(parts[0]), loss_of(parts[1])), parts)
        except CordeeError:
            raise
        except Exception:  # noqa: BLE001 - a label that the model does not take
            return None


@torch.no_grad()
def _with_other_weights(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(noise * max(0.1 * spread, 0.05))
    return other
