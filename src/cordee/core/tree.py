"""Nested tensors: tuples, lists, dicts and dataclasses of tensors whose first dimension is the samples.

`None` may stand in any place and holds nothing. A plain tensor is the smallest tree. Names of leaves are the way to
them: "input_ids", "0", "image.0"; that of a plain tensor is "".
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Nested = Any  # a tensor, None, or a tuple, list, dict or dataclass of such


def is_node(value: Any) -> bool:
    """Return whether a value holds other values of a tree, and is not a leaf."""
    return isinstance(value, (tuple, list, Mapping)) or _is_dataclass(value)


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a node holds, by name."""
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, (tuple, list)):
        names = getattr(node, "_fields", None) or map(str, range(len(node)))
        yield from zip(names, node, strict=True)
    else:
        yield from ((field.name, getattr(node, field.name)) for field in dataclasses.fields(node))


def map_leaves(function: Callable[[Any], Any], tree: Nested) -> Nested:
    """Return the tree with `function` of each leaf in its place."""
    if isinstance(tree, Tensor):
        return function(tree)
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        made = {key: map_leaves(function, value) for key, value in tree.items()}
        return made if type(tree) is dict else _as_mapping(tree, made)
    if isinstance(tree, (tuple, list)):
        values = [map_leaves(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if _is_dataclass(tree):
        made = {name: map_leaves(function, value) for name, value in children(tree)}
        return dataclasses.replace(tree, **made)
    return function(tree)


def leaves(tree: Nested) -> list[Any]:
    """Return the leaves in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, leaf in named_leaves(tree)]


def named_leaves(tree: Nested, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves by name, in order."""
    if tree is None:
        return
    if isinstance(tree, Tensor) or not is_node(tree):
        yield name, tree
        return
    for part, value in children(tree):
        yield from named_leaves(value, f"{name}.{part}" if name else part)


def rebuild(like: Nested, values: Sequence[Any]) -> Nested:
    """Return a tree built as `like` is, of these leaves in order."""
    following = iter(values)
    return map_leaves(lambda _: next(following), like)


def from_names(like: Nested, name: str, values: Mapping[str, Any]) -> Nested:
    """Return a tree built as `like` is, of the leaves that `named_leaves(like, name)` would name so."""
    return rebuild(like, [values[one] for one, _ in named_leaves(like, name)])


def num_rows(tree: Nested) -> int | None:
    """Return the length of the first leaf; None if there is none."""
    if isinstance(tree, Tensor):
        return len(tree)
    return next((len(leaf) for _, leaf in named_leaves(tree)), None)


def rows(tree: Nested, start: int, stop: int) -> Nested:
    """Return the samples [start, stop), as views."""
    return tree[start:stop] if isinstance(tree, Tensor) else map_leaves(lambda leaf: leaf[start:stop], tree)


def concatenate(trees: Sequence[Nested]) -> Nested:
    """Return the samples of all trees, which are built alike, in one tree."""
    if isinstance(trees[0], Tensor):
        return torch.cat(list(trees))
    columns = zip(*(leaves(tree) for tree in trees), strict=True)
    return rebuild(trees[0], [torch.cat(column) for column in columns])


def shapes(tree: Nested) -> Any:
    """Return the shape of one sample of each leaf, in a tree like this; a plain tensor gives a tuple of numbers."""
    return map_leaves(lambda leaf: tuple(leaf.shape[1:]), tree)


def shape_leaves(shape: Any) -> list[tuple[int, ...]]:
    """Return the shapes in what `shapes` gave."""
    if shape is None:
        return []
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
        return [shape]
    return [leaf for _, part in children(shape) for leaf in shape_leaves(part)]


def describe(tree: Nested) -> str:
    """Return the leaves with their shapes, in words."""
    if isinstance(tree, Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    named = [
        f"{name!r} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{name!r} of type {type(leaf).__name__}"
        for name, leaf in named_leaves(tree)
    ]
    kind = "None" if tree is None else f"a {type(tree).__name__}"
    return f"{kind} of {', '.join(itertools.islice(named, 12))}{', …' if len(named) > 12 else ''}" if named else kind


def _as_mapping(tree: Mapping[Any, Any], made: Mapping[Any, Any]) -> Any:
    other: Any = copy.copy(tree)
    for key, value in made.items():
        other[key] = value
    return other


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__")
