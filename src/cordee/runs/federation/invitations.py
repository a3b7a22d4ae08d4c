"""Who may join a federation: invite, revoke, status. Reads and writes the file of a server that may be running.

Does not import torch: the commands answer at once.
"""

from __future__ import annotations

from pathlib import Path

from cordee.communication.keys import ServerKeys
from cordee.communication.this_host import split_address
from cordee.core.errors import JobError, RunDirectoryError
from cordee.monitoring import read_events
from cordee.monitoring.run_directory import holder_of
from cordee.runs.federation.messages import Invitation
from cordee.runs.federation.store import STORE_FILE, FederationStore

KEYS_FILE = "federation.keys"
ADDRESS, RUN = "address", "run"  # facts in the store


def invite(run_dir: Path, name: str, address: str = "") -> Invitation:
    """Invite a client; return its invitation. `address` is the server's as the client reaches it."""
    store = FederationStore(run_dir / STORE_FILE)
    try:
        reached = address or store.fact(ADDRESS)
        run = store.fact(RUN)
        if reached is None or run is None:
            raise RunDirectoryError(f"the federation in {run_dir} has not listened yet: start it first")
        if not split_address(reached)[1]:
            raise JobError(f"--address {address!r} must be HOST:PORT")
        keys = ServerKeys.load(run_dir / KEYS_FILE)
        ticket = store.invite(name)
        return Invitation(run=run, name=name, address=reached, server_key=keys.public.hex(), ticket=ticket)
    finally:
        store.close()


def revoke(run_dir: Path, name: str) -> None:
    """Refuse whatever a client says from now on."""
    store = FederationStore(run_dir / STORE_FILE)
    try:
        store.revoke(name)
    finally:
        store.close()


def describe_federation(run_dir: Path) -> str:
    """Return where a federation is, who its clients are, and what they have done."""
    store = FederationStore(run_dir / STORE_FILE)
    try:
        clients, current = store.clients(), store.round()
        heard = {r.client for r in store.results(current.round, current.attempt)} if current is not None else set()
        holder = holder_of(run_dir / ".lock")
        lines = [
            f"listens at {store.fact(ADDRESS)} (process {holder.pid})" if holder else "is not running",
        ]
        done = [event for event in read_events(run_dir / "events.jsonl") if event["type"] == "round"]
        lines.append(f"rounds done: {done[-1]['round'] if done else 0}")
        if done and done[-1].get("epsilon") is not None:
            lines.append(f"privacy spent: ε = {done[-1]['epsilon']:.3g}")
        if current is not None:
            lines.append(f"round {current.round + 1}: {len(current.asked)} asked, {len(heard)} have answered")
        for client in clients:
            state = "revoked" if client.is_revoked else "joined" if client.key else "invited"
            lines.append(f"  {client.name}: {state}")
        return "\n".join(lines)
    finally:
        store.close()
