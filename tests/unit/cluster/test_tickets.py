"""Tickets: what is wrong with one is said in a line, before anything else happens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cordee.cluster.control import CONTROL_FILE, Control, reach, read_control, request_join, write_control
from cordee.communication.keys import make_keys
from cordee.communication.this_host import find_listening, own_address
from cordee.core.errors import CommunicationError, CordeeError, JobError, RunDirectoryError


@pytest.fixture
def control() -> Control:
    _, (keys,) = make_keys()
    return Control.of("tcp://127.0.0.1:9", "run", keys.to_text())


def ticket(folder: Path, control: Control) -> Path:
    write_control(folder, control)
    return folder / CONTROL_FILE


def test_a_ticket_says_what_the_run_wrote(tmp_path: Path, control: Control) -> None:
    path = ticket(tmp_path, control)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_control(path) == control and not control.is_remote
    assert reach(control, path) == "tcp://127.0.0.1:9"


def test_what_is_no_ticket_is_refused(tmp_path: Path, control: Control) -> None:
    path = ticket(tmp_path, control)
    path.chmod(0o644)
    with pytest.raises(JobError, match=r"can be read by others, who could join the run: chmod 600"):
        read_control(path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RunDirectoryError, match=r"control.json is no ticket, or a damaged one"):
        read_control(path)
    with pytest.raises(RunDirectoryError, match=r"there is no run directory and no ticket '.*/nowhere'"):
        read_control(tmp_path / "nowhere")
    path.unlink()
    (tmp_path / "job.toml").touch()
    with pytest.raises(RunDirectoryError, match=r"nobody listens in the run .*: it has ended, or"):
        read_control(tmp_path)


def test_a_run_of_another_version_is_refused(tmp_path: Path, control: Control) -> None:
    path = ticket(tmp_path, msgspec.structs.replace(control, version="0.0.9"))
    with pytest.raises(JobError, match=r"is one of cordee 0.0.9, this is cordee .*: install the same version"):
        read_control(path)


def test_a_run_that_listens_on_its_own_host_alone_is_refused(tmp_path: Path, control: Control) -> None:
    elsewhere = msgspec.structs.replace(control, host="big", host_id="another")
    with pytest.raises(JobError, match=r"is on another host \(big\) and listens there alone: .* cluster.address"):
        reach(elsewhere, tmp_path)


def test_a_run_that_has_ended_does_not_answer(
    tmp_path: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordee.cluster.control.REPLY_TIMEOUT_S", 0.2)
    elsewhere = msgspec.structs.replace(control, host="big", host_id="another", public="tcp://127.0.0.1:9")
    with pytest.raises(RunDirectoryError, match=r"it has ended, or its host \(big\) cannot be reached from here"):
        request_join(elsewhere, tmp_path / "ticket", "2.13.0")
    damaged = msgspec.structs.replace(elsewhere, keys="cordee-client:abc")
    with pytest.raises(CordeeError, match=r"the text of the client keys is damaged"):
        request_join(damaged, tmp_path / "ticket", "2.13.0")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("0.0.0.0", "is every address of this host: name the one that other hosts can reach"),
        ("[::]:7000", "is every address of this host"),
        ("192.0.2.77", "cannot listen at 192.0.2.77: Cannot assign requested address"),
        ("localhost:", "has no port from 1 to 65535: write HOST or HOST:PORT"),
        ("localhost:70000", "has no port from 1 to 65535"),
        ("no such host", "cannot be looked up"),
    ],
)
def test_addresses_that_nobody_can_reach_are_refused(setting: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        find_listening(setting)


def test_addresses_of_this_host() -> None:
    listening = find_listening("127.0.0.1")
    assert (listening.ip, listening.port, listening.address) == ("127.0.0.1", 0, "tcp://127.0.0.1:*")
    assert find_listening("127.0.0.1:47113").address == "tcp://127.0.0.1:47113"
    assert own_address("tcp://127.0.0.1:9") == "127.0.0.1"
    with pytest.raises(CommunicationError, match=r"this host has no way to"):
        own_address("tcp://255.255.255.255:9")
