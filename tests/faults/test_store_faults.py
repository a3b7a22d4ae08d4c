"""Servers and clients of a store that are killed, frozen or cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import cordee
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.local import LocalServers

CLIENT = """
import sys, time
import numpy as np
import cordee

store = cordee.KVStore(failure_timeout="3s")
print("joined", flush=True)
while True:
    store.push("w", np.ones(1000, np.float32))
"""

PARENT = """
import os, time
import numpy as np
import cordee

store = cordee.KVStore.local(2)
store.init("w", np.zeros(3))
print(*store._servers.pids, flush=True)
if os.fork() == 0:  # holds the parent's pipes open
    time.sleep(30)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServers]:
    servers = LocalServers(2, [], 3.0)
    monkeypatch.setenv("CORDEE_STORE", servers.address)
    monkeypatch.setenv("CORDEE_STORE_KEY", servers.key.to_text())
    yield servers
    servers.close()


@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_killed_server_is_named(servers: LocalServers, shared_memory: bool) -> None:
    with cordee.KVStore(failure_timeout="3s", shared_memory=shared_memory) as store:
        store.init("w", np.zeros(1_000_000, np.float32))
        os.kill(servers.pids[1], signal.SIGKILL)
        with pytest.raises(CommunicationError, match=r"server 1 of the store is gone: .*tcp://"):
            store.push("w", np.ones(1_000_000, np.float32))
        with pytest.raises(CommunicationError, match="server 1 of the store is gone"):
            store.push_async("w", np.ones(1_000_000, np.float32)).wait(60)


def test_a_frozen_server_is_named_within_the_failure_timeout(servers: LocalServers) -> None:
    with cordee.KVStore(failure_timeout="3s") as store:
        store.init("w", np.zeros(8_000_000, np.float32))  # in many pieces
        os.kill(servers.pids[1], signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(
            CommunicationError, match=r"server 1 of the store is gone: .* is frozen: no sign of life for 3"
        ):
            store.push("w", np.ones(8_000_000, np.float32))
        waited_s = time.monotonic() - began_s
        os.kill(servers.pids[1], signal.SIGKILL)
    assert waited_s < 6, "more than twice the failure timeout"


def test_what_a_lost_client_says_when_it_wakes_up_is_refused(servers: LocalServers) -> None:
    with cordee.KVStore(failure_timeout="3s") as store:
        store.init("w", np.zeros(1000, np.float32))
        client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert client.stdout is not None and client.stdout.readline() == b"joined\n"
        store.pull("w", min_version=50, timeout_s=20)
        client.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreError, match="worker 1"):
            store.barrier(timeout_s=2)
        store.barrier(timeout_s=20)  # by now it is given up
        time.sleep(1.5)  # for the other server to hear of it
        version = store.pull("w").version
        client.send_signal(signal.SIGCONT)
        _, problem = client.communicate(timeout=20)
        assert b"this worker was given up" in problem
        assert store.pull("w").version <= version + 1, "only what was in the shared-memory channel already may count"


def test_a_killed_client_leaves_whole_pushes_and_is_named_at_the_barrier(servers: LocalServers) -> None:
    with cordee.KVStore(failure_timeout="3s") as store:
        store.init("w", np.zeros(1000, np.float32))
        client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdout.readline() == b"joined\n"
        store.pull("w", min_version=50, timeout_s=20)
        client.kill()
        client.wait()
        client.stdout.close()
        value, version = store.pull("w")
        assert value.tolist() == [version] * 1000 and version >= 50
        with pytest.raises(StoreError, match=r"barrier: worker 1 \(process \d+ on .*\) did not come within 1 s"):
            store.barrier(timeout_s=1)
        store.barrier(timeout_s=20)  # by now it is given up, and the store has no fixed number of workers
        assert store.push_pull("w", np.ones(1000, np.float32)).version == version + 1


def test_servers_end_with_the_process_that_started_them() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    children = psutil.Process(parent.pid).children()
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child for child in children if child.pid in pids], timeout=10)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert not alive


class CuttingProxy:
    """Forwards connections to a server, and cuts all of them now and then."""

    def __init__(self, port: int, every_s: float) -> None:
        self._target, self._every_s = port, every_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_cut = 0
        self._pairs: list[socket.socket] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept), threading.Thread(target=self._cut)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in list(self._threads):
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._forward, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._cut_all()
        self._cut_all()

    def _cut_all(self) -> None:
        pairs, self._pairs = self._pairs, []
        for end in pairs:
            self.num_cut += 1
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_pushes_count_once_over_a_connection_that_breaks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = LocalServers(1, [], 20.0)
    proxy = CuttingProxy(int(servers.address.rpartition(":")[2]), every_s=0.4)
    monkeypatch.setenv("CORDEE_STORE_KEY", servers.key.to_text())
    try:
        with cordee.KVStore(f"tcp://127.0.0.1:{proxy.port}", failure_timeout="20s", shared_memory=False) as store:
            store.init("small", np.zeros(100, np.float32))
            store.init("large", np.zeros(500_000, np.float32))
            num_pushes = 0
            while proxy.num_cut < 20:
                store.push("small", np.ones(100, np.float32))
                store.push_pull("large", np.ones(500_000, np.float32))
                num_pushes += 1
        with cordee.KVStore(servers.address, failure_timeout="5s") as store:
            for key in ("small", "large"):
                value, version = store.pull(key)
                assert np.unique(value).tolist() == [num_pushes] and version == num_pushes
    finally:
        proxy.close()
        servers.close()


