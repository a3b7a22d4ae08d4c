"""Horovod's elastic mode for TensorFlow 2: `hvd.elastic.TensorFlowKerasState`, `TensorFlowState` and `run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cordee.horovod.elastic import ObjectState, State, run
from cordee.horovod.errors import HostsUpdatedInterrupt
from cordee.horovod.variables import ModelState, Variables

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(ModelState):
    """A model of Keras with its optimizer, and values."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """`backend` is accepted for scripts that give it: there are no sessions."""
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """A list of `tf.Variable`, and values."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if not variables:
            raise ValueError("TensorFlowState: give it the variables: TensorFlow 2 keeps no list of all of them")
        if session is not None:
            raise ValueError("TensorFlowState(session=…): sessions are of TensorFlow 1")
        self._listed = list(variables)
        super().__init__(variables=Variables(self._listed), **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._listed if name == "variables" else super().__getattr__(name)
