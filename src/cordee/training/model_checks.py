"""What a model does that has another effect with several workers than alone: found by trying it, before training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from cordee.compute import Computation, refuse_uneven_hooks
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.models.effects import changed_parameter, find_kept, mixes_samples
from cordee.strategies.strategy import Requirements


def check_model(job: Job, model: nn.Module, computation: Computation, example: Batch, needs: Requirements) -> list[str]:
    """Return warnings. Raises a CordeeError for a model that cannot give what it gives alone. Local, no effect."""
    device = next((p.device for p in model.parameters()), "cpu")
    example = example.map(lambda tensor: tensor.to(device))
    return list(_check(job, model, computation, example, needs))


def _check(job: Job, model: nn.Module, computation: Computation, example: Batch, needs: Requirements) -> Iterator[str]:
    how = needs.cut_by(job)
    if how is not None:
        refuse_uneven_hooks(model, how)
    _refuse_layers_of_keras(job, model)
    compute = functools.partial(computation.outputs, model, example)
    if job.strategy.workers > 1 and (name := changed_parameter(model, compute)):
        raise JobError(
            f"a forward pass of the model changes its parameter '{name}', and every worker would have its own: workers "
            "share changes of buffers (register_buffer) and what the optimizer changes. Layers of Keras do so "
            "(BatchNormalization, Dropout): use those of torch.nn in their place, or one worker"
        )
    if warning := _check_kept(job, model, compute):
        yield warning
    if how is not None and not job.training.reproducible and _mixes_samples(model, example):
        yield (
            f"what the model computes for a sample depends on the other samples of the batch, and {how} computes a "
            "batch in parts: the result is another one than that of the whole batch"
        )


def _refuse_layers_of_keras(job: Job, model: nn.Module) -> None:
    """Raise JobError for layers of Keras that would not train: Keras does not look at `model.training`.

    Where they are told, their statistics and random numbers are parameters, of which every worker would have its own.
    """
    is_told = not any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)
    if is_told and job.strategy.workers == 1:
        return
    pending: list[Any] = list(model.modules())
    while pending:
        layer = pending.pop()
        kind = type(layer)
        if not kind.__module__.startswith("keras."):
            continue
        pending += getattr(layer, "layers", ())  # which are no modules of each other
        if kind.__name__.endswith(_DEAF):
            raise JobError(
                f"the model has a layer {kind.__name__} of Keras, which does nothing in training, since Keras does not "
                "look at model.train(): use layers of torch.nn. Or, with one worker, call the model in the forward of "
                "an nn.Module of your own, as self.model(x, training=self.training)"
            )


_DEAF = ("Dropout", "BatchNormalization", "GaussianNoise")


def _mixes_samples(model: nn.Module, example: Batch) -> bool:
    """Whether a model of one tensor computes a sample from others too; models of several inputs are not looked at."""
    return isinstance(example.inputs, Tensor) and mixes_samples(model, example.inputs)


def _check_kept(job: Job, model: nn.Module, compute: Callable[[], Any]) -> str | None:
    """Refuse a model that keeps what its next pass depends on outside of buffers, where workers have copies of it.

    Alone it is a warning, as is what has no effect that can be seen.
    """
    kept = find_kept(model, compute)
    if kept is None or (job.strategy.workers == 1 and not kept.has_effect):
        return None
    what = f"{kept.what}, which is not saved"
    advice = "Keep it in a buffer (register_buffer)"
    if job.strategy.workers == 1:
        return f"{what}: a resumed run begins with it as it was at the start. {advice}"
    if kept.has_effect and (job.training.reproducible or not kept.is_generator):
        raise JobError(f"{what}, and every worker would have its own: {advice[0].lower()}{advice[1:]}")
    return f"{what}, and every worker has its own. {advice} if what the model computes depends on it"
