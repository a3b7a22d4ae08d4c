"""`hybrid`: a mesh of data parallelism and of ways to split a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from cordee.compute import Computation
from cordee.core import Job
from cordee.core.errors import JobError, nearest
from cordee.core.job import read_section
from cordee.core.mesh import AXES, Mesh
from cordee.core.settings import Section
from cordee.strategies.pipeline import Pipeline, PipelineSettings
from cordee.strategies.sharded import Sharded, ShardedSettings
from cordee.strategies.strategy import Strategy
from cordee.strategies.tensor import TensorParallel, TensorSettings

_SETTINGS: Mapping[str, type[Section]] = {
    "pipeline": PipelineSettings,
    "sharded": ShardedSettings,
    "tensor": TensorSettings,
}
SPLITTING_AXES = tuple(_SETTINGS)


class HybridSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to hybrid, besides those of the strategies on its mesh."""

    mesh: dict[str, int] = msgspec.field(default_factory=dict)  # axis and number of workers along it


def make_hybrid(job: Job, settings: HybridSettings, computation: Computation) -> Strategy:
    """Copies of a model, each split over some workers: a mesh of data, sharded, pipeline and tensor.

    Returns the strategy of the axis that computes, given the other axes.
    """
    mesh = read_mesh(settings.mesh, job.strategy.workers)
    given = {key: value for key, value in job.strategy.settings.items() if key != "mesh"}
    _refuse_without_axis(given, settings.mesh)
    stages = _read(given, PipelineSettings)
    slices = _read(given, TensorSettings)
    shards = _read(given, ShardedSettings)
    if mesh.pipeline > 1:
        for key in ShardedSettings.__struct_fields__:
            if key in given:
                raise JobError(
                    f"strategy.{key} does not go with a pipeline: on strategy.mesh = {show_mesh(settings.mesh)} the "
                    "axis 'sharded' shares out gradients and optimizer state, which has no settings; remove it"
                )
        return Pipeline(job, stages, computation, mesh=mesh, slicing=slices)
    if mesh.sharded > 1:
        return Sharded(job, shards, computation, mesh=mesh, slicing=slices)
    return TensorParallel(job, slices, computation, mesh=mesh)


def _refuse_without_axis(given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for axis, settings in _SETTINGS.items():
        for key in settings.__struct_fields__:
            if key in given and sizes.get(axis, 1) == 1:
                raise JobError(
                    f"strategy.{key} is a setting of '{axis}', which strategy.mesh = {show_mesh(sizes)} does not "
                    f"use: remove it, or give '{axis}' a size of 2 or more"
                )


def _read(given: Mapping[str, Any], settings: type[Section]) -> Any:
    """Return those of the keys that are the section's own."""
    own = {key: value for key, value in given.items() if key in settings.__struct_fields__}
    return read_section("strategy", own, settings)


def read_mesh(sizes: Mapping[str, int], workers: int) -> Mesh:
    """Return the mesh; raises JobError where it cannot be, or does not multiply to the workers."""
    shown = show_mesh(sizes)
    if not sizes:
        of_four = "{data = 2, pipeline = 2} with strategy.workers = 4"
        few = f"{{pipeline = {workers}}}" if workers > 1 else of_four
        example = f"{{data = {workers // 2}, pipeline = 2}}" if workers >= 4 and workers % 2 == 0 else few
        raise JobError(f"strategy 'hybrid' needs strategy.mesh, for example {example}")
    for axis, size in sizes.items():
        if axis not in AXES:
            raise JobError(f"strategy.mesh has no axis '{axis}'{nearest(axis, AXES)} (axes: {', '.join(AXES)})")
        if size < 1:
            raise JobError(f"strategy.mesh = {shown}: the size of '{axis}' must be at least 1")
    product = math.prod(sizes.values())
    if product != workers:
        raise JobError(
            f"strategy.mesh = {shown} has {product} workers, the job has {workers}: set strategy.workers = {product}, "
            "or change the mesh"
        )
    if all(sizes.get(axis, 1) == 1 for axis in SPLITTING_AXES):
        raise JobError(
            f"strategy.mesh = {shown} splits nothing: give one of {', '.join(SPLITTING_AXES)} a size of 2 or more, or "
            "set strategy.name = 'data_parallel'"
        )
    return Mesh(**sizes)


def show_mesh(sizes: Mapping[str, int]) -> str:
    """Return the mesh as it is written in a job file."""
    return "{" + ", ".join(f"{axis} = {size}" for axis, size in sizes.items()) + "}"
