"""From the samples of a Dataset to a batch: which parts of a sample are inputs and targets, and how they are stacked.

A sample is a pair (input, target), a longer tuple whose last part is the target, or a dict or dataclass, whose target
has a name. Input and target may be nested themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.errors import DataError, nearest
from cordee.data.order import preserved_generators, seed_generators
from cordee.data.source import check_classes, ready_inputs, ready_targets

TARGET_NAMES = ("labels", "label", "target", "targets")  # of a dict, where the job names none


@dataclasses.dataclass(frozen=True)
class SampleFormat:
    """How samples are read. The same for all splits of a data set."""

    inputs: tuple[str, ...] | None = None  # of a dict; None: all but the targets
    target: tuple[str, ...] | None = None  # None: the first of TARGET_NAMES that there is; (): none
    collate: Callable[[list[Any]], Any] | None = None  # makes a batch of samples, in place of stacking

    def split(self, item: Any, name: str) -> tuple[Any, Any]:
        """Return a sample, or a batch that was collated, as (inputs, targets). DataError that says what it is not."""
        if _is_named(item):
            return self._split_names({str(key): value for key, value in tree.children(item)}, name)
        if self.inputs is not None or self.target is not None:
            given = "data.inputs" if self.inputs is not None else "data.target"
            raise DataError(f"{given} names parts of a dict, and {name} is {described(item)}: remove the setting")
        if isinstance(item, (tuple, list)) and len(item) == 2:
            return item[0], item[1]
        if isinstance(item, tuple) and len(item) > 2:
            return tuple(item[:-1]), item[-1]
        raise DataError(
            f"{name} must be a pair (input, target), a tuple of inputs with the target last, a dict or a dataclass; "
            f"the dataset gave {described(item)}"
        )

    def _split_names(self, item: Mapping[str, Any], name: str) -> tuple[Any, Any]:
        target = self.target
        if target is None:
            taken = self.inputs or ()
            target = tuple(key for key in TARGET_NAMES if key in item and key not in taken)[:1]
        inputs = tuple(key for key in item if key not in target) if self.inputs is None else self.inputs
        for setting, keys in (("inputs", inputs), ("target", target)):
            for key in keys:
                if key not in item:
                    raise DataError(
                        f"data.{setting} names {key!r}, and {name} has none{nearest(key, list(item))} "
                        f"(it has: {', '.join(map(str, item))})"
                    )
        if not inputs:
            raise DataError(f"{name} has nothing but its target {target[0]!r}: a model needs inputs")
        targets = {key: item[key] for key in target}
        return {key: item[key] for key in inputs}, (targets or None) if len(target) != 1 else targets[target[0]]

    def batch(
        self,
        samples: Sequence[Any],
        numbers: Sequence[int],
        what: str,
        num_classes: int | None = None,
        ignored: int | None = None,
        seed: int = 0,
    ) -> Batch:
        """Return samples as one batch, in the types a model takes; DataError if they do not fit together.

        `numbers` name the samples in messages. What `collate` draws follows from `seed`.
        """
        if self.collate is not None:
            inputs, targets = self._collated(list(samples), what, seed)
        else:
            pairs = [self.split(item, f"sample {n} of {what}") for item, n in zip(samples, numbers, strict=True)]
            inputs = _stacked([pair[0] for pair in pairs], numbers, f"the inputs of {what}")
            has_targets = not _is_named(samples[0]) or any(pair[1] is not None for pair in pairs)
            targets = _stacked([p[1] for p in pairs], numbers, f"the targets of {what}") if has_targets else None
        made = Batch(ready_inputs(inputs), ready_targets(targets))
        _check_rows(made, len(samples), what)
        if num_classes is not None and isinstance(made.targets, Tensor) and not made.targets.is_floating_point():
            check_classes(made.targets, num_classes, what, numbers, ignored)
        return made

    def _collated(self, samples: list[Any], what: str, seed: int) -> tuple[Any, Any]:
        assert self.collate is not None
        with preserved_generators():
            seed_generators(seed)
            try:
                made = self.collate(samples)
            except Exception as error:
                raise DataError(
                    f"data.collate raised {type(error).__name__} for {len(samples)} samples of {what}: {error}"
                ) from error
        name = f"what data.collate made of {what}"
        inputs, targets = self.split(made, name)
        return _as_tensors(inputs, f"the inputs in {name}"), _as_tensors(targets, f"the targets in {name}")


PAIRS = SampleFormat()  # what samples are where the job says nothing


def _stacked(values: Sequence[Any], numbers: Sequence[int], what: str) -> Any:
    """Return values of several samples, which are built alike, as one tree with a row for each."""
    first = values[0]
    if isinstance(first, Tensor) or not tree.is_node(first) or _is_list_of_numbers(first):
        return _stacked_leaf(values, numbers, what)
    names = [name for name, _ in tree.children(first)]
    for value, number in zip(values, numbers):
        own = [name for name, _ in tree.children(value)] if tree.is_node(value) else None
        if own != names:
            raise DataError(
                f"{what} cannot be stacked into a batch: sample {numbers[0]} is {described(first)}, sample {number} is "
                f"{described(value)}"
            )
    parts = zip(*([part for _, part in tree.children(value)] for value in values))
    columns: list[Any] = [
        None if all(one is None for one in column) else _stacked(column, numbers, _within(what, name))
        for name, column in zip(names, parts)
    ]
    if isinstance(first, Mapping):
        return dict(zip(first, columns))
    if isinstance(first, (tuple, list)):
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return dataclasses.replace(first, **dict(zip(names, columns)))


def _stacked_leaf(values: Sequence[Any], numbers: Sequence[int], what: str) -> Tensor:
    try:
        column = default_collate([np.asarray(value) if isinstance(value, list) else value for value in values])
    except Exception as error:
        raise DataError(f"{what} cannot be stacked into a batch: {_contrast(values, numbers)}") from error
    if not isinstance(column, Tensor):
        raise DataError(
            f"{what} are {described(values[0])}: they must be tensors, arrays or numbers. Turn texts into numbers in "
            "the dataset, or leave them out (data.inputs)"
        )
    return column


def _within(what: str, name: str) -> str:
    return f"{what} {name!r}," if what.endswith(",") else f"{what}, {name!r},"


def _is_named(item: Any) -> bool:
    return isinstance(item, Mapping) or (dataclasses.is_dataclass(item) and not isinstance(item, type))


def _is_list_of_numbers(value: Any) -> bool:
    """Whether a list is an array: numbers, or lists of numbers."""
    is_filled = isinstance(value, list) and bool(value)
    return is_filled and all(isinstance(one, (int, float)) or _is_list_of_numbers(one) for one in value)


def _as_tensors(value: Any, what: str) -> Any:
    """Return what `collate` made with arrays as tensors, and mappings as plain dicts; DataError for anything else."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Mapping):
        return {key: _as_tensors(part, _within(what, key)) for key, part in value.items()}
    if tree.is_node(value) and not _is_list_of_numbers(value):
        parts = {name: _as_tensors(part, _within(what, name)) for name, part in tree.children(value)}
        if isinstance(value, (tuple, list)):
            made = parts.values()
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return dataclasses.replace(value, **parts)
    raise DataError(
        f"{what} are {described(value)}: data.collate must make tensors, or tuples, lists and dicts of them"
    )


def _check_rows(batch: Batch, size: int, what: str) -> None:
    """Raise DataError if a tensor of a batch has not one row for each sample."""
    for part, values in (("inputs", batch.inputs), ("targets", batch.targets)):
        for name, leaf in tree.named_leaves(values):
            if leaf.dim() == 0 or len(leaf) != size:
                shown = f"{part} {name!r}" if name else part
                rows = "is a single number" if leaf.dim() == 0 else f"has {len(leaf)} rows"
                raise DataError(
                    f"a batch of {size} samples of {what} has {size} rows, but its {shown} {rows}: the first dimension "
                    "of every tensor is the samples. Leave out what belongs to no sample"
                )


def _contrast(values: Sequence[Any], numbers: Sequence[int]) -> str:
    """Return how two of the samples differ, with their numbers and what to do."""
    kinds = [described(value) for value in values]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return f"sample {numbers[0]} is {kinds[0]}"
    text = f"sample {numbers[0]} is {kinds[0]}, sample {numbers[other]} is {kinds[other]}"
    if ("shape" in kinds[0] and "shape" in kinds[other]) or isinstance(values[0], list):
        text += ": bring all samples to one shape in the dataset (resize, crop or pad them), or set data.collate"
    return text


def described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"a {type(value).__name__}"
