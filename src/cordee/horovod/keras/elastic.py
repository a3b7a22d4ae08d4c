"""Horovod's elastic mode for Keras, on its three backends: `hvd.elastic.KerasState`, callbacks of `fit`, and `run`."""

from __future__ import annotations

from typing import Any

from cordee.horovod.elastic import ObjectState, State, run
from cordee.horovod.errors import HostsUpdatedInterrupt
from cordee.horovod.keras.values import keras
from cordee.horovod.variables import ModelState

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_Callback: Any = keras.callbacks.Callback


class KerasState(ModelState):
    """A model of Keras with its optimizer, and values."""


class CommitStateCallback(_Callback):  # type: ignore[misc]
    """Commits a state after every `batches_per_commit` batches, and after each epoch. Collective. Put it last."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"CommitStateCallback: batches_per_commit={batches_per_commit} must be at least 1")
        self._state, self._every = state, batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self._every
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.commit()


class UpdateBatchStateCallback(_Callback):  # type: ignore[misc]
    """Keeps the number of batches of this epoch that were trained with in `state.batch`; 0 after an epoch.

    A function that is called again leaves out that many batches of its first epoch: `fit` does not know of them.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = self._before = 0


class UpdateEpochStateCallback(_Callback):  # type: ignore[misc]
    """Keeps the number of epochs that have ended in `state.epoch`, over all calls of the function."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch = self._before + epoch + 1
