"""Whether model, data and loss fit together: tried on two samples, to say before training what does not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cordee.compute import Computation, LossFunction
from cordee.compute.computation import is_image
from cordee.compute.losses import ADVICE, count_places, detached, find_state, find_trained, find_uneven_parts
from cordee.compute.outputs import describe
from cordee.core import Batch, Job, tree
from cordee.core.batch import choose_call
from cordee.core.errors import CordeeError, JobError, ModelError
from cordee.core.references import name_of
from cordee.data import ArraySource, GrowingSource, Splits
from cordee.data.datasets import IterableSource
from cordee.strategies.strategy import Requirements
from cordee.training.model_loss import choose_count


def fit(
    job: Job, splits: Splits, model: nn.Module, computation: Computation, needs: Requirements
) -> tuple[Computation, tuple[Tensor, Tensor], str | None]:
    """Return how this model is computed on these data, predictions and targets to try metrics with, and a warning.

    Local.

    Raises ModelError or JobError for what does not fit.
    """
    example = _on_device_of(model, example_of(splits))
    if computation.memory_format != "contiguous" and not any(map(is_image, tree.leaves(example.inputs))):
        raise JobError(
            f"training.memory_format = '{computation.memory_format}' is for images, and the inputs of data "
            f"{splits.name!r} are {tree.describe(example.inputs)}: leave it out"
        )
    computation = _choose_call(job, model, computation, example)
    outputs = _check_fit(job, splits, model, computation, example)
    loss, warning = computation.loss, None
    if loss.argument is not None:
        loss, warning = choose_count(model, computation, example, needs.cut_by(job))
    else:
        warning = _check_parts(job, splits, loss, outputs, example, needs)
    has_accuracy = _measures_accuracy(computation, loss, outputs, example.targets)
    computation = replace(computation, loss=loss, counts_classes=has_accuracy)
    return computation, _to_measure(job, splits, computation, outputs, example.targets), warning


def _to_measure(
    job: Job, splits: Splits, computation: Computation, outputs: Any, targets: Any
) -> tuple[Tensor, Tensor]:
    """Return predictions and targets to try metrics with. Raises JobError where metrics need some, and none are."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and computation.loss.argument is None:
        tried = next(_target_samples(splits, outputs, targets))
        return outputs[torch.arange(len(tried)) % len(outputs)], tried
    if not job.metrics:
        return torch.empty(0), torch.empty(0)
    if not isinstance(targets, Tensor):
        raise JobError(
            f"[metrics] compare predictions with one tensor of targets, and these are {describe(targets)}: measure in "
            "on_evaluation of a callback, which has the model and the team, and record with context.log"
        )
    return computation.compared(detached(outputs), targets)


def example_of(splits: Splits) -> Batch:
    """Return a batch of the training set, of two samples at most."""
    if isinstance(splits.train, (IterableSource, GrowingSource)):
        return splits.train.example  # reading on would lose samples
    assert splits.train.num_samples is not None
    return splits.train.gather(torch.arange(min(2, splits.train.num_samples)))


def model_name(job: Job) -> str:
    return repr(job.model.use if isinstance(job.model.use, str) else name_of(job.model.use))


def _choose_call(job: Job, model: nn.Module, computation: Computation, example: Batch) -> Computation:
    """Return how this model is given these inputs. Raises ModelError where it does not take them."""
    keywords = list(computation.loss.keywords(example.targets))
    if isinstance(example.inputs, Tensor) and not keywords:
        return computation
    return replace(computation, call=choose_call(model, example.inputs, keywords, model_name(job)))


def require_targets(job: Job, splits: Splits, loss: LossFunction) -> None:
    """Raise JobError where the data has no targets, and the loss needs some."""
    if loss.argument is None and example_of(splits).targets is None:
        raise JobError(
            f"data {splits.name!r} has no targets, and loss.use = {name_of(job.loss.use)!r} compares with targets: "
            "name them (data.target), or have the model compute its loss (loss.use = 'model')"
        )


