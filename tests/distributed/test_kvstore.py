"""`cordee.KVStore` with real servers, on one host through shared memory and through channels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import cordee
from cordee.core.errors import StoreError
from cordee.parameters.local import LocalServers

COMMAND = [sys.executable, "-m", "cordee"]


@pytest.fixture(scope="module")
def servers() -> Iterator[LocalServers]:
    servers = LocalServers(2, ["updates"], 5.0)
    yield servers
    servers.close()


@pytest.fixture(params=[True, False], ids=["shared memory", "channel"])
def store(
    servers: LocalServers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[cordee.KVStore]:
    monkeypatch.setenv("CORDEE_STORE_KEY", servers.key.to_text())
    with cordee.KVStore(servers.address, failure_timeout="5s", shared_memory=request.param) as store:
        store.set_updater("add")
        yield store


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


def test_push_and_pull(store: cordee.KVStore, name: str) -> None:
    small, large = np.arange(10, dtype=np.float64), torch.arange(3_000_000.0).view(3000, 1000)
    store.init([name, f"{name} large"], [small, large])
    assert store.push(name, small) == 1
    pulled = store.pull(name)
    assert pulled.version == 1 and isinstance(pulled.value, np.ndarray) and np.array_equal(pulled.value, 2 * small)
    value, version = store.push_pull(f"{name} large", large)
    assert version == 1 and isinstance(value, torch.Tensor) and torch.equal(value, 2 * large)
    out = torch.empty_like(large)
    assert store.pull(f"{name} large", out=out).value is out and torch.equal(out, 2 * large)
    assert [one.version for one in store.pull([name, f"{name} large"])] == [1, 1]


def test_an_optimizer_on_the_servers_equals_one_at_home(store: cordee.KVStore, name: str) -> None:
    torch.manual_seed(0)
    store.set_updater("adam", lr=0.01)
    value = torch.randn(700, 900)  # cut over the two servers
    store.init(name, value)
    home = value.clone().requires_grad_()
    optimizer = torch.optim.Adam([home], lr=0.01, fused=True)
    for _ in range(3):
        home.grad = torch.randn_like(home)
        pulled = store.push_pull(name, home.grad)
        optimizer.step()
    assert torch.equal(pulled.value, home.detach()) and pulled.version == 3


@pytest.mark.parametrize("compression", ["fp16", "int8", "topk"])
def test_compressed_pushes(store: cordee.KVStore, name: str, compression: str) -> None:
    """What a push lacks comes with the next ones: the sum is right but for what is left of the last."""
    store.init([name, f"{name} counter"], [np.zeros(700_000, np.float32), np.zeros(1, np.int64)])  # cut over both
    store.set_compression(compression, keys=name)  # type: ignore[arg-type]
    meant = np.zeros(700_000)
    for seed in range(5):
        values = np.random.default_rng(seed).normal(size=700_000).astype(np.float32)
        meant += values
        pulled = store.push_pull(name, values)
        store.push(f"{name} counter", np.ones(1, np.int64))
    left = np.concatenate([np.asarray(one.left) for one in store._entries[name].feedback])
    assert pulled.version == 5 and np.allclose(pulled.value + left, meant, atol=1e-4)
    assert store.pull(f"{name} counter").value.tolist() == [5]
    store.set_compression(compression)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="counter' is int64: set_compression"):
        store.push(f"{name} counter", np.ones(1, np.int64))
    with pytest.raises(StoreError, match="compression = 'int88' is not known; did you mean 'int8'"):
        store.set_compression("int88")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="topk = 2 must be above 0 and at most 1"):
        store.set_compression("topk", topk=2)


def test_rows_functions_and_versions(store: cordee.KVStore, name: str) -> None:
    table = torch.zeros(1000, 500)  # cut over the two servers
    store.init(name, table)
    rows = [999, 0, 500, 0]
    store.push_rows(name, rows, torch.ones(4, 500))
    assert store.pull_rows(name, [0, 1, 999]).value[:, 0].tolist() == [2, 0, 1]
    store.set_updater("updates:keep_largest", scale=3.0)
    assert store.push_pull(name, torch.ones(1000, 500)).value.unique().tolist() == [3]
    waiting = store.pull_async(name, min_version=3)
    assert not waiting.is_done
    store.init(f"{name} 2", np.zeros(1))
    with pytest.raises(StoreError, match=r"is at version 0 and did not reach version 9 within 0.3 s"):
        store.pull(f"{name} 2", min_version=9, timeout_s=0.3)
    thread = threading.Timer(0.1, lambda: _push_from_elsewhere(store, name))
    thread.start()
    assert waiting.wait(10).version == 3
    thread.join()


def _push_from_elsewhere(store: cordee.KVStore, name: str) -> None:
    with cordee.KVStore(store.address, failure_timeout="5s") as other:
        other.push(name, torch.ones(1000, 500))


def test_operations_under_way(store: cordee.KVStore, name: str) -> None:
    keys = [f"{name} {index}" for index in range(6)]
    store.init(keys, [np.zeros(50_000, np.float32) for _ in keys])
    handles = [store.push_async(keys, [np.ones(50_000, np.float32)] * 6, priority=index) for index in range(3)]
    assert store.pull(keys[0]).value[0] == 3, "a pull comes after the pushes that were begun before"
    both = store.push_pull_async(keys[1], np.ones(50_000, np.float32))
    assert [store.wait(handle) for handle in handles][-1] == [3] * 6
    assert both.wait().value[-1] == 4
    store.wait_all()


def test_mistakes_have_one_clear_message(store: cordee.KVStore, name: str, servers: LocalServers) -> None:
    store.init(name, np.zeros((2, 3), np.float32))
    for mistake, message in (
        (lambda: store.init(name, np.zeros((2, 3), np.float32)), "has been initialised before"),
        (lambda: store.pull(f"{name}s"), r"has not been initialised: call init first; did you mean"),
        (
            lambda: store.push(name, np.zeros((3, 2), np.float32)),
            r"float32 of shape \(2, 3\), and this value is float32",
        ),
        (lambda: store.push(name, np.zeros((2, 3))), "and this value is float64"),
        (lambda: store.push([name], []), "1 keys and 0 values"),
        (lambda: store.push(3.5, np.zeros(1)), "a key is a name or a number, not 3.5"),
        (lambda: store.push_rows(name, [2], np.zeros((1, 3), np.float32)), "has no row 2: it has 2 rows"),
        (lambda: store.push_rows(name, [0.5], np.zeros((1, 3), np.float32)), "rows are a list of whole numbers"),
        (lambda: store.push_rows(name, [0], np.zeros((2, 3), np.float32)), "1 rows of key"),
        (lambda: store.pull(name, min_version=-5), "min_version = -5 must be a whole number from 0 to"),
        (lambda: store.pull(name, min_version=2**70), "must be a whole number from 0 to"),
        (lambda: store.pull(name, min_version="new"), "min_version = 'new' must be a whole number"),
        (lambda: store.pull(name, min_version=9, timeout_s="1s"), "timeout_s = '1s' must be at least 0"),
        (lambda: store.init([f"{name} b"], 3), "a list of keys needs a list of values, not a int"),
        (lambda: store.push_pull([name], 3), "a list of keys needs a list of values, not a int"),
        (lambda: store.push_pull([name], [], [np.zeros((2, 3), np.float32)]), "1 keys and 0 values"),
        (lambda: store.push_pull_async([name], [np.zeros((2, 3), np.float32)], []), "1 keys and 0 values"),
        (lambda: store.set_updater(3), "an updater is chosen by its name, not by 3"),
        (lambda: store.set_updater("sgd", lr=object()), "lr = <object .* cannot be sent to the servers"),
        (lambda: store.set_updater("updates:nothing"), "do not know 'updates:nothing'"),
        (lambda: store.set_updater("sgd", lr="much"), "lr"),
    ):
        with pytest.raises(StoreError, match=message):
            mistake()
    assert store.push(name, np.ones((2, 3), np.float32)) == 1, "none of it did any harm"
    with cordee.KVStore(servers.address) as other:
        other.close()
        with pytest.raises(StoreError, match="the store is closed"):
            other.pull(name)


def test_those_without_the_key_stay_outside(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))
    with pytest.raises(StoreError, match=r"no key for the store at tcp://.*: there is no file"):
        cordee.KVStore(servers.address, failure_timeout="0.5s")
    monkeypatch.setenv("CORDEE_STORE_KEY", "cordee-store:" + "A" * 43 + "=")
    with pytest.raises(cordee.CordeeError, match=r"cannot join the store: .*another server key"):
        cordee.KVStore(servers.address, failure_timeout="1s")
    monkeypatch.delenv("CORDEE_STORE_KEY")
    with pytest.raises(StoreError, match="which store"):
        cordee.KVStore()
    monkeypatch.setenv("DMLC_ROLE", "worker")
    with pytest.raises(cordee.CordeeError, match="DMLC_NUM_WORKER=''"):
        cordee.KVStore()


WORKER = """
import sys
import numpy as np
import cordee

