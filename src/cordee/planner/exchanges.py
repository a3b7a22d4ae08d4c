"""What strategies exchange in a step, and how long that takes a site. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cordee.planner.machine import Amount
from cordee.planner.profile import Block, ModelProfile
from cordee.planner.site import Site

UNIT_BYTES = 4 << 20  # of sharded, as in its settings


def sharded_units(profile: ModelProfile) -> list[int]:
    """Return the bytes that `sharded` gathers at once: blocks that are large enough, and what is left, together."""
    sizes = [block.parameter_bytes for block in profile.blocks]
    large = [size for size in sizes if size >= UNIT_BYTES]
    return [*large, sum(size for size in sizes if size < UNIT_BYTES)]


def sharded_amount(profile: ModelProfile) -> Amount:
    return Amount(len(sharded_units(profile)), profile.num_tensors, profile.parameter_bytes)


def summing_s(site: Site, num_bytes: float, members: Sequence[int]) -> float:
    """Return the seconds to copy gradients into one flat buffer and to sum it over the members."""
    return site.copy_s(num_bytes, len(members)) + site.all_reduce_s(num_bytes, members)


def gathering_s(site: Site, units: Sequence[int], members: Sequence[int]) -> tuple[float, float]:
    """Return the seconds to gather all units and copy them into the parameters, and to scatter their gradients."""
    copy_s = site.copy_s(sum(units), len(members))
    gather_s = copy_s + sum(site.all_gather_s(size, members) for size in units)
    return gather_s, copy_s + sum(site.reduce_scatter_s(size, members) for size in units)


def num_sums(block: Block) -> float:
    """Return how often the outputs of a sliced block are summed in a forward pass, and gradients in a backward pass.

    Once for two layers, of which the first has a slice of its outputs and the second of its inputs.
    """
    return block.sliceable / 2 if block.splittable else 0.0


def ring_traffic(num_bytes: float, num_workers: int) -> float:
    """Return what each worker sends in an all-reduce that is as sparing as possible."""
    return 2 * (num_workers - 1) / num_workers * num_bytes
