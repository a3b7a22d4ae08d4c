"""Which worker goes to which host of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cordee.planner.prediction import Prediction
from cordee.planner.site import Device
from cordee.strategies.table import STRATEGIES


def place(choice: Prediction, devices: Sequence[Device]) -> dict[str, list[str]]:
    """Return what runs on each host that is used.

    Workers fill one host after the other, the fastest devices first: neighbours in a ring, a pipeline or a sliced
    layer talk most, and so are on one host. Servers go to as many different hosts as there are: one that is lost
    takes few of them along, and each has a network of its own.
    """
    tenants: dict[str, list[str]] = {}
    for index, device in enumerate(devices[: choice.workers]):
        tenants.setdefault(device.host, []).append(f"worker {index}")
    hosts = list(dict.fromkeys(device.host for device in devices))
    if STRATEGIES[choice.strategy].cost_model == "servers":
        idle_first = sorted(hosts, key=lambda host: len(tenants.get(host, [])))
        for server in range(int(choice.settings.get("servers", 1))):
            tenants.setdefault(idle_first[server % len(hosts)], []).append(f"server {server}")
    return tenants
