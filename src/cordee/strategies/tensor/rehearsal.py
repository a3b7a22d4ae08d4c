"""A sliced model rehearsed in one process, so that a plan that is wrong is refused before any worker starts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cordee.compute import Computation
from cordee.models.slicing import Style, choose_slicing
from cordee.strategies.tensor.layers import compute_whole, misfit, refuse_difference

_PATIENCE_S = 60.0  # for the other slices: a model may take another path on each of them


def check_plan(
    model: nn.Module, num_slices: int, given: Mapping[str, Style], inputs: Tensor, computation: Computation
) -> None:
    """Raise a CordeeError if the model cannot be sliced, or if `given` would change what it computes. Local.

    Each slice is computed by a thread, with views of the model's own weights. Only 'column' and 'row' are rehearsed:
    what the other styles take and give is whole. The plans that come with Cordée need no rehearsal.
    """
    plan = choose_slicing(model, num_slices, given)
    open_styles = {name: style for name, style in plan.items() if _gives_slices(model, name, style)}
    if not given or not open_styles:
        return
    expected = compute_whole(model, inputs, computation)
    meeting = _Meeting(num_slices)
    found: list[Tensor | Exception | None] = [None] * num_slices

    def rehearse(index: int) -> None:
        try:
            found[index] = compute_whole(_sliced(model, open_styles, index, meeting), inputs, computation)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything for shapes it does not expect
            found[index] = error
            meeting.abort()

    threads = [threading.Thread(target=rehearse, args=(index,), daemon=True) for index in range(num_slices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        raise misfit(next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]))
    for outputs in found:
        assert isinstance(outputs, Tensor)
        refuse_difference(expected, outputs, computation)


class _Meeting:
    """Where the threads of all slices exchange tensors."""

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self._barrier = threading.Barrier(num_slices)
        self._given: list[Tensor | None] = [None] * num_slices

    def add(self, index: int, tensor: Tensor) -> Tensor:
        """Return the sum of what all slices bring."""
        self._given[index] = tensor
        self._barrier.wait(_PATIENCE_S)
        total = sum(one for one in self._given if one is not None)
        self._barrier.wait(_PATIENCE_S)
        assert isinstance(total, Tensor)
        return total

    def abort(self) -> None:
        self._barrier.abort()


def _gives_slices(model: nn.Module, name: str, style: Style) -> bool:
    return style in ("column", "row") and isinstance(model.get_submodule(name), nn.Linear)


def _sliced(model: nn.Module, plan: Mapping[str, Style], index: int, meeting: _Meeting) -> nn.Module:
    """Return a copy of the model as the worker `index` along 'tensor' has it."""
    shared: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    sliced = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for name, style in plan.items():
        layer = sliced.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight, layer.bias
        if style == "column":
            layer.weight = _part(weight, 0, index, meeting.num_slices)
            if bias is not None:
                layer.bias = _part(bias, 0, index, meeting.num_slices)
        else:
            layer.weight = _part(weight, 1, index, meeting.num_slices)
            layer.register_parameter("bias", None)
            layer.register_forward_hook(_adding(meeting, index, bias))
    return sliced


def _part(tensor: Tensor, side: int, index: int, num_slices: int) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(num_slices, side)[index], requires_grad=False)


def _adding(meeting: _Meeting, index: int, bias: Tensor | None) -> Any:
    def add(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        total = meeting.add(index, outputs)
        return total if bias is None else total + bias

    return add
