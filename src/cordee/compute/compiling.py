"""torch.compile for the passes of training: for batches of the usual size, all else is computed without it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cordee.core import env

log = logging.getLogger("cordee.compiling")


class Compiler:
    """Compiles models when they are first called. One for each worker.

    Evaluation, the smaller last batch of an epoch and all other sizes are computed by the model itself: each further
    shape would be compiled again. A model that cannot be compiled is computed by itself from then on; the log says so.
    """

    def __init__(self, *, falls_back: bool = True) -> None:
        """Without `falls_back` a model that cannot be compiled raises what torch raises."""
        self._falls_back = falls_back
        self._sizes: frozenset[int] = frozenset()
        self._compiled: dict[int, tuple[nn.Module, Callable[..., Any]]] = {}
        self._is_warm: set[int] = set()  # the models that have been called
        self._has_failed = False

    def expect(self, samples: int, num_parts: int) -> None:
        """Compile for the parts of batches of `samples`, of which this worker computes `num_parts` one by one."""
        self._sizes = frozenset({samples // num_parts, -(-samples // num_parts)}) - {0}

    def of(self, model: Callable[..., Any], num_samples: int) -> Callable[..., Any]:
        """Return what computes a part of so many samples."""
        if self._has_failed or num_samples not in self._sizes or not isinstance(model, nn.Module):
            return model
        if id(model) not in self._compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of what it uses itself to compile; below too
                _set_up()
                self._compiled[id(model)] = (model, torch.compile(model, dynamic=False))
        compiled = self._compiled[id(model)][1]

        def call(*args: Any, **keywords: Any) -> Any:
            try:
                if id(model) in self._is_warm:
                    return compiled(*args, **keywords)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outputs = compiled(*args, **keywords)
                self._is_warm.add(id(model))
                return outputs
            except torch._dynamo.exc.TorchDynamoException as error:
                if not self._falls_back:
                    raise
                self._has_failed = True
                log.warning("the model cannot be compiled, and is computed without it: %s", first_line(error))
                return model(*args, **keywords)

        return call


def first_line(error: Exception) -> str:
    """Return the first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _set_up() -> None:
    """Keep what is compiled in the cache folder, in no other processes, with the random numbers of the model itself."""
    env.keep_compiled()  # first: torch reads it when it is imported

    import torch._inductor.config as config

    config.compile_threads = 1  # worker processes of its own would outlive a run that is killed
    config.fallback_random = True  # dropout as it is without compiling
