"""What the planner says about one way to run a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cordee.core.mesh import Mesh
from cordee.planner.hardware import Hardware
from cordee.planner.measurements import ModelProfile
from cordee.strategies.table import STRATEGIES

if TYPE_CHECKING:
    from cordee.planner.history import Way


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with its numbers."""

    strategy: str
    workers: int
    settings: dict[str, Any] = {}  # keys of [strategy]


def mesh_of(candidate: Candidate) -> Mesh:
    """Return how a candidate's workers are laid out."""
    return STRATEGIES[candidate.strategy].mesh(candidate.workers, candidate.settings)


class Prediction(Candidate, frozen=True, kw_only=True):
    """What a candidate would take."""

    step_s: float
    compute_s: float  # of the step, on the busiest worker
    communication_s: float  # of the step, that computing does not hide
    idle_share: float  # of all workers' time, waiting for each other; exchanging bytes is not idling
    memory_bytes: float  # of the worker that takes most, its process included
    memory_limit_bytes: float  # what such a worker may take
    traffic_bytes: float  # that one worker sends in a step
    samples_per_second: float
    note: str = ""  # what it is made of, in words
    # Nine of ten runs are expected between these seconds of a step; None where nothing is known of that.
    interval: tuple[float, float] | None = None
    num_runs: int = 0  # earlier runs of the same way that it is made from as well

    @property
    def missing_bytes(self) -> float:
        """How much memory is lacking; 0 where it fits."""
        return max(0.0, self.memory_bytes - self.memory_limit_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0.0

    @property
    def label(self) -> str:
        """The strategy and its numbers, short."""
        parts = [f"{key} {_short(value)}" for key, value in self.settings.items()]
        return self.strategy + (f" ({', '.join(parts)})" if parts else "")

    @property
    def workers_text(self) -> str:
        return "1 worker" if self.workers == 1 else f"{self.workers} workers"

    @property
    def name(self) -> str:
        """What sets it apart from the others of a plan."""
        return f"{self.label} on {self.workers_text}"


@dataclass(frozen=True)
class Work:
    """What is to be computed, and where."""

    profile: ModelProfile
    batch_size: int
    hardware: Hardware
    accumulate: int = 1
    is_reliable: bool = True  # the profile was measured on this hardware, while nothing else used it
    ways: Sequence[Way] = ()  # that the job was run before, with the runs that count
    shifts: Mapping[int, float] = field(default_factory=dict)  # of predictions, by the number of workers


def make_prediction(
    candidate: Candidate,
    work: Work,
    step_s: float,
    compute_s: float,
    communication_s: float,
    idle: float,
    memory: float,
    traffic: float,
    note: str,
) -> Prediction:
    """Return the prediction of a candidate, with what follows from the work and from where it is done."""
    return Prediction(
        strategy=candidate.strategy,
        workers=candidate.workers,
        settings=candidate.settings,
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        idle_share=max(0.0, idle),
        memory_bytes=memory,
        memory_limit_bytes=work.hardware.memory_limit(candidate.workers),
        traffic_bytes=traffic,
        samples_per_second=work.batch_size / step_s if step_s else 0.0,
        note=note,
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "×".join(f"{axis} {size}" for axis, size in value.items())
    return str(value)
