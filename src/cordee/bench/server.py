"""The store beside ZeroMQ itself: push_pull of an array against an echo of the same bytes, in one run.

On one host against an echo without encryption over loopback; between two network namespaces, where everything goes
through TCP, against echoes with and without. Blocks of calls take turns. ps-lite's figures are not measured here: they
are of ps-lite (C++) on another host of this size, for orientation.

    python -m cordee.bench.server echo|client < spec.json

are the processes of the benchmark: the peer, which listens as its spec says and prints where, and the measuring side,
which may be in another network.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import zmq

from cordee.bench.harness import Report, describe_machine, interleave, median_ratio
from cordee.core.errors import CordeeError
from cordee.parameters import KVStore

SIZES = (256, 44_000, 1 << 18, 1 << 22, 1 << 24)
FAR_SIZES = (256, 44_000, 1 << 18, 1 << 22)
PS_LITE_MS = {256: 0.44, 44_000: 0.59, 1 << 18: 1.06, 1 << 22: 17.0, 1 << 24: 137.0}
NUM_PUSHES = 100_000
_SMALL_BYTES = 64 << 10  # below this a copy is cheaper than keeping track of the buffer
MODULE = "cordee.bench.server"
_BLOCK_BYTES = 1 << 26  # that a block of calls moves, at least 3 calls and at most 200


class EchoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen, and the pair of keys, as Z85, if the bytes are to be encrypted."""

    listen: str
    public: str = ""
    secret: str = ""


class ClientSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to measure."""

    store: str
    key_file: str
    echoes: dict[str, tuple[str, str]]  # name -> address and public key
    sizes: list[int]  # floats
    rounds: int
    num_pushes: int = 0  # of 1 KB, to be made at the end, while the server's memory is watched


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    sizes: Sequence[int] = SIZES,
    far_sizes: Sequence[int] = FAR_SIZES,
    num_pushes: int = NUM_PUSHES,
) -> Report:
    """Measure on one host, between namespaces if they can be made, and the server's memory.

    Ratios above 1 mean that the store is that many times faster than the echo.
    """
    raw: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    memory: list[int] = []
    say("one host")
    found = _measure([], [], "127.0.0.1", ["echo"], sizes, rounds, num_pushes, memory)
    _add(rows, raw, "one host", found)
    settings: dict[str, Any] = {"sizes": list(sizes), "rounds": rounds, "num_pushes": num_pushes}
    if far_sizes:
        try:
            with _namespaces() as (near, far, address):
                say("two network namespaces")
                found = _measure(near, far, address, ["echo with CURVE", "echo"], far_sizes, rounds, 0, [])
            _add(rows, raw, "two networks", found)
        except _NoNamespacesError as error:
            settings["two_networks"] = f"left out: {error}"
            say(f"two networks: left out: {error}")
    if memory:
        settings["server_bytes"] = {"after a tenth of the pushes": memory[0], "after all": memory[1]}
        say(f"memory of the server over {num_pushes:,} pushes: {memory[1] / memory[0] - 1:+.2%}")
    return Report("server", describe_machine(), settings, raw, "ms", rows)


def _add(
    rows: list[dict[str, Any]],
    raw: dict[str, list[float]],
    where: str,
    found: dict[str, dict[int, list[float]]],
) -> None:
    for size, ours in found["cordee"].items():
        for name in (name for name in found if name != "cordee"):
            theirs = found[name][size]
            raw[f"{name}, {where}, {size} floats"] = theirs
            peer_ms = PS_LITE_MS.get(size) if where == "one host" else None
            rows.append(
                {
                    "where": where,
                    "floats": size,
                    "push_pull_ms": statistics.median(ours),
                    "peer": name,
                    "peer_ms": statistics.median(theirs),
                    "times_peer": median_ratio(theirs, ours),
                    "ps_lite_ms": peer_ms,
                    "times_ps_lite": None if peer_ms is None else peer_ms / statistics.median(ours),
                }
            )
        raw[f"cordee, {where}, {size} floats"] = ours


def _measure(
    near: list[str],
    far: list[str],
    host: str,
    echoes: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    num_pushes: int,
    memory: list[int],
) -> dict[str, dict[int, list[float]]]:
    """Start the servers with the command prefix `far` and the client with `near`; return what the client measured."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cordee-bench-"))
        addresses: dict[str, tuple[str, str]] = {}
        for name in echoes:
            public, secret = (key.decode() for key in zmq.curve_keypair()) if "CURVE" in name else ("", "")
            echo = stack.enter_context(_started([*far, sys.executable, "-m", MODULE, "echo"]))
            _send_spec(echo, EchoSpec(listen=f"tcp://{host}:*", public=public, secret=secret))
            addresses[name] = (_line(echo).decode().strip(), public)
        key = str(Path(folder) / "key")
        command = [*far, sys.executable, "-m", "cordee", "server", "--listen", f"tcp://{host}:*", "--key-file", key]
        server = stack.enter_context(_started(command))
        store = _line(server).decode().split()[6]
        for _ in range(2):  # where the key is, and how to start workers
            _line(server)
        client = stack.enter_context(_started([*near, sys.executable, "-m", MODULE, "client"]))
        spec = ClientSpec(
            store=store, key_file=key, echoes=addresses, sizes=list(sizes), rounds=rounds, num_pushes=num_pushes
        )
        _send_spec(client, spec)
        found = msgspec.json.decode(_line(client), type=dict[str, dict[int, list[float]]])
        if num_pushes:
            for _ in range(2):
                _line(client)
                memory.append(int(psutil.Process(server.pid).memory_info().rss))
                _send_spec(client, None)
        return found


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _send_spec(process: subprocess.Popen[bytes], spec: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CordeeError("a process of the benchmark ended: its error is above")
    return line


class _NoNamespacesError(CordeeError):
    pass


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[list[str], list[str], str]]:
    """Two network namespaces with a link between them: the command prefixes of both, and the address of the second."""
    names = [f"cordee-bench-{os.getpid()}-{side}" for side in "ab"]

    def ip(*arguments: str) -> None:
        try:
            subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
        except FileNotFoundError:
            raise _NoNamespacesError("there is no command `ip` here (Debian: iproute2)") from None
        except subprocess.CalledProcessError as error:
            raise _NoNamespacesError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "bench0", "netns", names[0], "type", "veth", "peer", "name", "bench0", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.231.7.{index + 1}/24", "dev", "bench0")
            ip("-n", name, "link", "set", "bench0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        near, far = (["ip", "netns", "exec", name] for name in names)
        yield near, far, "10.231.7.2"
    finally:
        for name in names:
            with contextlib.suppress(_NoNamespacesError):
                ip("netns", "delete", name)


class Echo:
    """The client: one round trip of the bytes of an array."""

    def __init__(self, address: str, server_public: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        if server_public:
            public, secret = zmq.curve_keypair()
            self._socket.curve_serverkey = server_public.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.connect(address)

    def __call__(self, array: np.ndarray[Any, Any]) -> None:
        """Send the bytes and take them back, without a copy on this side where that is faster."""
        self._socket.send(array.data, 0, copy=array.nbytes < _SMALL_BYTES)
        frame = self._socket.recv(copy=False)
        assert len(frame) == array.nbytes

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def serve_echo() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EchoSpec)
    context = zmq.Context()
    server = context.socket(zmq.REP)
    server.linger = 0
    if spec.secret:
        server.curve_server = True
        server.curve_publickey, server.curve_secretkey = spec.public.encode(), spec.secret.encode()
    server.bind(spec.listen)
    print(bytes(server.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode(), flush=True)
    while True:
        if not server.poll(500):
            if select.select([sys.stdin], [], [], 0)[0]:
                break
            continue
        frame = server.recv(copy=False)
        server.send(frame, copy=False)
    server.close()
    context.term()


def measure_store() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientSpec)
    torch.set_num_threads(1)
    echoes = {name: Echo(address, public) for name, (address, public) in spec.echoes.items()}
    with KVStore(spec.store, key_file=Path(spec.key_file)) as store:
        raw: dict[str, dict[int, list[float]]] = {}
        for size in spec.sizes:
            array, out = np.ones(size, np.float32), np.empty(size, np.float32)
            store.init(f"floats {size}", np.zeros(size, np.float32))
            calls: dict[str, Callable[[], object]] = {"cordee": partial(store.push_pull, f"floats {size}", array, out)}
            calls |= {name: partial(echo, array) for name, echo in echoes.items()}
            num_calls = max(3, min(200, _BLOCK_BYTES // array.nbytes))
            # Blocks of the contestants take turns, calls do not.
            blocks = {name: partial(_median_ms, call, num_calls) for name, call in calls.items()}
            for name, milliseconds in interleave(blocks, spec.rounds).items():
                raw.setdefault(name, {})[size] = milliseconds
        _print(raw)
        if spec.num_pushes:
            _watch_memory(store, spec.num_pushes)
    for echo in echoes.values():
        echo.close()


def _median_ms(call: Callable[[], object], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


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
    {"echo": serve_echo, "client": measure_store}[sys.argv[1]]()
