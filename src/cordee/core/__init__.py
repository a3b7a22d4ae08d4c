"""Plain values that every layer shares: the job, errors, seeds, durations, the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cordee.core.batch import Batch
    from cordee.core.job import Job
    from cordee.core.references import Use

__all__ = ["Batch", "Job", "Use"]

# Imported when first used: torch loads the backend, and with it this package, at every `import torch`.
_HOMES = {"Batch": "cordee.core.batch", "Job": "cordee.core.job", "Use": "cordee.core.references"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cordee.core' has no attribute {name!r}")
