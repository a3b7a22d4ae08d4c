"""Cluster files: what they say is what the cost model asks; what contradicts itself is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from cordee.core.errors import JobError
from cordee.planner.cluster_file import load_cluster, read_cluster

GOOD: dict[str, Any] = {
    "devices": {"fast": {"speed": 40, "memory": "80 GiB"}, "slow": {"speed": 10.0, "memory": 16_000_000_000}},
    "hosts": [
        {"name": "old", "device": "slow", "devices": 2, "network": {"bandwidth": "10 Gbit/s"}},
        {"name": "node", "device": "fast", "devices": 4, "count": 2},
    ],
    "links": {
        "inside": {"latency": "5us", "bandwidth": "200 GB/s"},
        "between": {"latency": "20 us", "bandwidth": "25 Gbit/s"},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    table = copy.deepcopy(GOOD)
    place: Any = table
    *keys, last = path.split(".")
    for key in keys:
        place = place[int(key) if key.isdecimal() else key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return table


def test_unlike_devices_and_their_links() -> None:
    cluster = read_cluster(GOOD)
    assert [device.host for device in cluster.devices] == ["node-1"] * 4 + ["node-2"] * 4 + ["old"] * 2
    assert (cluster.devices[0].speed, cluster.devices[0].memory_bytes) == (40.0, 80 * 2**30)
    assert cluster.link(0, 1).bytes_per_s == 200e9
    assert cluster.link(0, 4).bytes_per_s == 25e9 / 8
    assert cluster.link(0, 4).latency_s == pytest.approx(20e-6)
    assert cluster.link(0, 9).bytes_per_s == 10e9 / 8  # the slower of the two hosts' networks
    assert cluster.memory_limit(8) == 80 * 2**30
    assert cluster.memory_limit(9) == 16e9


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("hosts.0.device", "slwo", "host 'old' has the device 'slwo', which .* did you mean 'slow'"),
        ("hosts.0.devcies", 3, r"hosts\[1\]\] has no key 'devcies'; did you mean 'device"),
        ("links.beween", {}, r"\[links\] has no key 'beween'; did you mean 'between'"),
        ("nodes", [], r"\[cluster\] has no key 'nodes'"),
        ("devices.spare", {"speed": 1.0, "memory": "1 GB"}, "no host has the device 'spare'"),
        ("devices.fast.speed", 0.0, "devices.fast.speed = 0.0 must be above 0"),
        ("devices.fast.speed", float("inf"), "devices.fast.speed = inf must be above 0 and at most"),
        ("devices.fast.memory", "1e400 GiB", "devices.fast.memory = '1e400 GiB' is more than can be computed with"),
        ("hosts.1.count", 10**9, "host 'node': .* the cluster has more than 100,000 devices"),
        ("devices.fast.memory", "80 Gigs", "devices.fast.memory = '80 Gigs' is not an amount"),
        ("devices.fast.memory", None, r"\[devices.fast\] has no 'memory'"),
        ("devices.fast.overlaps", True, "some devices have overlaps = true and some have not"),
        ("hosts.1.count", 0, "host 'node': count = 0 must be at least 1"),
        ("hosts.1.name", "old", None),
        ("hosts.0.name", "node-1", "there are two hosts 'node-1'"),
        ("links.between", None, "3 hosts, and links.between does not say"),
        ("links.inside", None, "links.inside does not say"),
        ("links.inside.bandwidth", "25 Gb/s", "bandwidth = '25 Gb/s' may mean bits or bytes: write Gbit/s"),
        ("hosts.0.name", " ", r"hosts\[1\].name = ' ' is no name"),
        ("links.inside.bandwidth", "fast", "links.inside.bandwidth = 'fast' is not an amount"),
        ("links.inside.bandwidth", None, "links.inside has no 'bandwidth'"),
        ("hosts", None, r"the cluster has no \[hosts\]"),
    ],
)
def test_contradictions_are_refused(path: str, value: Any, message: str | None) -> None:
    table = changed(path, value)
    if message is None:  # old, node-1, node-2 under one name are three hosts still
        assert len({device.host for device in read_cluster(table).devices}) == 3
        return
    with pytest.raises(JobError, match=message):
        read_cluster(table)


def test_the_file_is_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with pytest.raises(JobError, match="no cluster file"):
        load_cluster(file)
    file.write_text("devices = 3")
    with pytest.raises(JobError, match=r"cluster\.toml: the cluster has no"):
        load_cluster(file)
    file.write_text("devices = [")
    with pytest.raises(JobError, match="is not valid TOML"):
        load_cluster(file)
