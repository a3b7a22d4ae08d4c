"""From pieces to a checkpoint and back: what servers hold in slices is saved whole, as every strategy saves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cordee.checkpoint import State
from cordee.parameters.placement import Layout, Piece, Slice
from cordee.strategies.parameter_server.shard import PieceState


def load_piece(state: PieceState, whole: State) -> None:
    """Give a piece its part of a model's optimizer state."""
    names = {one.name: one for one in state.piece.slices}
    groups = []
    for group in whole.values["groups"]:
        mine = {name: _shape(names[name]) for name in group["parameters"] if name in names}
        if mine:
            groups.append({**group, "parameters": mine})
    inner = {name: value for name, value in whole.values["state"].items() if name in names}
    tensors = {}
    for name, one in names.items():
        for reference in _references(inner.get(name)):
            tensors[reference] = _slice_of(whole.tensors[reference], one)
    shared = {key: tensor for key, tensor in whole.tensors.items() if key.startswith("$")}
    values = {**whole.values, "groups": groups, "state": inner}
    state.optimizer.restore(State({**tensors, **shared}, values))


def join_pieces(layout: Layout, states: Sequence[State], group_of: Mapping[str, int]) -> State:
    """Return the optimizer state of the whole model, of those of all pieces in order.

    `group_of` has the number of each parameter's group in the optimizer of the whole model: a piece has parameters of
    some of them only.
    """
    tensors: dict[str, Tensor] = {}
    collected: dict[str, list[Tensor]] = {}
    merged_state: dict[str, Any] = {}
    groups: dict[int, dict[str, Any]] = {}
    for piece, state in zip(layout.pieces, states, strict=True):
        slices = {one.name: one for one in piece.slices}
        for group in state.values["groups"]:
            number = group_of[next(iter(group["parameters"]))]
            if number not in groups:  # tensors among its settings are known by its number
                settings, kept = _moved(group["settings"], f"$groups.{number}.", state.tensors)
                groups[number] = {"parameters": {}, "settings": settings}
                tensors |= kept
            groups[number]["parameters"].update({name: list(slices[name].shape) for name in group["parameters"]})
        merged_state.update(state.values["state"])
        for name, inner in state.values["state"].items():
            for reference in _references(inner):
                tensor = state.tensors[reference]
                if tensor.numel() == slices[name].length and tensor.dim() > 0:
                    collected.setdefault(reference, []).append(tensor.reshape(-1))
                    tensors[reference] = torch.cat(collected[reference])
                else:  # a counter: the same in all slices
                    tensors[reference] = tensor
        tensors |= {key: tensor for key, tensor in state.tensors.items() if key.startswith("$extra")}
    shapes = {one.name: one.shape for piece in layout.pieces for one in piece.slices}
    for name, inner in merged_state.items():
        for reference in _references(inner):
            if reference in collected:
                tensors[reference] = tensors[reference].view(shapes[name])
    in_order = [groups[number] for number in sorted(groups)]
    return State(tensors, {**states[0].values, "groups": in_order, "state": merged_state})


def join_residuals(layout: Layout, found: Sequence[Mapping[str, Tensor]], weight: float) -> State:
    """Return what compression left out of the gradients of each worker, given that of each piece in order.

    `weight` is what a gradient of one worker counts in a step.
    """
    rows: list[dict[str, Tensor]] = []
    workers = set.intersection(*map(set, found)) if found else set()
    for worker in sorted(workers, key=lambda name: (len(name), name)):
        parts: dict[str, list[Tensor]] = {}
        for piece, of_piece in zip(layout.pieces, found, strict=True):
            for one in piece.slices:
                at = one.offset - piece.start
                parts.setdefault(one.name, []).append(of_piece[worker][at : at + one.length])
        rows.append({name: torch.cat(pieces) for name, pieces in parts.items()})
    tensors = {f"{number}.{name}": left for number, row in enumerate(rows) for name, left in row.items()}
    return State(tensors, {"workers": len(rows), "weight": weight} if rows else {})


def split_residuals(saved: State, piece: Piece, num_workers: int, weight: float) -> dict[str, Tensor]:
    """Return what each worker begins with of a piece: its own, or as much as adds up to the same.

    Of another strategy, or of another model, it is not known by these names: then it is nothing.
    """
    num_saved = saved.values.get("workers", 0)
    rows = []
    for number in range(num_saved):
        row = None
        for one in piece.slices:
            left = saved.tensors.get(f"{number}.{one.name}")
            if left is None or left.numel() != math.prod(one.shape):
                return {}
            row = torch.zeros(piece.length, dtype=left.dtype) if row is None else row
            at = one.offset - piece.start
            row[at : at + one.length] = left[one.first : one.first + one.length]
        if row is not None:
            rows.append(row)
    if not rows:
        return {}
    if (num_saved, saved.values["weight"]) != (num_workers, weight):
        each = torch.stack(rows).double().sum(0) * (saved.values["weight"] / (weight * num_workers))
        rows = [each.to(rows[0].dtype)] * num_workers
    return {f"worker-{index}": row for index, row in enumerate(rows)}


def flatten_parameters(model: nn.Module, layout: Layout) -> Tensor:
    """Return the trainable parameters of a model as one vector, a copy, in the order of the layout."""
    parameters = dict(model.named_parameters())
    flat = torch.zeros(layout.length, dtype=layout.dtype)
    for piece in layout.pieces:
        write_piece(flat[piece.start : piece.stop], piece, parameters)
    return flat


def write_piece(out: Tensor, piece: Piece, parameters: dict[str, nn.Parameter]) -> None:
    """Copy the slices of a piece out of a model's parameters."""
    with torch.no_grad():
        for one in piece.slices:
            at = one.offset - piece.start
            source = parameters[one.name].detach().reshape(-1)
            out[at : at + one.length].copy_(source[one.first : one.first + one.length])


def adopt_flat(model: nn.Module, layout: Layout, flat: Tensor, gradient: Tensor) -> None:
    """Make a model's trainable parameters, and their gradients, views of two flat vectors."""
    parameters = dict(model.named_parameters())
    starts: dict[str, int] = {}
    for piece in layout.pieces:
        for one in piece.slices:
            starts.setdefault(one.name, one.offset)  # slices of a parameter follow each other
    for name, start in starts.items():
        parameter = parameters[name]
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter)


def _moved(value: Any, prefix: str, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return a packed value whose tensors have names that begin with `prefix`, and these tensors."""
    new_names = {old: f"{prefix}{number}" for number, old in enumerate(_references(value))}

    def renamed(inner: Any) -> Any:
        if isinstance(inner, dict):
            if inner.keys() == {"$tensor"}:
                return {"$tensor": new_names[inner["$tensor"]]}
            return {key: renamed(one) for key, one in inner.items()}
        return [renamed(one) for one in inner] if isinstance(inner, list) else inner

    return renamed(value), {new: tensors[old] for old, new in new_names.items()}


def _references(value: Any) -> list[str]:
    """Return the names of the tensors a packed value refers to."""
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return [value["$tensor"]]
        return [name for inner in value.values() for name in _references(inner)]
    if isinstance(value, list):
        return [name for inner in value for name in _references(inner)]
    return []


def _shape(one: Slice) -> list[int]:
    return list(one.shape) if one.is_whole else [one.length]


def _slice_of(tensor: Tensor, one: Slice) -> Tensor:
    if one.is_whole or tensor.dim() == 0 or tensor.numel() < one.first + one.length:
        return tensor
    return tensor.reshape(-1)[one.first : one.first + one.length]
