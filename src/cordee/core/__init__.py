"""Plain values that every layer shares: the job, errors, seeds, durations, the environment."""

from cordee.core.batch import Batch
from cordee.core.components import Use
from cordee.core.job import Job

__all__ = ["Batch", "Job", "Use"]
