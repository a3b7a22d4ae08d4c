"""What flows from the data layer to the compute layer, and how a model is given it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.errors import ModelError
from cordee.core.tree import Nested


class Batch(NamedTuple):
    """Samples that are computed together; row i of every tensor in `inputs` and `targets` belongs to sample i.

    Both are plain tensors, or nested ones (`core.tree`). `targets` is None where a model needs none.
    """

    inputs: Nested
    targets: Nested

    @property
    def num_samples(self) -> int:
        if isinstance(self.targets, Tensor):
            return len(self.targets)
        found = tree.num_rows(self.targets)
        return tree.num_rows(self.inputs) or 0 if found is None else found

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `function` of each tensor."""
        return Batch(tree.map_leaves(function, self.inputs), tree.map_leaves(function, self.targets))

    def rows(self, start: int, stop: int) -> Batch:
        """Return the samples [start, stop), as views."""
        return Batch(tree.rows(self.inputs, start, stop), tree.rows(self.targets, start, stop))

    def select(self, indices: Tensor) -> Batch:
        """Return the samples with these indices, or where this mask is true."""
        return self.map(lambda tensor: tensor[indices])

    def cut(self, num_parts: int) -> list[Batch]:
        """Return parts whose sizes differ by at most one, the larger ones first, as views; they may be empty."""
        return [self.rows(start, stop) for start, stop in cut_parts(self.num_samples, num_parts)]

    def leaves(self) -> list[Tensor]:
        return [*tree.leaves(self.inputs), *tree.leaves(self.targets)]

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Return the samples of all batches, which are built alike, in one."""
        if len(batches) == 1:
            return batches[0]
        inputs, targets = zip(*batches, strict=True)
        return Batch(tree.concatenate(inputs), tree.concatenate(targets))


def cut_parts(length: int, num_parts: int) -> list[tuple[int, int]]:
    """Return the bounds of the parts of [0, length), whose sizes differ by at most one, the larger ones first."""
    size, more = divmod(length, num_parts)
    return list(itertools.pairwise(part * size + min(part, more) for part in range(num_parts + 1)))


class Pieces(tuple[Batch, ...]):
    """A batch in pieces that cannot be put together: each was collated by itself, so that they may differ in shape."""

    @property
    def num_samples(self) -> int:
        return sum(piece.num_samples for piece in self)


# How a model is given its inputs: model(x), model(*x) or model(**x), as they are built.


class Call(NamedTuple):
    """How a model takes nested inputs. Keywords are what it takes beside them."""

    is_whole: bool = False  # a tuple or dict is given as it is, not spread over the arguments

    def __call__(self, model: Callable[..., Any], inputs: Nested, keywords: Mapping[str, Any] | None = None) -> Any:
        if isinstance(inputs, Tensor) and not keywords:
            return model(inputs)
        args, named = self.arguments(inputs)
        return model(*args, **named, **(keywords or {}))

    def arguments(self, inputs: Nested) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.is_whole:
            if isinstance(inputs, Mapping):
                return (), dict(inputs)
            if isinstance(inputs, (tuple, list)):
                return tuple(inputs), {}
        return (inputs,), {}


PLAIN_CALL = Call()


def choose_call(model: Callable[..., Any], inputs: Nested, keywords: Sequence[str], name: str) -> Call:
    """Return how a model takes these inputs, by the signature of its forward pass.

    A dict is spread over the arguments by name, a tuple or list in order. Where the signature does not take that, but
    one argument, it is given as a whole. Raises ModelError that says what the model takes and what the batch has.
    """
    forward = getattr(model, "forward", model)
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return Call()
    extra = dict.fromkeys(keywords)
    problems = []
    for call in (Call(), Call(is_whole=True)):
        args, named = call.arguments(inputs)
        twice = named.keys() & extra.keys()
        if twice:
            raise ModelError(
                f"the inputs of the model {name} and its targets both have {sorted(twice)[0]!r}: leave it out of one"
            )
        try:
            signature.bind(*args, **named, **extra)
        except TypeError as error:
            problems.append(str(error))
            continue
        return call
    has = ", ".join([*(_argument_names(inputs)), *keywords])
    raise ModelError(
        f"the model {name} takes ({_described(signature)}), and the batch has {has}: {problems[0]}. "
        "Choose inputs by name (data.inputs), or have the model take these"
    )


def _argument_names(inputs: Nested) -> Iterator[str]:
    if isinstance(inputs, Mapping):
        yield from (str(key) for key in inputs)
    elif isinstance(inputs, (tuple, list)):
        yield f"{len(inputs)} inputs without names"
    else:
        yield tree.describe(inputs)


def _described(signature: inspect.Signature) -> str:
    shown = []
    for parameter in signature.parameters.values():
        stars = 1 if parameter.kind is parameter.VAR_POSITIONAL else 2 if parameter.kind is parameter.VAR_KEYWORD else 0
        text = "*" * stars + parameter.name
        shown.append(text if parameter.default is parameter.empty else f"{text}=…")
    return ", ".join(shown)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in what a model returned: a tensor, nested ones, or an object with such attributes."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (str, bytes, int, float, torch.dtype)):
        return []
    if tree.is_node(value):
        return [tensor for _, part in tree.children(value) for tensor in tensors_in(part)]
    return [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, Tensor)]
