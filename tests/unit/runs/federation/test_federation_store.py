"""The file of a federation: tickets are good for one client, results count once, nobody else can read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cordee.core.errors import JobError, RunDirectoryError
from cordee.runs.federation.store import FederationStore, ResultRecord, RoundRecord


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FederationStore]:
    store = FederationStore(tmp_path / "federation.sqlite", create=True)
    yield store
    store.close()


def test_only_the_owner_can_read_it(store: FederationStore, tmp_path: Path) -> None:
    store.set_fact("a", "b")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path  # noqa: PTH116


def test_a_ticket_is_not_kept_and_pins_the_first_key(store: FederationStore) -> None:
    ticket = store.invite("alice")
    assert ticket not in repr(store.clients())
    assert store.enrol("alice", ticket, "key-1") == ""
    assert store.enrol("alice", ticket, "key-1") == ""  # the answer was lost: the same client asks again
    assert "used by another client" in store.enrol("alice", ticket, "key-2")
    assert store.clients()[0].key == "key-1"


@pytest.mark.parametrize("name, ticket", [("alice", "guess"), ("bob", "guess"), ("alice", "")])
def test_another_ticket_is_refused(store: FederationStore, name: str, ticket: str) -> None:
    store.invite("alice")
    assert "not one of this federation" in store.enrol(name, ticket, "key")


def test_a_revoked_client_stays_revoked(store: FederationStore) -> None:
    ticket = store.invite("alice")
    store.revoke("alice")
    assert "revoked" in store.enrol("alice", ticket, "key")
    with pytest.raises(JobError, match="stays revoked"):
        store.invite("alice")
    with pytest.raises(JobError, match="there are: alice"):
        store.revoke("bob")


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, "é"])
def test_names_that_are_none(store: FederationStore, name: str) -> None:
    with pytest.raises(JobError, match="1 to 64 letters"):
        store.invite(name)


def test_another_process_is_noticed(store: FederationStore, tmp_path: Path) -> None:
    before = store.version()
    assert store.version() == before
    other = FederationStore(tmp_path / "federation.sqlite")
    other.invite("alice")
    other.close()
    assert store.version() != before
    assert [client.name for client in store.clients()] == ["alice"]


def test_results_count_once_and_belong_to_their_attempt(store: FederationStore) -> None:
    record = RoundRecord(round=4, attempt=7, asked=("a", "b"), started=1.0)
    store.write_round(record)
    store.add_results(4, 7, [ResultRecord("a", "train", b"1", b"x")])
    store.add_results(4, 7, [ResultRecord("a", "train", b"2", b"y"), ResultRecord("b", "train", b"3", b"z")])
    assert [(r.client, r.header) for r in store.results(4, 7)] == [("a", b"1"), ("b", b"3")]
    assert store.round() == record
    store.write_round(RoundRecord(round=4, attempt=8, asked=("a",), started=2.0))
    assert list(store.results(4, 7)) == []
    store.end_round()
    assert store.round() is None


def test_a_folder_without_a_federation(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no federation"):
        FederationStore(tmp_path / "federation.sqlite")
