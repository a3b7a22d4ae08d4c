"""Tells when the gradient of a piece is complete, so that it can travel while earlier layers are still computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cordee.compute import reached_parameters
from cordee.core.errors import TrainingError
from cordee.parameters.placement import Layout, Piece


class PushWatch:
    """Calls `start` once for each piece of a unit of work, when its gradient is complete.

    `expect` is given the outputs of the last forward pass of a unit. A piece is started during the backward pass only
    if the graph behind those outputs tells for certain which parameters it still adds to. Otherwise, and for
    pieces without such parameters, `end` does it.
    """

    def __init__(self, model: nn.Module, layout: Layout, start: Callable[[Piece], None]) -> None:
        self._layout = layout
        self._start = start
        self._names: dict[int, str] = {}  # by the identity of the parameter
        self._pieces: dict[str, list[int]] = {}
        for piece in layout.pieces:
            for one in piece.slices:
                self._pieces.setdefault(one.name, []).append(piece.index)
        for name, parameter in model.named_parameters():
            if name in self._pieces:
                self._names[id(parameter)] = name
                parameter.register_post_accumulate_grad_hook(self._noting(name))  # type: ignore[no-untyped-call]
        self._left: dict[int, int] = {}  # piece -> parameters that the last backward pass still adds to
        self._started: set[int] = set()
        self._used: set[str] = set()

    def begin(self) -> None:
        """Begin a unit of work: nothing has a gradient."""
        self._left, self._started, self._used = {}, set(), set()

    def expect(self, outputs: Any) -> None:
        """Start pieces during the backward pass from `outputs`, after which no gradient of this unit changes."""
        reached = reached_parameters(outputs)
        if reached is None:
            return
        for name in {self._names[key] for key in map(id, reached) if key in self._names}:
            for piece in self._pieces[name]:
                self._left[piece] = self._left.get(piece, 0) + 1

    def end(self) -> None:
        """Start what was not started yet. All gradients are complete."""
        self._left = {}
        for piece in reversed(self._layout.pieces):
            if piece.index not in self._started:
                self._begin_push(piece.index)

    def unused(self, piece: Piece) -> tuple[int, ...]:
        """Return which slices of a piece no backward pass of this unit has added to."""
        return tuple(at for at, one in enumerate(piece.slices) if one.name not in self._used)

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._note(name)

    def _note(self, name: str) -> None:
        self._used.add(name)
        for index in self._pieces[name]:
            if index in self._started:
                raise TrainingError(
                    f"the gradient of '{name}' changed after it was sent: a hook of the model runs a backward pass "
                    "of its own. Remove the hook, or use strategy 'data_parallel'"
                )
            if index in self._left:
                self._left[index] -= 1
                if self._left[index] == 0:
                    self._begin_push(index)

    def _begin_push(self, index: int) -> None:
        self._started.add(index)
        self._start(self._layout.pieces[index])
