"""What `cordee bench server` measures of the store on one host: prints the median milliseconds of push_pull as JSON."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import torch

import cordee

SIZES = (256, 44_000, 1 << 20)  # floats
BLOCK_BYTES = 1 << 27  # that are moved for each size, in at least 20 calls and at most 500


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    with cordee.KVStore.local() as store:
        for size in SIZES:
            array, out = np.ones(size, np.float32), np.empty(size, np.float32)
            store.init(f"floats {size}", np.zeros(size, np.float32))
            num_calls = max(20, min(500, BLOCK_BYTES // array.nbytes))
            times_ms = []
            for _ in range(num_calls + num_calls // 4):  # the first fifth warms up
                started_s = time.perf_counter()
                store.push_pull(f"floats {size}", array, out)
                times_ms.append((time.perf_counter() - started_s) * 1e3)
            found[str(size)] = statistics.median(times_ms[-num_calls:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
