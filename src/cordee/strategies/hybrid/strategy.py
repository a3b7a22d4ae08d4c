"""The hybrid strategy: one of the strategies that split a model, with several copies of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cordee.compute import Computation
from cordee.core import Job
from cordee.core.job import read_section
from cordee.core.settings import Section
from cordee.strategies.hybrid.mesh import read_mesh
from cordee.strategies.pipeline import Pipeline, PipelineSettings
from cordee.strategies.sharded import Sharded, ShardedSettings
from cordee.strategies.strategy import Strategy
from cordee.strategies.tensor import TensorParallel, TensorSettings

_INNER: Mapping[str, tuple[Callable[..., Strategy], type[Section]]] = {
    "pipeline": (Pipeline, PipelineSettings),
    "sharded": (Sharded, ShardedSettings),
    "tensor": (TensorParallel, TensorSettings),
}


class HybridSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to hybrid, besides those of the strategy it combines with data parallelism."""

    mesh: dict[str, int] = msgspec.field(default_factory=dict)  # axis and number of workers along it


def make_hybrid(job: Job, settings: HybridSettings, computation: Computation) -> Strategy:
    """Return the strategy of the mesh's inner axis, with as many replicas as the data axis has workers."""
    mesh = read_mesh(settings.mesh, job.strategy.workers)
    make, inner_settings = _INNER[mesh.inner]
    given = {key: value for key, value in job.strategy.settings.items() if key != "mesh"}
    return make(job, read_section("strategy", given, inner_settings), computation, num_replicas=mesh.num_replicas)


def borrowed_keys(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of [strategy] that belong to the strategies on the mesh."""
    mesh = given.get("mesh", {})
    inner = [axis for axis in _INNER if isinstance(mesh, Mapping) and axis in mesh]
    return tuple(key for axis in inner for key in _INNER[axis][1].__struct_fields__)
