"""What a model is trained to make small.

A loss here is the *mean* over what it counts (samples, or tokens, each with its weight), together with how much it
counted. The count is what makes gradient accumulation and unequal workers equal to the whole batch: parts are weighted
by it, never averaged as if they were alike. A loss of the user's own may say what it counts; what it does not say is
assumed, and tried: by `find_uneven_parts` before training, and by `require_even_parts` on every part of a batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cordee.compute.outputs import model_loss, predictions
from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.errors import JobError, TrainingError, nearest
from cordee.core.references import Use, bind, construct, first_parameters, name_of, resolve


@dataclass(frozen=True)
class LossFunction:
    """`mean(outputs, targets)` is a scalar; `count(targets)` is what that mean is over: items, or their weights."""

    mean: Callable[[Any, Any], Tensor]
    count: Callable[[Any], float]
    ignored: int | None = None  # a label that neither the mean nor the accuracy takes in
    name: str = ""  # of a loss of the user's own
    is_assumed: bool = False  # what the loss counts is not known: that it counts samples, or labels, is assumed
    output: str | int | None = None  # which of a model's outputs are the predictions; None: the tensor, or the logits
    takes_outputs: bool = False  # `mean` is given all that the model returned, not the predictions alone
    argument: str | None = None  # the model computes the loss itself, and takes the targets by this name
    shift: int = 0  # predictions at a place of a sequence are of the label so many places on

    def of(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of what a model returned."""
        return self.mean(outputs if self.takes_outputs else self.predictions(outputs), targets)

    def predictions(self, outputs: Any) -> Tensor:
        """Return the predictions among what a model returned. Raises ModelError where there are none."""
        return outputs if self.output is None and isinstance(outputs, Tensor) else predictions(outputs, self.output)

    def keywords(self, targets: Any) -> dict[str, Any]:
        """Return what a model is given beside its inputs: the targets, where it computes the loss itself."""
        if self.argument is None or targets is None:
            return {}
        return dict(targets) if isinstance(targets, Mapping) else {self.argument: targets}

    def count_batch(self, batch: Batch) -> float:
        """Return what the mean over a batch is over. Where there are no targets it follows from the inputs."""
        return self.count(batch.inputs if batch.targets is None else batch.targets)

    def num_items(self, targets: Tensor) -> int:
        """Return how many labels an accuracy is over."""
        targets = targets[:, self.shift :] if self.shift else targets
        return targets.numel() if self.ignored is None else int((targets != self.ignored).sum())


def count_items(targets: Any) -> float:
    """Return the number of labels, which is that of tokens in sequences; numbers count once per sample.

    Nested targets count once per sample as well.
    """
    if not isinstance(targets, Tensor):
        return tree.num_rows(targets) or 0
    return len(targets) if targets.is_floating_point() else targets.numel()


def cross_entropy(
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weight: tuple[float, ...] = (),
    output: str | int | None = None,
) -> LossFunction:
    """Classes are the last dimension of the outputs; sequences count each token but the ignored ones.

    `weight` has a number for each class: labels count as much as their class weighs. `output` is which of several
    outputs to compare.
    """
    weights = torch.tensor(weight) if weight else None

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim > 2:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        used = None
        if weights is not None:
            # Not in 16 bits, which autocast's cross entropy does not compute in either.
            used = weights.to(outputs.device, torch.promote_types(outputs.dtype, torch.float32))
        return F.cross_entropy(outputs, targets, used, label_smoothing=label_smoothing, ignore_index=ignore_index)

    return LossFunction(mean, functools.partial(count_classes, weights, ignore_index), ignore_index, output=output)


