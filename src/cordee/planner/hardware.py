"""Where a job could run: its devices, how fast they compute, and what it costs them to exchange bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cordee.planner.measurements import Amount, Block, Machine, ModelProfile, Timing

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COPY_BYTES_PER_S = 4e9  # where nothing was measured: one core of the 2-core machine this was written on


@dataclass(frozen=True)
class Device:
    """One place for a worker."""

    host: str
    kind: str
    speed: float  # times this machine, with all its cores
    memory_bytes: float  # what a worker there may take


@dataclass(frozen=True)
class Link:
    """Between two devices, or all those of a host."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Hardware(Protocol):
    """What the cost model asks. `members` are indices of devices."""

    devices: Sequence[Device]
    overlaps: bool  # gradients travel while the backward pass continues

    def step(self, profile: ModelProfile, samples: float, member: int, num_members: int) -> Timing:
        """Return a step over `samples` on one device while `num_members` devices in all compute."""

    def num_lanes(self, num_members: int) -> int:
        """Return how many of `num_members` devices can compute at once, each as fast as one of so many does."""

    def exchange_s(self, kind: Collective, num_bytes: float, members: Sequence[int]) -> float:
        """`num_bytes` is of the whole: what each has before it is summed, or in the end when it is gathered."""

    def send_s(self, num_bytes: float, source: int, target: int) -> float: ...

    def copy_s(self, num_bytes: float, num_members: int) -> float:
        """Copying inside each worker's memory, while `num_members` do so."""

    def serve_s(self, strategy: str, num_bytes: float, workers: Sequence[int], num_servers: int) -> float:
        """All workers send `num_bytes` to servers that have a share each, and get as many back."""

    def overhead_s(self, strategy: str, num_members: int, amount: Amount) -> float:
        """What a strategy itself takes in a step, beside computing and exchanging."""

    def memory_limit(self, num_members: int) -> float:
        """What the worker with the least memory may take when there are `num_members`."""

    def worker_bytes(self, strategy: str, num_members: int, *, has_computed: bool) -> float:
        """Return what a worker takes that trains this way, less its model and what it computes.

        With `has_computed` also less what any process takes when it first computes something.
        """


class ThisMachine:
    """Workers that share the cores and the memory of this host, as measured."""

    overlaps = False  # on CPUs gradients are exchanged after the backward pass (docs/decisions/0003)

    def __init__(self, machine: Machine, num_workers: int, free_bytes: float) -> None:
        self._machine = machine
        self._free_bytes = free_bytes
        self.devices: Sequence[Device] = [
            Device("here", "cpu", 1.0, free_bytes / num_workers) for _ in range(num_workers)
        ]

    def step(self, profile: ModelProfile, samples: float, member: int, num_members: int) -> Timing:
        if profile.has_timings(num_members):
            found = profile.step(samples, num_members)
            largest = profile.most_samples(num_members)
            if samples <= largest or not profile.has_timings(1):
                return found
            # Each measured its share of a batch, and slices compute all of it. The line through small batches is too
            # flat where kernels wait for the weights; the whole batch was measured in one process.
            together, alone = profile.step(largest, num_members), profile.step(largest)
            return found.at_least(profile.step(samples).times(together.pass_s / alone.pass_s))
        slowdown = self._machine.slowdown(num_members)
        return profile.step(samples).times(slowdown, optimizer=slowdown)

    def num_lanes(self, num_members: int) -> int:
        return min(num_members, self._machine.cores)

    def exchange_s(self, kind: str, num_bytes: float, members: Sequence[int]) -> float:
        return self._exchange_s(kind, num_bytes, len(members))

    def send_s(self, num_bytes: float, source: int, target: int) -> float:
        return self._exchange_s("send", num_bytes, len(self.devices)) if source != target else 0.0

    def copy_s(self, num_bytes: float, num_members: int) -> float:
        exchange = self._machine.exchange("copy", num_members)
        return exchange.at(num_bytes) if exchange is not None else num_bytes / COPY_BYTES_PER_S

    def serve_s(self, strategy: str, num_bytes: float, workers: Sequence[int], num_servers: int) -> float:
        if self._machine.knows_overhead(strategy):
            return self._machine.overhead_s(strategy, len(workers), Amount(num_bytes=num_bytes))
        # Not measured: every byte is copied by the worker, added by a server, and copied back, all on these cores.
        lanes = min(self._machine.cores, num_servers + len(workers))
        return 3 * self.copy_s(num_bytes, len(workers)) * len(workers) / lanes

    def overhead_s(self, strategy: str, num_members: int, amount: Amount) -> float:
        return self._machine.overhead_s(strategy, num_members, amount)

    def memory_limit(self, num_members: int) -> float:
        return self._free_bytes / num_members

    def worker_bytes(self, strategy: str, num_members: int, *, has_computed: bool) -> float:
        if has_computed:
            return self._machine.process_bytes + self._machine.strategy_bytes(strategy, num_members)
        return self._machine.worker_bytes(strategy, num_members)

    def _exchange_s(self, kind: str, num_bytes: float, num_members: int) -> float:
        if num_members < 2:
            return 0.0
        exchange = self._machine.exchange(kind, num_members)
        # Not measured: four passes over the memory, as each worker writes its part and reads the others'.
        return exchange.at(num_bytes) if exchange is not None else 4 * self.copy_s(num_bytes, num_members)


