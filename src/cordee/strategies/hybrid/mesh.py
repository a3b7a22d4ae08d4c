"""`strategy.mesh`: how many workers along which axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cordee.core.errors import JobError, nearest
from cordee.strategies.axes import Mesh

SPLITTING_AXES = ("pipeline", "sharded", "tensor")
AXES = ("data", *SPLITTING_AXES)


def read_mesh(sizes: Mapping[str, int], workers: int) -> Mesh:
    """Return the mesh; raises JobError where it cannot be, or does not multiply to the workers."""
    shown = show_mesh(sizes)
    if not sizes:
        raise JobError("strategy 'hybrid' needs strategy.mesh, for example {data = 2, pipeline = 2}")
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