def _check_fit(job: Job, splits: Splits, model: nn.Module, computation: Computation, batch: Batch) -> Any:
    """Try the model and the loss, and return the outputs."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # The model is where it was built: strategies move it to its device.
            outputs = computation.outputs(model, replace(computation, device=_device_of(model)).to_device(batch))
    except Exception as error:
        contiguous = replace(computation, memory_format="contiguous")
        if computation.memory_format != "contiguous" and _computes(model, contiguous, batch):
            raise JobError(
                f"training.memory_format = '{computation.memory_format}' does not go with the model {model_name(job)}: "
                f"{error}. Set it to 'contiguous', or write reshape() instead of view() in the model"
            ) from error
        shown = tuple(batch.inputs.shape[1:]) if isinstance(batch.inputs, Tensor) else splits.input_shape
        raise ModelError(
            f"the model {model_name(job)} cannot compute inputs of shape {shown} from data {splits.name!r}: {error}"
        ) from error
    finally:
        model.train(was_training)
    loss, targets = computation.loss, batch.targets
    if not loss.takes_outputs:
        try:
            predicted = loss.predictions(outputs)
        except ModelError as error:
            raise ModelError(f"{error} (model {model_name(job)})") from None
        _check_classes(job, splits, batch, predicted)
    elif isinstance(outputs, Tensor) and loss.argument is None:
        _check_classes(job, splits, batch, outputs)
    try:
        with warnings.catch_warnings():
            # torch only warns when (N, 1) meets (N,), and then compares every output with every target.
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            value = loss.of(outputs, targets)
    except CordeeError:
        raise
    except Exception as error:
        raise ModelError(
            f"the loss cannot compare outputs of shape {_shape_of(outputs)} with targets of shape "
            f"{_shape_of(targets)}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.ndim != 0:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"the loss gives {kind}; it must give one number, the mean over the batch")
    return outputs


def _computes(model: nn.Module, computation: Computation, batch: Batch) -> bool:
    try:
        with torch.no_grad():
            computation.outputs(model, batch)
    except Exception:  # noqa: BLE001 - whatever the model raises
        return False
    return True


def _check_classes(job: Job, splits: Splits, batch: Batch, predicted: Tensor) -> None:
    """Raise ModelError if predictions and targets cannot be classes of the data."""
    found = tuple(predicted.shape)
    has_numbers = isinstance(batch.targets, Tensor) and batch.targets.ndim == 1 and batch.targets.is_floating_point()
    if splits.num_classes is None and has_numbers and job.loss.use == "cross_entropy":
        raise ModelError(
            f"loss.use = 'cross_entropy' compares classes, and the targets of data {splits.name!r} are numbers: "
            "set loss.use = 'mse', say"
        )
    if splits.num_classes is not None and (predicted.ndim < 2 or found[-1] < splits.num_classes):
        raise ModelError(
            f"the model {model_name(job)} gives outputs of shape {found} for {batch.num_samples} samples, but data "
            f"{splits.name!r} has {splits.num_classes} classes: the last dimension must have at least "
            f"{splits.num_classes} values"
        )


def _measures_accuracy(computation: Computation, loss: LossFunction, outputs: Any, targets: Any) -> bool:
    """Return whether predictions can be compared with labels one by one, and it is known which with which."""
    if isinstance(outputs, Tensor) and loss.argument is None:
        return computation.counts_classes
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return False
    if loss.takes_outputs and targets.dim() > 1:
        # Of sequences it is not known whether the loss shifts them, unless its count says so.
        count = loss.count
        if not (isinstance(count, functools.partial) and count.func is count_places):
            return False
    try:
        return loss.predictions(outputs).shape[:-1] == targets.shape
    except ModelError:
        return False  # a loss that is given all outputs needs none of that name


def _shape_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else describe(value)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _on_device_of(model: nn.Module, batch: Batch) -> Batch:
    device = _device_of(model)
    return batch.map(lambda tensor: tensor.to(device))


def _check_parts(
    job: Job, splits: Splits, loss: LossFunction, outputs: Any, example: Batch, needs: Requirements
) -> str | None:
    """Refuse a loss whose parts do not make the whole where batches are computed in parts; else return a warning.

    The same for one that keeps something from batch to batch. One with parameters to train is refused everywhere.
    """
    if not loss.name:  # built in
        return None
    if trained := find_trained(loss):
        raise JobError(
            f"the loss {loss.name!r} has parameters to train ({', '.join(trained)}), and the optimizer only has those "
            "of the model: put them into the model, or set requires_grad_(False)"
        )
    if (kept := find_state(loss, detached(outputs), example.targets)) is not None:
        what = f"the loss {loss.name!r} keeps {kept!r} from batch to batch, which is not saved"
        if job.strategy.workers > 1:
            raise JobError(f"{what}, and every worker would keep its own: put it into the model, as a buffer")
        return f"{what}: a resumed run begins with it as it was at the start. Put it into the model, as a buffer"
    cut_by = needs.cut_by(job)
    if loss.is_assumed and cut_by and not isinstance(outputs, Tensor) and not tree.is_node(outputs):
        raise JobError(
            f"what the loss {loss.name!r} counts cannot be tried, for the model returns {describe(outputs)}, which "
            f"cannot be cut into samples. With {cut_by} a batch is computed in parts. {ADVICE}"
        )
    for tiled, targets in _tried(splits, outputs, example):
        found = find_uneven_parts(loss, tiled, targets)
        if found is None:
            continue
        what = f"the loss {loss.name!r} of a batch is not the mean of those of its parts: {found}"
        if cut_by is not None:
            raise JobError(f"{what}. With {cut_by} a batch is computed in parts. {ADVICE}")
        return f"{what}; test_loss depends on evaluation.batch_size. Give the loss an attribute count if it is a mean"
    return None


def _tried(splits: Splits, outputs: Any, example: Batch) -> Iterator[tuple[Any, Any]]:
    """Yield outputs and targets to try a loss with: of the data, and of all classes as far as that is not too much."""
    size, targets = example.num_samples, example.targets

    def rows(leaf: Any, count: int) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
        return leaf.detach()[torch.arange(count) % size] if has_rows else leaf

    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        yield tuple(tree.map_leaves(lambda leaf: rows(leaf, 8), part) for part in (outputs, targets))
        return
    for values in _target_samples(splits, outputs, targets):
        yield rows(outputs, len(values)), values.to(outputs.device)


def _target_samples(splits: Splits, outputs: Tensor, example: Tensor) -> Iterator[Tensor]:
    most = max(2, min(256, (4 << 20) // max(1, outputs[0].numel())))  # rows of outputs that are made for it
    if isinstance(splits.train, ArraySource):
        size = len(splits.train.targets)
        yield splits.train.targets[torch.linspace(0, size - 1, min(most, size)).long()]
    else:
        yield example[torch.arange(min(most, 8)) % len(example)]
    if splits.num_classes is not None:
        per_sample = max(1, example[0].numel())
        num_rows = max(2, min(most, -(-splits.num_classes // per_sample)))
        labels = torch.linspace(0, splits.num_classes - 1, num_rows * per_sample, dtype=torch.float64)
        yield labels.round().long().view(num_rows, *example.shape[1:])
