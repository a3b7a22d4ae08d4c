"""Keys: they come back from text and file, stay private, and never show."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.communication.keys import ClientKeys, ServerKeys, make_keys
from cordee.core.errors import CommunicationError


def test_keys_come_back_from_text_and_file(tmp_path: Path) -> None:
    server, clients = make_keys(num_clients=2)
    assert server.admitted == tuple(client.public for client in clients)
    assert len({server.secret, *(client.secret for client in clients)}) == 3
    assert ServerKeys.from_text(server.to_text()) == server
    assert ClientKeys.from_text(clients[0].to_text() + "\n") == clients[0]
    path = tmp_path / "keys"
    old_mask = os.umask(0)
    try:
        server.save(path)
        server.save(path)  # replaces
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert ServerKeys.load(path) == server


def test_text_fits_an_environment_variable() -> None:
    server, (client,) = make_keys()
    for text in (server.to_text(), client.to_text()):
        assert text.isascii()
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=:")


def test_secrets_do_not_show() -> None:
    server, (client,) = make_keys()
    assert repr(server) == "<ServerKeys>"
    assert f"{client}" == "<ClientKeys>"
    with pytest.raises(CommunicationError) as caught:
        ClientKeys.from_text(client.to_text()[:-3])
    assert client.to_text()[20:40] not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    _, (client,) = make_keys()
    path = tmp_path / "keys"
    client.save(path)
    path.chmod(mode)
    with pytest.raises(CommunicationError, match=rf"mode 0{mode:o}.*chmod 600"):
        ClientKeys.load(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CommunicationError, match="No such file"):
        ClientKeys.load(tmp_path / "missing")
    with pytest.raises(CommunicationError, match="not a file"):
        ClientKeys.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(CommunicationError, match="not a file"):  # and does not wait for a writer
        ClientKeys.load(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(CommunicationError, match="holds no keys"):
        ClientKeys.load(tmp_path / "binary")
    with pytest.raises(CommunicationError, match="could not be written"):
        make_keys()[0].save(tmp_path / "missing" / "keys")


@given(st.one_of(st.text(), st.text().map("cordee-client:".__add__), st.binary().map(lambda b: f"cordee-client:{b!r}")))
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(CommunicationError, match="client keys"):
        ClientKeys.from_text(text)


def test_server_keys_are_no_client_keys() -> None:
    with pytest.raises(CommunicationError, match="must begin with 'cordee-client:'"):
        ClientKeys.from_text(make_keys()[0].to_text())
