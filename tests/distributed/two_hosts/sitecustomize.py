"""Loaded by Python at its start: under this path workers of odd numbers take themselves to be on another host."""

from __future__ import annotations

import sys

if "cordee.cluster.engines.fork_server" in sys.orig_argv:
    from cordee.communication import this_host
    from cordee.core import fault_points

    here = this_host.host_id

    def host_id() -> str:
        role, _, number = fault_points._process.partition("-")
        return f"{here()}/other" if role == "worker" and int(number) % 2 else here()

    this_host.host_id = host_id

    from cordee.cluster.member_link import MemberSpec

    # Both hosts are this machine, on which the coordinator has one address.
    MemberSpec.coordinator_address = property(lambda spec: spec.address)