def count_classes(weights: Tensor | None, ignored: int, targets: Tensor) -> float:
    """Return the sum of the labels' weights, which is their number without weights; those ignored have none."""
    if targets.is_floating_point():  # probabilities: torch's mean is over samples, whatever the weights
        return count_items(targets)
    is_counted = targets != ignored
    if weights is None:
        return int(is_counted.sum())
    return float(weights.to(targets.device, torch.float64)[targets[is_counted]].sum())


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., LossFunction]:
    def build(*, output: str | int | None = None) -> LossFunction:
        def mean(outputs: Tensor, targets: Tensor) -> Tensor:
            # (N, 1) against (N,) would broadcast to (N, N) without a warning.
            outputs = outputs.squeeze(-1) if outputs.ndim == targets.ndim + 1 else outputs
            targets = targets.squeeze(-1) if targets.ndim == outputs.ndim + 1 else targets
            if outputs.shape != targets.shape:
                raise ValueError("this loss compares number by number, so the shapes must be the same")
            # Under bf16 the outputs have 8 bits of precision and the targets 24: the difference keeps them.
            dtype = torch.promote_types(outputs.dtype, targets.dtype)
            return function(outputs.to(dtype), targets.to(dtype))

        return LossFunction(mean, count_items, output=output)

    return build


# The loss that a model computes itself, as those of transformers do: what it is the mean over is for the job to say, or
# is found out by trying (`training.model_loss`).

COUNTS = ("auto", "samples", "labels", "next_labels")


def own_of_model(
    *,
    count: str | Callable[..., Any] = "auto",
    argument: str = "labels",
    ignore_index: int = -100,
    output: str | int | None = None,
    python_path: Sequence[str] = (),
) -> LossFunction:
    """The model returns its loss: `outputs.loss`, `outputs["loss"]`, or the first of several outputs.

    It is given the targets by the name `argument`, or by their own names where they have such. `count` is what the loss
    is the mean over: "samples"; "labels" that are not `ignore_index`; "next_labels", the same but for the first of each
    sequence, where a model shifts them itself; or a function of the targets.
    """
    settings: dict[str, Any] = {"name": "model", "argument": argument, "output": output, "takes_outputs": True}
    if callable(count) or ":" in count:
        counted = _checked_count(resolve("loss.count", count, {}, python_path=python_path))
        return LossFunction(model_loss, counted, ignore_index, **settings)
    if count not in COUNTS:
        raise JobError(f"loss.count = {count!r} is not known{nearest(count, COUNTS)} Known: {', '.join(COUNTS)}")
    shift = int(count == "next_labels")
    counted = count_items if count in ("auto", "samples") else functools.partial(count_places, shift, ignore_index)
    if count == "samples":
        counted = count_samples
    return LossFunction(model_loss, counted, ignore_index, is_assumed=count == "auto", shift=shift, **settings)


def count_samples(targets: Any) -> float:
    return tree.num_rows(targets) or 0


def count_places(shift: int, ignored: int, targets: Tensor) -> float:
    """Return how many labels are not ignored, from the place `shift` of each sequence on."""
    counted = targets[:, shift:] if shift else targets
    return int((counted != ignored).sum())


BUILTIN_LOSSES: dict[str, Callable[..., LossFunction]] = {
    "cross_entropy": cross_entropy,
    "model": own_of_model,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "binary_cross_entropy": _elementwise(F.binary_cross_entropy_with_logits),
}


def make_loss(part: Use, python_path: Sequence[str] = ()) -> LossFunction:
    """Return the loss a job names.

    A user's own is a function (outputs, targets) -> mean, or a class of such modules ("torch.nn:SmoothL1Loss"). What
    the mean is over is known of torch's own; others say it by an attribute `count`, a function of the targets. Where
    they do not, it is the number of samples, or of labels.
    """
    target = resolve("loss", part.use, BUILTIN_LOSSES, python_path=python_path)
    if target in BUILTIN_LOSSES.values():
        provided = {"python_path": tuple(python_path)}
        built: LossFunction = bind("loss", target, part.args, provided)()
        return built
    args = _with_tensors(target, part.args)
    if inspect.isclass(target):
        made = construct("loss", part.use, bind("loss", target, args))
        if not callable(made):
            raise JobError(f"loss.use = {name_of(part.use)!r} makes a {type(made).__name__}, which cannot be called")
        return _own_loss(made, made, {}, part)
    if isinstance(target, nn.Module):
        if part.args:
            raise JobError("loss: a module that is already built takes no settings; give its class instead")
        return _own_loss(target, target, {}, part)
    return _own_loss(target, bind("loss", target, args, first_parameters(target, 2)), args, part)


