"""Connections between hosts: who is let in, what is encrypted, and what is noticed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from cordee.communication.shared_memory.connections import RECORD_BYTES, Connection, Pump, drive
from cordee.communication.shared_memory.handshake import LinkSettings, _own_addresses
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.liveness import HEARTBEAT, abandon_groups
from cordee.core.errors import CommunicationError

NAMES = ["rank 0 on a", "rank 1 on b", "rank 2 on c"]


class DictStore:
    """A store inside one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10), key
            return self._values[key].encode()


def settings(*, encrypt: bool = True, connecting_s: float = 10.0) -> LinkSettings:
    return LinkSettings(encrypt, 1.0, connecting_s, "127.0.0.1")


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own; return what they return or raise."""
    found: list[Any] = [None] * len(functions)

    def run(place: int) -> None:
        try:
            found[place] = functions[place]()
        except Exception as error:  # noqa: BLE001 - handed to the test
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def connected(store: Any, rank: int, size: int, how: LinkSettings) -> Links:
    links = Links(rank, NAMES, how)
    others = [other for other in range(size) if other != rank]
    links.connect(store, others, others)
    return links


@contextlib.contextmanager
def linked(size: int, *, encrypt: bool) -> Iterator[list[Links]]:
    store = DictStore()
    how = settings(encrypt=encrypt)
    made = in_threads(*(partial(connected, store, rank, size, how) for rank in range(size)))
    try:
        assert all(isinstance(links, Links) for links in made), made
        yield made
    finally:
        for links in made:
            if isinstance(links, Links):
                links.close()


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("length", [0, 1, 1000, RECORD_BYTES, 3 * RECORD_BYTES + 5])
def test_all_send_to_all_at_once(length: int, encrypt: bool) -> None:
    with linked(3, encrypt=encrypt) as members:

        def swap(rank: int) -> dict[int, bytearray]:
            others = [other for other in range(3) if other != rank]
            received = {other: bytearray(length) for other in others}
            parts = {other: [bytes([rank]) * length] for other in others}
            members[rank].exchange(parts, {other: [data] for other, data in received.items()}, 7, 10.0)
            return received

        for found in in_threads(*(partial(swap, rank) for rank in range(3))):
            assert found == {other: bytes([other]) * length for other in found}


@contextlib.contextmanager
def encrypted_pair() -> Iterator[tuple[Connection, Connection]]:
    keys = bytes(range(32)), bytes(range(32, 64))
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as near:
        far, _ = door.accept()
        with far:
            yield Connection(near, 1, keys), Connection(far, 0, keys[::-1])


def run(pump: Pump) -> None:
    drive([pump], lambda _: None)


def test_nothing_can_be_read_or_changed_on_the_way() -> None:
    with encrypted_pair() as (sender, receiver):
        text = b"the weights of a model" * 10
        run(sender.send(text))
        assert text[:10] not in receiver.sock.recv(4096, socket.MSG_PEEK)
        got = bytearray(len(text))
        run(receiver.receive(got))
        assert got == text
        run(sender.send(text))
        time.sleep(0.05)
        changed = bytearray(receiver.sock.recv(4096))
        changed[3] ^= 1
        sender.sock.send(changed)
        with pytest.raises(CommunicationError, match="somebody changes it on its way"):
            run(receiver.receive(got))


def test_what_was_sent_before_cannot_be_sent_again() -> None:
    with encrypted_pair() as (sender, receiver):
        run(sender.send(b"take a step"))
        time.sleep(0.05)
        recorded = receiver.sock.recv(4096, socket.MSG_PEEK)
        got = bytearray(11)
        run(receiver.receive(got))
        sender.sock.send(recorded)
        with pytest.raises(CommunicationError, match="somebody changes it"):
            run(receiver.receive(got))


def test_strangers_are_dropped_and_hold_nobody_up() -> None:
    store = DictStore()
    waiting = threading.Thread(target=lambda: made.append(connected(store, 1, 2, settings())), daemon=True)
    made: list[Links] = []
    waiting.start()
    (host, port), *_ = msgspec.json.decode(store.get("door/1"), type=list[tuple[str, int]])
    strangers = [socket.create_connection((host, port)) for _ in range(10)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    strangers[1].sendall(b"cordee 1" + bytes(200))
    try:
        began_s = time.monotonic()
        first = connected(store, 0, 2, settings())
        waiting.join(10)
        assert time.monotonic() - began_s < 2
        first.close()
        made[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port)).close()
    finally:
        for stranger in strangers:
            stranger.close()


class OtherSecret(DictStore):
    """The store of somebody who knows where members listen, but not the secret of their group."""

    def __init__(self, real: DictStore) -> None:
        super().__init__()
        self._real = real

    def get(self, key: str) -> bytes:
        return b"00" * 32 if key == "secret" else self._real.get(key)

    def set(self, key: str, value: str) -> None:
        if key != "secret":
            self._real.set(key, value)


@pytest.mark.parametrize("intruder", [0, 1])
def test_who_does_not_know_the_secret_is_not_let_in(intruder: int) -> None:
    store = DictStore()
    store.set("secret", "11" * 32)
    how = settings(connecting_s=1.0)
    stores: list[DictStore] = [store, store]
    stores[intruder] = OtherSecret(store)
    found = in_threads(*(partial(connected, stores[rank], rank, 2, how) for rank in range(2)))
    assert all(isinstance(one, CommunicationError) for one in found), found
    assert "is not connected with rank 1 on b" in str(found[0])


def test_a_member_that_is_not_reached_is_named_with_its_address() -> None:
    store = DictStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("door/1", f'[["127.0.0.1", {port}]]')
    with pytest.raises(CommunicationError, match=rf"rank 1 on b \(127.0.0.1 port {port}: Connection refused\) after"):
        connected(store, 0, 2, settings(connecting_s=0.5))


def test_a_silent_member_is_frozen_after_a_while_and_one_that_gives_up_says_why() -> None:
    with linked(2, encrypt=True) as (one, other):
        assert other._beat is not None
        HEARTBEAT.remove(other._beat)
        other._beat = None
        began_s = time.monotonic()
        with pytest.raises(CommunicationError, match=r"rank 1 on b is frozen or cut off: no sign of life for 1.0 s"):
            one.exchange({}, {1: [bytearray(1)]}, 1, 20.0)
        assert 0.5 < time.monotonic() - began_s < 5
    with linked(2, encrypt=True) as (one, other):
        other.fail("the disk of rank 1 is full")
        with pytest.raises(CommunicationError, match="the disk of rank 1 is full"):
            one.exchange({}, {1: [bytearray(1)]}, 1, 20.0)


def test_waiting_ends_when_the_group_is_abandoned() -> None:
    with linked(2, encrypt=False) as (one, _):
        timer = threading.Timer(0.2, abandon_groups, ["worker 7 is gone"])
        timer.start()
        with pytest.raises(CommunicationError, match="worker 7 is gone"):
            one.exchange({}, {1: [bytearray(1)]}, 1, 20.0)
        timer.join()


def test_an_interface_that_was_just_switched_on_is_an_address_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says up to a second later that it is running: `isup` is false until then."""
    found = {"lo": "127.0.0.1", "new": "10.1.0.1", "off": "10.2.0.1", "gone": "10.3.0.1"}
    flags = {"lo": "up,loopback,running", "new": "up,broadcast", "off": "broadcast"}
    stats = {name: SimpleNamespace(isup=False, flags=said) for name, said in flags.items()}
    entries = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in found.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert _own_addresses() == ["10.1.0.1"]
