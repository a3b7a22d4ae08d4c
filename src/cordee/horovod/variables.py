"""States of elastic loops whose model is no torch module: variables of TensorFlow and of Keras, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee.core.errors import JobError
from cordee.horovod.elastic import ObjectState

STATISTICS = ("moving_mean", "moving_variance")  # of batch norms: each rank has those of its own samples


class Variables:
    """The values of variables, as what a state is made of. Generators of random numbers are left out."""

    def __init__(self, variables: Sequence[Any], sync: Callable[[], Any] = lambda: None) -> None:
        """`sync` is called before values are read."""
        self._sync = sync
        unique = {id(variable): variable for variable in variables}.values()
        self._variables = [variable for variable in unique if "seed_generator_state" not in _path(variable)]
        self.own_values = {
            f"v{place}" for place, variable in enumerate(self._variables) if _path(variable).endswith(STATISTICS)
        }

    def state_dict(self) -> dict[str, Tensor]:
        self._sync()
        return {f"v{place}": _to_torch(variable) for place, variable in enumerate(self._variables)}

    def load_state_dict(self, values: dict[str, Tensor]) -> None:
        for place, variable in enumerate(self._variables):
            variable.assign(values[f"v{place}"].numpy())


class ModelState(ObjectState):
    """A model of Keras, its optimizer, and values."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                f"{type(self).__name__}: the model has no variables yet: give it an Input layer, or call "
                "model.build(input_shape) first"
            )
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._objects = {"model": model, "optimizer": optimizer}
        # With the backend JAX `fit` has the values itself, from its first step to the end of an epoch.
        sync = getattr(model, "jax_state_sync", lambda: None)
        things: dict[str, Any] = {"model": Variables(model.variables, sync), "optimizer": None}
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            things["optimizer"] = Variables(optimizer.variables, sync)
        super().__init__(**things, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._objects[name] if name in ("model", "optimizer") else super().__getattr__(name)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", "")).partition(":")[0]


def _to_torch(variable: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(variable.numpy()))
    except TypeError:
        raise JobError(
            f"the state cannot keep '{_path(variable)}' of type {variable.dtype}: keep variables of floats of 16, 32 "
            "or 64 bits, whole numbers and booleans"
        ) from None