def _own_loss(
    made: Callable[..., Any], mean: Callable[[Tensor, Tensor], Tensor], settings: Mapping[str, Any], part: Use
) -> LossFunction:
    """Return the loss `mean`, made of the object `made` and settings, with what is known of its count."""
    if isinstance(made, functools.partial):
        settings = {**made.keywords, **settings}
        made = made.func
    name, count = name_of(part.use), getattr(made, "count", None)
    # torch's own compare one tensor with one; what a person writes may look at everything that the model returned.
    takes_outputs = not _is_of_torch(made) or (isinstance(made, nn.Module) and not _is_of_torch(type(made)))
    if callable(count):
        ignored = getattr(made, "ignore_index", None)
        ignored = ignored if isinstance(ignored, int) else None
        return LossFunction(mean, _checked_count(count), ignored, name, takes_outputs=takes_outputs)
    forward = getattr(type(made), "forward", None)
    if forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        weights, ignored = getattr(made, "weight", None), int(getattr(made, "ignore_index", -100))
    elif made in (F.cross_entropy, F.nll_loss):
        weights, ignored = settings.get("weight"), int(settings.get("ignore_index", -100))
    else:
        return LossFunction(mean, count_items, None, name, is_assumed=True, takes_outputs=takes_outputs)
    return LossFunction(mean, functools.partial(count_classes, weights, ignored), ignored, name)


def _is_of_torch(made: Any) -> bool:
    return (getattr(made, "__module__", None) or "").startswith("torch.")


def _checked_count(count: Callable[[Any], Any]) -> Callable[[Any], float]:
    def checked(targets: Any) -> float:
        value = float(count(targets))
        if not 0.0 <= value < math.inf:
            raise JobError(f"the loss's count(targets) gave {value}: it must be the sum of the weights, 0 or more")
        return value

    return checked


