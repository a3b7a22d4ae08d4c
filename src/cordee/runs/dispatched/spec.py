"""What the launcher of a served run tells its coordinator."""

from __future__ import annotations

from typing import Any

import msgspec

from cordee.cluster.launcher_link import CoordinatorSpec


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher knows of the job's parts, so that the coordinator need not build them."""

    num_samples: int
    total_steps: int
    counts_classes: bool
    has_test: bool
    lr: float  # of the optimizer's first group, before schedule and scale
    lr_factor: float
    dtype: str = "float32"  # of the parameters
    data: str = ""  # a fingerprint, where workers of other hosts may join
    description: dict[str, Any]  # for the event `run_started`


class DispatchedSpec(CoordinatorSpec, frozen=True, kw_only=True):
    """What the launcher tells the coordinator. Travels through a private socket."""

    facts: RunFacts
