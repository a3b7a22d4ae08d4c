"""The metrics that a job names in `[metrics]`: built-in ones, those of torchmetrics, and the user's own."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cordee.compute.metrics import (
    ALWAYS_MEASURED,
    BUILTIN_METRICS,
    Direction,
    Metric,
    RowMetric,
    SummedMetric,
    Task,
    ValueProblemError,
    make_builtin,
)
from cordee.core.errors import CordeeError, JobError, TrainingError, nearest
from cordee.core.references import Use, bind, construct, first_parameters, name_of, resolve

_TORCHMETRICS = "torchmetrics."


@dataclass(frozen=True)
class NamedMetric:
    """A metric of the job."""

    name: str
    metric: Metric

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summands of a part. Raises TrainingError that names the metric."""
        assert isinstance(self.metric, SummedMetric)
        with _naming(self.name), _refusing_changes(outputs, targets):
            return self.metric.measure(outputs, targets)

    def finish(self, sums: Tensor) -> float:
        assert isinstance(self.metric, SummedMetric)
        with _naming(self.name):
            return self.metric.finish(sums)

    def compute(self, outputs: Tensor, targets: Tensor) -> float:
        assert isinstance(self.metric, RowMetric)
        with _naming(self.name), _refusing_changes(outputs, targets):
            return self.metric.compute(outputs, targets)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, what a metric raises becomes a TrainingError that names it."""
    try:
        yield
    except CordeeError:
        raise
    except Exception as error:
        what = f": {error}" if isinstance(error, ValueProblemError) else f" raised {type(error).__name__}: {error}"
        raise TrainingError(f"metric '{name}'{what}") from error


@contextlib.contextmanager
def _refusing_changes(*tensors: Tensor) -> Iterator[None]:
    """Inside, tensors that all metrics are given stay as they are. Raises ValueProblemError."""
    watched = [tensor for tensor in tensors if not tensor.is_inference()]
    before = [tensor._version for tensor in watched]
    yield
    if [tensor._version for tensor in watched] != before:
        raise ValueProblemError(
            "it changes the outputs or targets that it is given in place, and other metrics are given them too: "
            "let it compute with a copy (outputs.clone())"
        )


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def make_metrics(
    parts: Mapping[str, Use], task: Task, example_targets: Tensor, python_path: Sequence[str] = ()
) -> tuple[NamedMetric, ...]:
    """Return the metrics a job names. Raises JobError for one that is not known, or not for this kind of targets."""
    return tuple(
        NamedMetric(name, _make_metric(name, part, task, example_targets, python_path)) for name, part in parts.items()
    )


@torch.no_grad()
def try_metrics(metrics: Sequence[NamedMetric], outputs: Tensor, targets: Tensor) -> list[str]:
    """Have each metric measure some samples, and so learn how many numbers it sums; return warnings.

    Raises JobError for one that cannot. What is computed of all samples may refuse a few of them: that is a warning.
    """
    found = []
    for metric in metrics:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two samples: torchmetrics misses the other classes among them
                if isinstance(metric.metric, SummedMetric):
                    metric.metric.num_sums = len(metric.measure(outputs, targets))
                    metric.finish(metric.measure(outputs, targets))
                else:
                    metric.compute(outputs, targets)
        except TrainingError as error:
            if isinstance(metric.metric, SummedMetric) or "and must give one number" in str(error):
                raise JobError(str(error)) from error
            found.append(f"{error} ({len(targets)} samples were tried; all of the test set are used)")
    return found


def _make_metric(name: str, part: Use, task: Task, example: Tensor, python_path: Sequence[str]) -> Metric:
    section = f"metrics.{name}"
    if not _NAME.fullmatch(name) or name == "loss":
        why = "is always measured" if name == "loss" else "is no name (letters, digits, '_' and '-', a letter first)"
        raise JobError(f"[metrics]: '{name}' {why}: choose another name")
    args = dict(part.args)
    better = args.pop("better", None)
    if better not in (None, "higher", "lower"):
        raise JobError(f"{section}.better = {better!r} must be 'higher' or 'lower'")
    use = part.use
    if isinstance(use, str) and (found := re.fullmatch(r"top_?(\d+)", use)):
        use, args = "top_k", {**args, "k": int(found[1])}
    if isinstance(use, str) and use in BUILTIN_METRICS:
        made = make_builtin(use, args, task, example, section)
        if better not in (None, made.better):
            raise JobError(f"{section}.better = {better!r}: of '{use}', {made.better} is better; leave it out")
        return made
    if isinstance(use, str) and use.startswith(_TORCHMETRICS) and ":" not in use:
        module, _, attribute = use.rpartition(".")
        use = f"{module}:{attribute}"
    known: dict[str, Callable[..., Any]] = dict.fromkeys([*BUILTIN_METRICS, "top_3"], lambda: None)
    try:
        target = resolve(section, use, known, python_path=python_path)
    except JobError as error:
        raise JobError(str(error).replace(f"{section}.use", section, 1)) from error.__cause__
    metric = _make_own(section, use, target, args, task)
    if better is not None:
        metric.better = better
    return metric


def _make_own(section: str, use: Any, target: Any, args: Mapping[str, Any], task: Task) -> Metric:
    if _is_torchmetric(target):
        if args:
            raise JobError(f"{section}: a metric that is already built takes no settings; give its class instead")
        return _adopt_torchmetric(copy.deepcopy(target), task)
    if inspect.isclass(target):
        provided: dict[str, Any] = {}
        if task.num_classes is not None:
            provided = {"num_classes": task.num_classes, "task": "multiclass"}
        elif task.is_binary:
            provided = {"task": "binary"}
        made = construct(section, use, bind(section, target, args, provided))
        if _is_torchmetric(made):
            return _adopt_torchmetric(made, task)
        if not callable(made):
            raise JobError(f"{section} = {name_of(use)!r} makes a {type(made).__name__}, which cannot be called")
        return _own_function(made, made)
    return _own_function(target, bind(section, target, args, first_parameters(target, 2)))


def _own_function(target: Any, function: Callable[..., Any]) -> RowMetric:
    return RowMetric(lambda outputs, targets: _as_number(function(outputs, targets)), _direction_of(target))


def _adopt_torchmetric(metric: Any, task: Task) -> Metric:
    for part in _torchmetrics_in(metric):  # each would gather from all workers itself, in the middle of what they do
        part.sync_on_compute = part._to_sync = part.dist_sync_on_step = False
    arrange = _arrange_for_torchmetrics(metric, task)
    if TorchMetric.fits(metric):
        return TorchMetric(metric, arrange)
    return RowMetric(functools.partial(_compute_torchmetric, metric, arrange), _direction_of(metric))


def require_known(name: str, key: str, metrics: Sequence[NamedMetric]) -> Direction:
    """Return whether higher or lower is better of the metric that a setting names. Raises JobError."""
    known = {metric.name: metric.metric.better for metric in metrics}
    if name in known:
        better = known[name]
        if better is None:
            raise JobError(
                f"{key} names the metric '{name}', and it is not known whether higher or lower values of it are "
                f"better: set metrics.{name} = {{use = …, better = 'higher'}} or 'lower'"
            )
        return better
    if name in ALWAYS_MEASURED:
        return ALWAYS_MEASURED[name]
    names = [*known, *ALWAYS_MEASURED]
    raise JobError(f"{key} names the metric '{name}', which is not measured{nearest(name, names)}: add it to [metrics]")


# From other libraries, and of the user's own.


class TorchMetric(SummedMetric):
    """A metric of torchmetrics all of whose states are sums."""

    def __init__(self, metric: Any, arrange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._metric, self._arrange = metric, arrange
        self._shapes: list[torch.Size] = []  # of the states; those of some metrics follow from the first samples
        self.better = _direction_of(metric)

    @staticmethod
    def fits(metric: Any) -> bool:
        has_others = len(_torchmetrics_in(metric)) > 1  # whose states are not its own
        return (
            bool(metric._reductions)
            and not has_others
            and all(
                isinstance(default, Tensor)
                and not bool(default.any())
                and getattr(metric._reductions[name], "__name__", "") == "dim_zero_sum"
                for name, default in metric._defaults.items()
            )
        )

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        metric = self._metric.to(outputs.device)
        metric.reset()
        metric.update(*self._arrange(outputs, targets))
        states = [getattr(metric, name) for name in metric._defaults]
        self._shapes = [state.shape for state in states]
        return torch.cat([state.double().reshape(-1).cpu() for state in states])

    def finish(self, sums: Tensor) -> float:
        metric = self._metric.to("cpu")
        metric.reset()
        parts = torch.split(sums, [shape.numel() for shape in self._shapes])
        for (name, default), shape, part in zip(metric._defaults.items(), self._shapes, parts, strict=True):
            setattr(metric, name, part.to(default.dtype).view(shape))
        metric._update_count = 1  # else it warns that there was nothing
        return _as_number(metric.compute())


def _compute_torchmetric(
    metric: Any, arrange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], outputs: Tensor, targets: Tensor
) -> float:
    metric.to("cpu").reset()
    metric.update(*arrange(outputs, targets))
    return _as_number(metric.compute())


def _arrange_for_torchmetrics(metric: Any, task: Task) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what puts outputs and targets into the form that torchmetrics documents."""
    # Classes are the second dimension there, and the last one here; but for metrics of text.
    is_text = type(metric).__module__.startswith("torchmetrics.text.")

    def arrange(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if task.num_classes is not None and not is_text and outputs.ndim > 2:
            outputs = outputs.movedim(-1, 1)
        if task.num_classes is None and outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        if task.is_binary:
            targets = targets.long()
        return outputs.float() if outputs.is_floating_point() else outputs, targets

    return arrange


def _is_torchmetric(value: Any) -> bool:
    return any(base.__module__ == "torchmetrics.metric" for base in type(value).__mro__)


def _torchmetrics_in(metric: Any) -> list[Any]:
    """Return the metric and those that it is made of, as sums and wrappers of metrics are."""
    return [part for part in metric.modules() if _is_torchmetric(part)]


def _direction_of(value: Any) -> Direction | None:
    """Return what an object says of itself, as torchmetrics do."""
    higher = getattr(value, "higher_is_better", None)
    return None if higher is None else ("higher" if higher else "lower")


def _as_number(value: Any) -> float:
    """Return one number. Raises ValueError for anything else."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueProblemError(
                f"it gives a tensor of shape {tuple(value.shape)}, and must give one number (for a metric that has one "
                "for each class, set average = 'macro', say)"
            )
        value = value.item()
    if isinstance(value, Mapping | Sequence) or value is None or isinstance(value, str):
        raise ValueProblemError(f"it gives a {type(value).__name__}, and must give one number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueProblemError(f"it gives a {type(value).__name__}, and must give one number") from None