class DescribedCluster:
    """Machines from a cluster file. Every worker has a device of its own; what is shared is a host's network."""

    def __init__(self, devices: Sequence[Device], inside: Link, networks: dict[str, Link], *, overlaps: bool) -> None:
        self.devices = devices
        self.overlaps = overlaps
        self._inside = inside
        self._networks = networks  # of each host

    def step(self, profile: ModelProfile, samples: float, member: int, num_members: int) -> Timing:
        slowdown = 1.0 / self.devices[member].speed
        return profile.step(samples).times(slowdown, optimizer=slowdown)

    def num_lanes(self, num_members: int) -> int:
        return num_members

    def exchange_s(self, kind: Collective, num_bytes: float, members: Sequence[int]) -> float:
        """Return the time to pass each share round the ring: (n-1) hops of 1/n of the bytes each, twice for a sum."""
        if len(members) < 2:
            return 0.0
        hops = [self.link(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True)]
        latency_s = max(hop.latency_s for hop in hops)
        bytes_per_s = min(hop.bytes_per_s for hop in hops)
        round_s = (len(members) - 1) * (latency_s + num_bytes / len(members) / bytes_per_s)
        return 2 * round_s if kind == "all_reduce" else round_s

    def send_s(self, num_bytes: float, source: int, target: int) -> float:
        return 0.0 if source == target else self.link(source, target).seconds(num_bytes)

    def copy_s(self, num_bytes: float, num_members: int) -> float:
        return 0.0  # part of the exchange, on devices that overlap both

    def serve_s(self, strategy: str, num_bytes: float, workers: Sequence[int], num_servers: int) -> float:
        # Servers are one per host, on other hosts than some of the workers: their network carries everything twice.
        slowest = min((self._networks[self.devices[w].host] for w in workers), key=lambda link: link.bytes_per_s)
        per_server = num_bytes * len(workers) / num_servers
        return 2 * (slowest.latency_s + max(per_server, num_bytes) / slowest.bytes_per_s)

    def overhead_s(self, strategy: str, num_members: int, amount: Amount) -> float:
        return 0.0  # next to the steps that such clusters are for

    def memory_limit(self, num_members: int) -> float:
        return min(device.memory_bytes for device in self.devices[:num_members])

    def worker_bytes(self, strategy: str, num_members: int, *, has_computed: bool) -> float:
        return 0.0  # a device's memory in the file is what it has for a model

    def link(self, source: int, target: int) -> Link:
        """Return the link between two devices: inside a host, or the slower of two hosts' networks."""
        a, b = self.devices[source].host, self.devices[target].host
        if a == b:
            return self._inside
        return min(self._networks[a], self._networks[b], key=lambda link: link.bytes_per_s)


UNIT_BYTES = 4 << 20  # of sharded, as in its settings


def sharded_units(profile: ModelProfile) -> list[int]:
    """Return the bytes that `sharded` gathers at once: blocks that are large enough, and what is left, together."""
    sizes = [block.parameter_bytes for block in profile.blocks]
    large = [size for size in sizes if size >= UNIT_BYTES]
    return [*large, sum(size for size in sizes if size < UNIT_BYTES)]


def sharded_amount(profile: ModelProfile) -> Amount:
    return Amount(len(sharded_units(profile)), profile.num_tensors, profile.parameter_bytes)


def summing_s(hardware: Hardware, num_bytes: float, members: Sequence[int]) -> float:
    """Return the seconds to copy gradients into one flat buffer and to sum it over the members."""
    return hardware.copy_s(num_bytes, len(members)) + hardware.exchange_s("all_reduce", num_bytes, members)


def gathering_s(hardware: Hardware, units: Sequence[int], members: Sequence[int]) -> tuple[float, float]:
    """Return the seconds to gather all units and copy them into the parameters, and to scatter their gradients."""
    copy_s = hardware.copy_s(sum(units), len(members))
    gather_s = copy_s + sum(hardware.exchange_s("all_gather", size, members) for size in units)
    return gather_s, copy_s + sum(hardware.exchange_s("reduce_scatter", size, members) for size in units)


def num_sums(block: Block) -> float:
    """Return how often the outputs of a sliced block are summed in a forward pass, and gradients in a backward pass.

    Once for two layers, of which the first has a slice of its outputs and the second of its inputs.
    """
    return block.sliceable / 2 if block.splittable else 0.0


def ring_traffic(num_bytes: float, num_workers: int) -> float:
    """Return what each worker sends in an all-reduce that is as sparing as possible."""
    return 2 * (num_workers - 1) / num_workers * num_bytes
