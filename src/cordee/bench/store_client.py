"""The measuring side of the store's benchmark, a process of its own that may be in another network.

    python -m cordee.bench.store_client < order.json

prints one JSON line: for each contestant and size the milliseconds of each round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cordee.bench.echo import Echo
from cordee.parameters import KVStore

_BLOCK_BYTES = 1 << 26  # that a block moves, at least 3 calls and at most 200


class ClientOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to measure."""

    store: str
    key_file: str
    echoes: dict[str, tuple[str, str]]  # name -> address and public key
    sizes: list[int]  # floats
    rounds: int
    num_pushes: int = 0  # of 1 KB, to be made at the end, while the server's memory is watched


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientOrder)
    torch.set_num_threads(1)
    echoes = {name: Echo(address, public) for name, (address, public) in order.echoes.items()}
    with KVStore(order.store, key_file=Path(order.key_file)) as store:
        raw: dict[str, dict[int, list[float]]] = {}
        for size in order.sizes:
            array, out = np.ones(size, np.float32), np.empty(size, np.float32)
            store.init(f"floats {size}", np.zeros(size, np.float32))
            contestants: dict[str, Callable[[], Any]] = {
                "cordee": lambda size=size, array=array, out=out: store.push_pull(f"floats {size}", array, out)  # type: ignore[misc]
            }
            for name, echo in echoes.items():
                contestants[name] = lambda echo=echo, array=array: echo(array)  # type: ignore[misc]
            for name, milliseconds in _measure(contestants, array.nbytes, order.rounds).items():
                raw.setdefault(name, {})[size] = milliseconds
        _print(raw)
        if order.num_pushes:
            _watch_memory(store, order.num_pushes)
    for echo in echoes.values():
        echo.close()


def _measure(contestants: dict[str, Callable[[], Any]], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the median of each block: blocks of the contestants take turns, calls do not."""
    calls = max(3, min(200, _BLOCK_BYTES // num_bytes))
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            call, times = contestants[name], []
            for _ in range(calls):
                started = time.perf_counter()
                call()
                times.append((time.perf_counter() - started) * 1e3)
            if index:  # the first block warms up
                found[name].append(statistics.median(times))
    return found


def _watch_memory(store: KVStore, num_pushes: int) -> None:
    """Make the pushes in two parts, and wait for a line of input after the first: what comes before is warming up."""
    array = np.ones(256, np.float32)
    store.init("pushed often", array)
    for part in (num_pushes // 10, num_pushes - num_pushes // 10):
        for _ in range(part):
            store.push("pushed often", array)
        _print({"pushed": part})
        sys.stdin.buffer.readline()


def _print(answer: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
