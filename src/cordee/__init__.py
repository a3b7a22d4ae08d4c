"""Cordée: train one PyTorch model with many workers.

`cordee.train(cordee.Job(...))` runs a job; the command `cordee` does the same from a job file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cordee.version import __version__

if TYPE_CHECKING:
    from cordee.core import Job, Use
    from cordee.core.errors import CordeeError
    from cordee.core.settings import Checkpoint, Cluster, Data, Evaluation, Monitoring, Stop, Strategy, Training
    from cordee.data import Splits
    from cordee.launch import train
    from cordee.loop import join
    from cordee.parameters import KVStore
    from cordee.planner.plan import Plan
    from cordee.planner.planning import plan
    from cordee.run import Run
    from cordee.training.callbacks import Callback

# Names are imported when first used, so that `cordee --help` does not wait for torch.
_HOMES = {
    "Callback": "cordee.training.callbacks",
    "Checkpoint": "cordee.core.settings",
    "Cluster": "cordee.core.settings",
    "CordeeError": "cordee.core.errors",
    "Data": "cordee.core.settings",
    "Evaluation": "cordee.core.settings",
    "Job": "cordee.core",
    "KVStore": "cordee.parameters",
    "Monitoring": "cordee.core.settings",
    "Plan": "cordee.planner.plan",
    "Run": "cordee.run",
    "Splits": "cordee.data",
    "Stop": "cordee.core.settings",
    "Strategy": "cordee.core.settings",
    "Training": "cordee.core.settings",
    "Use": "cordee.core",
    "join": "cordee.loop",
    "plan": "cordee.planner.planning",
    "train": "cordee.launch",
}

__all__ = [
    "Callback",
    "Checkpoint",
    "Cluster",
    "CordeeError",
    "Data",
    "Evaluation",
    "Job",
    "KVStore",
    "Monitoring",
    "Plan",
    "Run",
    "Splits",
    "Stop",
    "Strategy",
    "Training",
    "Use",
    "__version__",
    "join",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cordee' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
