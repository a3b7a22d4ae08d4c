"""`import horovod` for scripts that were written for it: each module is the one of Cordée with the same API."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from cordee.core.errors import JobError

# Horovod's module → Cordée's.
MODULES = {
    "horovod": "cordee.horovod",
    "horovod.torch": "cordee.horovod.torch",
    "horovod.torch.mpi_ops": "cordee.horovod.torch.mpi_ops",
    "horovod.torch.compression": "cordee.horovod.torch.compression",
    "horovod.torch.functions": "cordee.horovod.torch.functions",
    "horovod.torch.optimizer": "cordee.horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm": "cordee.horovod.torch.sync_batch_norm",
    "horovod.torch.elastic": "cordee.horovod.torch.elastic",
    "horovod.torch.elastic.sampler": "cordee.horovod.torch.elastic",
    "horovod.torch.elastic.state": "cordee.horovod.torch.elastic",
    "horovod.common": "cordee.horovod.common",
    "horovod.common.elastic": "cordee.horovod.elastic",
    "horovod.common.exceptions": "cordee.horovod.errors",
    "horovod.common.process_sets": "cordee.horovod.world",
    "horovod.tensorflow": "cordee.horovod.tensorflow",
    "horovod.tensorflow.elastic": "cordee.horovod.tensorflow.elastic",
    "horovod.tensorflow.keras": "cordee.horovod.keras",
    "horovod.tensorflow.keras.callbacks": "cordee.horovod.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "cordee.horovod.keras.elastic",
    "horovod.keras": "cordee.horovod.keras",
    "horovod.keras.elastic": "cordee.horovod.keras.elastic",
    "horovod.keras.callbacks": "cordee.horovod.keras.callbacks",
    "horovod.runner": "cordee.horovod.running",
    "horovod.spark": "cordee.horovod.spark",
    "horovod.spark.runner": "cordee.horovod.spark",
    "horovod.ray": "cordee.horovod.ray",
    "horovod.ray.runner": "cordee.horovod.ray",
}
# What Horovod has and Cordée does in another way.
ELSEWHERE = {
    "horovod.runner.launch": "start the script with `cordee run -n N`",
    "horovod.spark.keras": "train a job on a DataFrame with `cordee train JOB --engine spark`",
    "horovod.spark.torch": "train a job on a DataFrame with `cordee train JOB --engine spark`",
    "horovod.spark.lightning": "train a job on a DataFrame with `cordee train JOB --engine spark`",
    "horovod.spark.common": "train a job on a DataFrame with `cordee train JOB --engine spark`",
    "horovod.ray.elastic": "train a job with `cordee train JOB --engine ray`, which continues without lost workers",
    "horovod.mxnet": "there is no MXNet here",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod` and what is below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "horovod" and not name.startswith("horovod."):
            return None
        for known, advice in ELSEWHERE.items():
            if f"{name}.".startswith(f"{known}."):
                raise ModuleNotFoundError(f"{name} is not part of cordee.horovod: {advice}", name=name)
        if name not in MODULES:
            raise ModuleNotFoundError(f"cordee.horovod has no {name}; it has {', '.join(sorted(MODULES))}", name=name)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module of its own with the names of Cordée's: that one keeps its spec."""
        found = importlib.import_module(MODULES[spec.name])
        module = ModuleType(spec.name, found.__doc__)
        module.__dict__.update({key: value for key, value in vars(found).items() if not key.startswith("__")})
        if hasattr(found, "__all__"):
            module.__all__ = found.__all__  # type: ignore[attr-defined]
        if hasattr(found, "__getattr__"):
            module.__getattr__ = found.__getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def install() -> None:
    """From now on `import horovod` in this process imports Cordée's modules. Calling it again changes nothing.

    Raises JobError if Horovod itself has been imported.
    """
    if is_installed():
        return
    if "horovod" in sys.modules:
        raise JobError("--as-horovod: this process has imported Horovod itself already")
    sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Return whether `import horovod` in this process imports Cordée's modules."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)
