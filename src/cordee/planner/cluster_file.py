"""Cluster files: machines that are not here, as TOML. What contradicts itself is refused.

[devices.a100]
speed = 40.0                 # times the machine that the model is profiled on
memory = "80 GiB"

[[hosts]]
name = "node"
count = 8                    # node-1 ... node-8
device = "a100"
devices = 4

[links]
inside = { latency = "5us", bandwidth = "200 GB/s" }
between = { latency = "20us", bandwidth = "25 Gbit/s" }
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import JobError, nearest
from cordee.core.job import read_section, read_toml
from cordee.core.settings import Section
from cordee.planner.amounts import parse_latency, parse_rate, parse_size
from cordee.planner.hardware import DescribedCluster, Device, Link

MOST_DEVICES = 100_000  # as many as a scenario may have workers
MOST_SPEED = 1e9  # times this machine: far above any device, and no time comes out as nothing


class DeviceKind(Section, frozen=True, kw_only=True):
    """A kind of device."""

    speed: float  # times the machine that the model is profiled on, with all its cores
    memory: str | int  # of one device, for a worker's model and data: "80 GiB", or bytes
    overlaps: bool = False  # gradients travel while the backward pass continues, as on GPUs


class HostKind(Section, frozen=True, kw_only=True):
    """One host, or `count` alike."""

    name: str
    device: str  # a name from [devices]
    devices: int = 1  # on each host
    count: int = 1
    network: dict[str, Any] | None = None  # this host's own, instead of links.between


class LinkKind(Section, frozen=True, kw_only=True):
    """A link: "20us", "25 Gbit/s"."""

    latency: str | float = 0.0  # seconds
    bandwidth: str | float  # bytes per second


class Links(Section, frozen=True, kw_only=True):
    """Links inside a host and between hosts."""

    inside: dict[str, Any] | None = None
    between: dict[str, Any] | None = None


class ClusterFile(Section, frozen=True, kw_only=True):
    """The whole file."""

    devices: dict[str, dict[str, Any]]
    hosts: list[dict[str, Any]]
    links: dict[str, Any] = msgspec.field(default_factory=dict)
    name: str = ""


def load_cluster(path: Path) -> DescribedCluster:
    """Read a cluster file. Raises JobError that names the file, the key and what contradicts what."""
    table = read_toml(path, "cluster file")
    try:
        return read_cluster(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def read_cluster(table: Mapping[str, Any]) -> DescribedCluster:
    """Return the cluster that a table in the shape of the file describes."""
    for key in ("devices", "hosts"):
        if key not in table:
            raise JobError(f"the cluster has no [{key}]: add {'[[hosts]]' if key == 'hosts' else '[devices.NAME]'}")
    file: ClusterFile = read_section("cluster", table, ClusterFile)
    kinds = {name: _device_kind(name, kind) for name, kind in file.devices.items()}
    links: Links = read_section("links", file.links, Links)
    devices: list[Device] = []
    networks: dict[str, Link] = {}
    between = None if links.between is None else _link("links.between", links.between)
    used: set[str] = set()
    for index, entry in enumerate(file.hosts, start=1):
        host = _host(f"hosts[{index}]", entry, kinds)
        used.add(host.device)
        if len(devices) + host.count * host.devices > MOST_DEVICES:
            raise JobError(
                f"host '{host.name}': with count = {host.count} and devices = {host.devices} the cluster has more than "
                f"{MOST_DEVICES:,} devices: describe a part of it"
            )
        for number in range(1, host.count + 1):
            name = host.name if host.count == 1 else f"{host.name}-{number}"
            if name in networks:
                raise JobError(f"there are two hosts '{name}': give each [[hosts]] another name")
            own = None if host.network is None else _link(f"hosts '{host.name}'.network", host.network)
            networks[name] = own or between or Link(0.0, float("inf"))
            kind = kinds[host.device]
            memory = parse_size(kind.memory, f"devices.{host.device}.memory")
            devices += [Device(name, host.device, kind.speed, memory)] * host.devices
    _refuse_gaps(file, kinds, used, networks, links)
    # Rings and pipelines go through devices in this order: those of a host, and like kinds, beside each other.
    devices.sort(key=lambda device: -device.speed)
    inside = Link(0.0, float("inf")) if links.inside is None else _link("links.inside", links.inside)
    return DescribedCluster(devices, inside, networks, overlaps=all(kinds[name].overlaps for name in used))


def _device_kind(name: str, table: Any) -> DeviceKind:
    for key in ("speed", "memory"):
        if isinstance(table, Mapping) and key not in table:
            raise JobError(f"[devices.{name}] has no '{key}': add it")
    kind: DeviceKind = read_section(f"devices.{name}", table, DeviceKind)
    if not 0 < kind.speed <= MOST_SPEED:
        raise JobError(f"devices.{name}.speed = {kind.speed} must be above 0 and at most {MOST_SPEED:g}")
    return kind


def _host(where: str, table: Any, kinds: Mapping[str, DeviceKind]) -> HostKind:
    for key in ("name", "device"):
        if isinstance(table, Mapping) and key not in table:
            raise JobError(f"{where} has no '{key}': add it")
    host: HostKind = read_section(where, table, HostKind)
    if not host.name.strip():
        raise JobError(f"{where}.name = {host.name!r} is no name: give the host one")
    if host.device not in kinds:
        raise JobError(
            f"host '{host.name}' has the device '{host.device}', which [devices] does not describe"
            f"{nearest(host.device, kinds)} (it has: {', '.join(sorted(kinds))})"
        )
    for key, number in (("devices", host.devices), ("count", host.count)):
        if number < 1:
            raise JobError(f"host '{host.name}': {key} = {number} must be at least 1")
    return host


def _link(where: str, table: Any) -> Link:
    if isinstance(table, Mapping) and "bandwidth" not in table:
        raise JobError(f"{where} has no 'bandwidth': add it, for example bandwidth = \"25 Gbit/s\"")
    kind: LinkKind = read_section(where, table, LinkKind)
    return Link(parse_latency(kind.latency, f"{where}.latency"), parse_rate(kind.bandwidth, f"{where}.bandwidth"))


def _refuse_gaps(
    file: ClusterFile,
    kinds: Mapping[str, DeviceKind],
    used: set[str],
    networks: Mapping[str, Link],
    links: Links,
) -> None:
    if unused := sorted(set(kinds) - used):
        raise JobError(f"no host has the device '{unused[0]}' of [devices.{unused[0]}]: remove it, or add a host")
    if len(networks) > 1 and links.between is None and any(entry.get("network") is None for entry in file.hosts):
        raise JobError(f"{len(networks)} hosts, and links.between does not say how they are connected: add it")
    if links.inside is None and any(entry.get("devices", 1) > 1 for entry in file.hosts):
        raise JobError("a host has several devices, and links.inside does not say how they are connected: add it")
    mixed = {kinds[name].overlaps for name in used}
    if len(mixed) > 1:
        raise JobError("some devices have overlaps = true and some have not: workers of one job do it all, or none")