store = cordee.KVStore(failure_timeout="60s")
store.init("w", np.full(400_000, store.rank, np.float32))
store.barrier()
for _ in range(5):
    store.push("w", np.ones(400_000, np.float32))
store.barrier()
value, version = store.pull("w")
assert value.tolist() == [10.0] * 400_000 and version == 10, (value, version)
print("worker", store.rank, "of", store.num_workers, *sys.argv[1:])
"""


def test_the_roles_of_ps_lite(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        **os.environ,
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "CORDEE_CACHE": str(tmp_path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**variables, "DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("worker", "server", "scheduler", "server", "worker")
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 5, outputs
    assert sorted(output for output, _ in outputs if output) == ["worker 0 of 2\n", "worker 1 of 2\n"]
    assert "the scheduler listens at" in outputs[2][1] and str(tmp_path) in outputs[2][1]
    assert not list(tmp_path.glob("*.key")), "the key is gone with the store"


def test_the_commands(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    key = tmp_path / "k.key"
    server = subprocess.Popen(
        [*COMMAND, "server", "--workers", "2", "--servers", "2", "--key-file", str(key)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    lines = [server.stdout.readline() for _ in range(5)]
    address = lines[0].split()[6]
    assert lines[0].startswith("server 0 of 2 listens at tcp://127.0.0.1:") and str(key) in lines[1], lines
    assert key.stat().st_mode & 0o777 == 0o600
    assert lines[4] == "waiting for 1 of 2 servers and 2 of 2 workers\n", lines
    others = [
        [*COMMAND, "server", "--join", address, "--key-file", str(key)],
        [*COMMAND, "worker", "--servers", address, "--key-file", str(key), str(script), "--flag"],
        [*COMMAND, "worker", "--servers", address, "--key-file", str(key), str(script), "--flag"],
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in others]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
        server.wait(20)
    finally:
        for process in (server, *started):
            process.kill()
    assert server.wait() == 0 and [process.returncode for process in started] == [0, 0, 0]
    assert "everybody is there" in server.stdout.read()
    server.stdout.close()
    assert sorted(outputs[1:]) == ["worker 0 of 2 --flag\n", "worker 1 of 2 --flag\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["server", "--workers", "1", "--require-all", "--failure-timeout", "1s"],
            "1 of 1 worker did not come within 1 s",
        ),
        (["server", "--require-all"], "--require-all needs --workers or --servers"),
        (["server", "--join", "nowhere"], "--join nowhere: give the address"),
        (["server", "--listen", "tcp://203.0.113.9:1"], "cannot listen at tcp://203.0.113.9:1"),
        (["server", "--updaters", "no_such"], "--updaters no_such: importing it raised ModuleNotFoundError"),
        (["worker", "nothing.py"], "no script 'nothing.py'"),
        (["worker", __file__], "which store?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_commands_say_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "CORDEE_CACHE": str(tmp_path)}
    result = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert result.returncode in (1, 2) and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr


def test_keys_may_have_updaters_of_their_own(store: cordee.KVStore, name: str) -> None:
    weights, counter = f"{name} weights", f"{name} counter"
    store.init([weights, counter], [np.zeros(4, np.float32), np.zeros(2, np.int64)])
    with pytest.raises(StoreError, match=r"needs floating-point values, .* is int64: give it one of its own first"):
        store.set_updater("adam", keys=[weights, counter])
    store.set_updater("sgd", keys=weights, lr=0.5)
    store.set_updater("assign", keys=[counter])
    for _ in range(2):
        assert store.push_pull(counter, np.array([3, 4])).value.tolist() == [3, 4]
        store.push(weights, np.ones(4, np.float32))
    assert store.pull(weights).value.tolist() == [-1.0] * 4
    store.set_updater("add")  # of the others
    assert store.push_pull(counter, np.array([5, 6])).value.tolist() == [5, 6]


def test_a_list_with_one_bad_value_initialises_nothing(store: cordee.KVStore, name: str) -> None:
    for keys, values in (([name, f"{name} b"], [1.0, "x"]), ([name, name], [1.0, 2.0]), ([name], [1.0, 2.0])):
        with pytest.raises(StoreError):
            store.init(keys, values)
        with pytest.raises(StoreError, match="has not been initialised"):
            store.pull(name)


def test_limits_that_cannot_be(store: cordee.KVStore, name: str) -> None:
    store.init(name, np.zeros((3, 2), np.float32))
    with pytest.raises(StoreError, match="timeout_s = -1 must be at least 0"):
        store.pull(name, timeout_s=-1)
    with pytest.raises(StoreError, match="timeout_s = nan"):
        store.barrier(float("nan"))
    with pytest.raises(StoreError, match="has no row 9223372036854775813"):
        store.pull_rows(name, np.array([2**63 + 5], np.uint64))
    with pytest.raises(StoreError, match="has been initialised before"):
        store.init(name, np.zeros(5))


def test_an_updater_may_take_longer_than_the_failure_timeout() -> None:
    with cordee.KVStore.local(2, updaters=["updates"], failure_timeout="2s") as store:
        store.init("w", np.zeros(1_000_000, np.float32))  # on both servers
        store.set_updater("updates:take_time", seconds=4.0)
        assert store.push_pull("w", np.ones(1_000_000, np.float32)).value.sum() == 1_000_000
        store.barrier(timeout_s=20)


def test_what_is_read_while_another_pushes_is_whole(servers: LocalServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_STORE_KEY", servers.key.to_text())
    count, block = 1 << 20, (1 << 20) // 4  # on each of the two servers in two pieces
    is_over = threading.Event()
    with cordee.KVStore(servers.address) as writer, cordee.KVStore(servers.address) as reader:
        writer.init("torn", np.zeros(count, np.float32))
        writer.set_updater("assign", keys="torn")

        def write() -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                writer.push("torn", np.full(count, number, np.float32))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            reader.pull("torn", min_version=1)
            seen = [reader.pull("torn").value.reshape(-1, block) for _ in range(200)]
        finally:
            is_over.set()
            thread.join()
    assert len({float(value[0, 0]) for value in seen}) > 1, "nothing was pushed meanwhile"
    assert all((value == value[:, :1]).all() for value in seen)
