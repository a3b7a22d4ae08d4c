"""`strategy.mesh`: how many workers along which axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cordee.core.errors import JobError, nearest

INNER_AXES = ("pipeline", "sharded", "tensor")
AXES = ("data", *INNER_AXES)


@dataclass(frozen=True)
class Mesh:
    """`num_replicas` copies of a model, each of which is split over `num_parts` workers in one way."""

    num_replicas: int
    inner: str
    num_parts: int


def read_mesh(sizes: Mapping[str, int], workers: int) -> Mesh:
    """Return the mesh; raises JobError where it cannot be, or does not multiply to the workers."""
    shown = "{" + ", ".join(f"{axis} = {size}" for axis, size in sizes.items()) + "}"
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
    inner = [axis for axis in INNER_AXES if sizes.get(axis, 1) > 1]
    if len(inner) > 1:
        raise JobError(
            f"strategy.mesh = {shown}: this version combines 'data' with one of {', '.join(INNER_AXES)}, not "
            f"'{inner[0]}' with '{inner[1]}'"
        )
    if not inner:
        raise JobError(
            f"strategy.mesh = {shown} splits nothing: give one of {', '.join(INNER_AXES)} a size of 2 or more, or set "
            "strategy.name = 'data_parallel'"
        )
    return Mesh(sizes.get("data", 1), inner[0], sizes[inner[0]])