def _with_tensors(target: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one of torch's own losses with weights as the tensors it wants; a file has lists."""
    return {
        key: torch.tensor(value)
        if _is_of_torch(target) and key in ("weight", "pos_weight") and isinstance(value, (list, tuple))
        else value
        for key, value in settings.items()
    }


@torch.no_grad()
def find_uneven_parts(loss: LossFunction, outputs: Any, targets: Any) -> str | None:
    """Return how the loss of this batch differs from that of its parts weighted by their counts; None if it does not.

    Local, and without an effect: random numbers and the state of a loss that is a module are put back.
    """
    size = tree.num_rows(targets) or 0
    return _find_uneven(loss, outputs, targets, sorted({1, size // 3, size // 2} - {0, size}))


@torch.no_grad()
def require_even_parts(loss: LossFunction, outputs: Any, targets: Any) -> None:
    """Raise TrainingError if what a loss counts is assumed, and wrong for this part of a batch.

    Labels that a loss leaves out may be rare, so every part is tried: its first sample and the others against all of
    it, which differ by whatever is not counted. For where a batch is computed in parts.
    """
    if not loss.is_assumed or (tree.num_rows(targets) or 0) < 2:
        return
    if (found := _find_uneven(loss, detached(outputs), targets, [1])) is not None:
        what = f"the loss {loss.name!r} of a part of a batch is not the mean of those of its own parts: {found}"
        raise TrainingError(f"{what}. {ADVICE}")


def detached(outputs: Any) -> Any:
    """Return what a model returned without its graph, where it can be taken apart; else as it is."""
    return tree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


ADVICE = (
    "So the loss must say what it is the mean over. Give it an attribute count, a function of the targets: for class "
    "weights loss.count = lambda targets: weight[targets].sum(), for a label that is ignored "
    "loss.count = lambda targets: (targets != ignored).sum(). 'cross_entropy' has weight and ignore_index of its own. "
    "A sum must be made a mean (reduction = 'mean')"
)


def find_trained(loss: LossFunction) -> list[str]:
    """Return the names of parameters of a loss that is a module, which no optimizer gets."""
    own = loss.mean
    return [name for name, value in own.named_parameters() if value.requires_grad] if isinstance(own, nn.Module) else []


@torch.no_grad()
def find_state(loss: LossFunction, outputs: Any, targets: Any) -> str | None:
    """Return what a loss keeps of a batch, by name, if that changes what it computes of the next; else None.

    Local, and without an effect: a copy is tried, with the same batch and random numbers twice.
    """
    if inspect.isroutine(getattr(loss.mean, "func", loss.mean)):
        return None  # a function, not an object
    random_state = torch.get_rng_state()
    try:
        own: Any = copy.deepcopy(loss.mean)
        outputs = outputs if loss.takes_outputs else loss.predictions(outputs)
        before, first = _values_of(own), float(own(outputs, targets))
        after = _values_of(own)
        torch.set_rng_state(random_state)
        is_same = float(own(outputs, targets)) == first or not math.isfinite(first)
    except Exception:  # noqa: BLE001 - a loss for certain shapes only: it will say so itself where it is computed
        return None
    finally:
        torch.set_rng_state(random_state)
    changed = (name for name in {**before, **after} if before.get(name) != after.get(name))
    return None if is_same else next(changed, None)


def _values_of(own: Any) -> dict[str, Any]:
    """Return the numbers and tensors that an object, or a module and those inside, holds."""
    held: dict[str, Any] = dict(getattr(own, "__dict__", {}))
    if isinstance(own, nn.Module):
        for path, module in own.named_modules():
            held |= {f"{path}.{name}" if path else name: value for name, value in vars(module).items()}
        held |= dict(own.named_buffers())
    tensors = {name: (value.shape, value.tolist()) for name, value in held.items() if isinstance(value, Tensor)}
    return tensors | {name: value for name, value in held.items() if isinstance(value, bool | int | float)}


def _find_uneven(loss: LossFunction, outputs: Any, targets: Any, cuts: Sequence[int]) -> str | None:
    if not inspect.isroutine(getattr(loss.mean, "func", loss.mean)):  # an object, which computing may change
        with contextlib.suppress(Exception):  # what cannot be copied is tried itself
            loss = copy.deepcopy(loss)
    random_state = torch.get_rng_state()
    size = tree.num_rows(targets) or 0
    try:
        whole, total = loss.of(outputs, targets), loss.count(targets)
        if not total or not torch.isfinite(whole):
            return None
        # Sums of single precision in another order differ by about 1e-6.
        precision = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 3e-2
        for cut in cuts:
            bounds = ((0, cut), (cut, size))
            parts = [(_rows_of(outputs, size, *part), tree.rows(targets, *part)) for part in bounds]
            counts = [loss.count(part) for _, part in parts]
            means = [float(loss.of(*part)) if count else 0.0 for part, count in zip(parts, counts, strict=True)]
            joined = sum(mean * count for mean, count in zip(means, counts, strict=True)) / max(sum(counts), 1e-30)
            largest = max(abs(float(whole)), *map(abs, means))
            if not abs(joined - float(whole)) <= precision * largest + 1e-9:
                if float(loss.of(outputs, targets)) != float(whole):
                    return None  # it draws random numbers: two losses of the same samples differ as well
                return (
                    f"{size} samples give {float(whole):.6g}, the first {cut} and the other {size - cut}, weighted by "
                    f"what they count ({counts[0]:g} and {counts[1]:g}), {joined:.6g}"
                )
    except JobError:
        raise
    except Exception:  # noqa: BLE001 - a loss for certain shapes only: it will say so itself where it is computed
        return None
    finally:
        torch.set_rng_state(random_state)
    return None


def _rows_of(outputs: Any, size: int, start: int, stop: int) -> Any:
    """Return the outputs of some of `size` samples. What has no row for each sample is left whole."""
    if isinstance(outputs, Tensor):
        return outputs[start:stop]
    return tree.map_leaves(
        lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else leaf, outputs
    )