@pytest.mark.timeout(300)
def test_what_a_killed_server_has_acknowledged_is_not_lost() -> None:
    """Two clients push without a pause; processes of both servers are killed. Each acknowledged push counts, once."""
    with cordee.KVStore.local(2, replicas=2, failure_timeout="15s") as store:
        assert store._servers is not None
        _, first, second, *_ = store._servers.pids  # before them the directory, after them their followers
        store.set_updater("sgd", lr=1.0, momentum=0.5)
        keys = {"small": 1000, "large": 700_000}  # the large one is cut over both servers, and read in place
        for key, length in keys.items():
            store.init(key, np.zeros(length, np.float32))
        acknowledged = dict.fromkeys(keys, 0)
        is_over = threading.Event()
        problems: list[BaseException] = []

        def push(key: str) -> None:
            try:
                while not is_over.is_set():
                    version = store.push_pull(key, np.ones(keys[key], np.float32)).version
                    acknowledged[key] += 1
                    assert version == acknowledged[key]
            except BaseException as error:  # noqa: BLE001 - raised by the test
                problems.append(error)

        threads = [threading.Thread(target=push, args=(key,)) for key in keys]
        for thread in threads:
            thread.start()
        for pid in (first, second):
            before = dict(acknowledged)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not problems:
                if all(acknowledged[key] > before[key] + 20 for key in keys):
                    break
                time.sleep(0.05)
        is_over.set()
        for thread in threads:
            thread.join()
        assert not problems, problems
        for key, length in keys.items():
            value, speed = np.float32(0), np.float32(0)
            for _ in range(acknowledged[key]):
                speed = np.float32(0.5) * speed + np.float32(1)
                value = value - speed
            found, version = store.pull(key)
            assert version == acknowledged[key] > 40 and np.array_equal(found, np.full(length, value))


@pytest.mark.timeout(300)
def test_a_killed_second_is_replaced_by_one_that_then_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = LocalServers(1, [], 15.0, replicas=2)
    monkeypatch.setenv("CORDEE_STORE_KEY", servers.key.to_text())
    ones = np.ones(100_000, np.float32)
    new = None
    try:
        _, first, second = servers.pids
        with cordee.KVStore(servers.address, failure_timeout="15s") as store:
            store.set_updater("adam", lr=0.1)
            store.init("w", np.zeros_like(ones))
            for _ in range(3):
                store.push("w", ones)
            os.kill(second, signal.SIGKILL)
            assert store.push("w", ones) == 4, "the first one continues alone"
            command = [sys.executable, "-m", "cordee", "server", "--join", servers.address, "--failure-timeout", "15s"]
            new = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert new.stdout is not None
            assert "server 0 of 1 listens" in new.stdout.readline()
            assert "can take its place" in new.stdout.readline()
            before = store.pull("w")
            os.kill(first, signal.SIGKILL)
            after = store.pull("w")
            assert after.version == before.version == 4 and np.array_equal(after.value, before.value)
            # Adam moves by the rate at each push of the same gradient, if it has its state.
            assert np.allclose(store.push_pull("w", ones).value, -0.5, rtol=1e-3)
    finally:
        if new is not None:
            new.kill()
            new.communicate()
        servers.close()


@pytest.mark.timeout(300)
def test_a_frozen_server_has_its_second_take_over_and_does_not_answer_when_it_wakes_up() -> None:
    with cordee.KVStore.local(1, replicas=2, failure_timeout="3s") as store:
        assert store._servers is not None
        _, first, _ = store._servers.pids
        store.init("w", np.zeros(1000, np.float32))
        store.push("w", np.ones(1000, np.float32))
        os.kill(first, signal.SIGSTOP)
        assert store.push("w", np.ones(1000, np.float32)) == 2
        os.kill(first, signal.SIGCONT)
        psutil.Process(first).wait(20)  # it ends: it was given up
        value, version = store.pull("w")
        assert version == 2 and np.unique(value).tolist() == [2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attack", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_without_its_directory_says_so_and_ends(attack: signal.Signals) -> None:
    """The directory is not replicated. Servers answer until another could have taken their place, then nobody does."""
    with cordee.KVStore.local(1, replicas=2, failure_timeout="3s") as store:
        assert store._servers is not None
        directory, *servers = store._servers.pids
        store.init("w", np.zeros(1000, np.float32))
        assert store.push("w", np.ones(1000, np.float32)) == 1
        os.kill(directory, attack)
        began_s = time.monotonic()
        with pytest.raises(CommunicationError, match="directory of the store is gone"):
            store.barrier(timeout_s=60)
        with pytest.raises(CommunicationError, match="is gone, and without it no server answers"):
            while time.monotonic() - began_s < 60:
                store.push("w", np.ones(1000, np.float32))
                time.sleep(0.02)
        assert time.monotonic() - began_s < 20
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in servers if psutil.pid_exists(pid)], timeout=20)
        assert not alive
        os.kill(directory, signal.SIGKILL)
