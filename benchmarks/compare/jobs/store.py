"""A round trip through the key-value store: prints versions and a digest of what came back as JSON."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch

import cordee


def main() -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    large = torch.arange(600_000, dtype=torch.float32)  # more than 1 MB: cut over the servers
    digest = hashlib.sha256()
    with cordee.KVStore.local(num_servers=2) as store:
        store.init(["small", "large", "rows"], [values, large, torch.zeros(50, 4)])
        version = store.push("small", values)
        added = store.pull("small")
        store.set_updater("adam", lr=0.1)
        store.push("small", values)
        whole, whole_version = store.push_pull("large", torch.ones_like(large))
        store.set_updater("sgd", lr=0.5, keys="rows")
        store.push_rows("rows", np.array([3, 7, 3]), torch.ones(3, 4))
        rows = store.pull_rows("rows", np.array([3, 7, 8]))
        handle = store.push_pull_async("small", values)
        last = handle.wait()
        store.barrier()
        for value in (added.value, whole, rows[0], last[0]):
            digest.update(np.ascontiguousarray(np.asarray(value)).tobytes())
        found = {"versions": [int(version), int(added.version), int(whole_version), int(last[1])]}
        kinds = [type(value).__name__ for value in (added.value, whole)]
        print(json.dumps({**found, "kinds": kinds, "servers": store.num_servers, "sha256": digest.hexdigest()}))


if __name__ == "__main__":
    main()
