"""Callbacks for `fit`: the same start for all ranks, metrics of all ranks, learning rates that rise and fall."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cordee.horovod import operations
from cordee.horovod.keras.values import broadcast_variables, keras, to_torch
from cordee.horovod.operations import Average
from cordee.horovod.world import ProcessSet, global_process_set, size

_Callback: Any = keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Gives the model and its optimizer the values of rank `root_rank`, at the start of `fit`. Collective."""

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast what there is. Variables of a model that is built by its first batch are not there yet: refused."""
        model = self.model
        if not model.built:
            raise ValueError(
                "BroadcastGlobalVariablesCallback: the model has no variables yet: give it an Input layer, or call "
                "model.build(input_shape) before fit"
            )
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        unique = {id(variable): variable for variable in variables}
        _share(
            [variable for key, variable in unique.items() if key not in self._local], self._root_rank, self._process_set
        )


def _share(variables: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast variables, but for the state of random generators, which ranks have their own of."""
    wanted = [variable for variable in variables if "seed_generator_state" not in variable.path]
    broadcast_variables(wanted, root_rank, process_set)


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their means over all ranks. Collective. Put it before what reads them."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average over the ranks; each counts the same, as in Horovod."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if isinstance(value, int | float | np.generic | np.ndarray))
        values = torch.stack([to_torch(logs[name]).double().reshape(()) for name in names])
        name = f"metrics.{','.join(names)}"
        (means,) = operations.allreduce([values], Average, name=name, process_set=self._process_set).wait()
        for key, mean in zip(names, means.tolist(), strict=True):
            logs[key] = mean


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
    """Multiplies the initial learning rate by a factor that depends on the epoch."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """With `staircase` the rate changes once an epoch; without, at each batch, by the fraction of the epoch.

        `multiplier` is a number, or a function of the epoch. With `momentum_correction` the momentum of a step whose
        rate has changed is scaled with it.
        """
        super().__init__()
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self._start_epoch, self._end_epoch = start_epoch, end_epoch
        self._staircase = staircase
        self._corrects_momentum = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None
        self._has_warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        if self._initial_lr is None:
            raise ValueError("initial_lr: give the learning rate that the multiplier multiplies")
        if not self._staircase and self._steps_per_epoch is None:
            self._steps_per_epoch = (self.params or {}).get("steps")
            if not self._steps_per_epoch:
                raise ValueError("steps_per_epoch cannot be found out: give it to the callback")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        is_over = self._end_epoch is not None and self._epoch >= self._end_epoch
        if self._epoch < self._start_epoch or is_over:
            return
        if self._staircase and batch == 0:
            self._adjust(self._epoch)
        elif not self._staircase:
            assert self._steps_per_epoch is not None
            self._adjust(self._epoch + batch / self._steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # or the compiled step would use the rate of the batch before
        old, new = self._rate(), float(self._initial_lr * self._multiplier(epoch))
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if not (self._corrects_momentum and momentum and old > 0 and new != old):
            return
        if keras.backend.backend() == "torch":
            self._momentum = float(momentum)
            optimizer.momentum = self._momentum * new / old
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"momentum_correction has no effect on Keras's backend {keras.backend.backend()}, whose compiled steps "
                "hold the momentum as a constant",
                stacklevel=2,
            )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` in the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self._steps_per_epoch or 1)  # so that the last batch of the warm-up has the whole rate
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._end_epoch is not None and epoch == self._end_epoch - 1 and self._verbose > 0:
            rate = self._rate()
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")  # noqa: T201
