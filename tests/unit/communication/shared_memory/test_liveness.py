from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from segment_members import make_segment
from torch.distributed import HashStore

from cordee.communication.shared_memory.backend import MemberRecord, exchange_records, form_host_team, group_by_host
from cordee.communication.shared_memory.liveness import (
    FAILED,
    LEFT,
    Heartbeat,
    Identity,
    PeerWatch,
    Silence,
    abandon_groups,
    counter,
    read_stat,
)
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.segment import CULPRIT, LIFE, STATE, Address, attach_segment, create_segment
from cordee.communication.this_host import own_host_id
from cordee.core.errors import CommunicationError


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_silence_grows_only_without_any_sign_of_life() -> None:
    silence = Silence()
    assert silence.observe(1, 10, 0.1) == 0
    assert silence.observe(1, 10, 0.3) == pytest.approx(0.3)
    assert silence.observe(1, 11, 0.3) == 0  # it computes
    assert silence.observe(2, 11, 0.3) == 0  # its counter moves
    assert silence.observe(2, 11, 0.4) == pytest.approx(0.4)


def test_time_in_which_we_did_not_run_is_not_held_against_peers() -> None:
    silence = Silence()
    silence.observe(1, 1, 0)
    assert silence.observe(1, 1, 3600) <= 0.5


def test_a_dead_and_a_stopped_process_are_noticed() -> None:
    segment, layout = make_segment(2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identities = [Identity.own(0), Identity(1, child.pid, read_stat(child.pid).started)]
        words = segment.words()
        watch = PeerWatch(words, layout, 0, identities, failure_timeout_s=0.2)
        peer = layout.member_word(1)
        assert watch.find_failure([peer]) is None
        os.kill(child.pid, signal.SIGSTOP)
        started = time.monotonic()
        while (failure := watch.find_failure([peer])) is None and time.monotonic() - started < 10:
            time.sleep(0.02)
        assert failure is not None
        assert failure.rank == 1
        assert f"rank 1 (process {child.pid}) is frozen: no sign of life for 0." in failure.message
        child.kill()
        child.wait()
        failure = watch.find_failure([peer])
        assert failure is not None
        assert failure.message == f"rank 1 (process {child.pid}) died while rank 0 waited for it"
        assert watch.find_failure([]) is None  # nobody waits for it
        assert isinstance(watch.blame(failure), CommunicationError)
        assert words[layout.member_word(0) + CULPRIT] == 2
        watch.close()
        assert words[layout.member_word(0) + STATE] == FAILED
    finally:
        child.kill()
        child.wait()


def test_who_was_blamed_by_another_is_blamed_again() -> None:
    segment, layout = make_segment(3)
    words = segment.words()
    watch = PeerWatch(words, layout, 0, [Identity.own(rank) for rank in range(3)], failure_timeout_s=5)
    words[layout.member_word(1) + CULPRIT] = 2 + 1
    words[layout.member_word(1) + STATE] = FAILED
    failure = watch.find_failure([layout.member_word(1)])
    assert failure is not None
    assert failure.rank == 2
    assert "rank 2 died, froze or failed: rank 1" in failure.message
    watch.close()
    assert words[layout.member_word(0) + STATE] == LEFT


def test_who_is_told_that_the_group_is_over_does_not_wait_for_those_who_live() -> None:
    segment, layout = make_segment(2)
    watch = PeerWatch(segment.words(), layout, 0, [Identity.own(rank) for rank in range(2)], failure_timeout_s=5)
    assert watch.find_failure([layout.member_word(1)]) is None
    abandon_groups("worker 1 could not form the group")
    failure = watch.find_failure([layout.member_word(1)])
    assert failure is not None and failure.message == "worker 1 could not form the group"
    watch.close()
    later = PeerWatch(segment.words(), layout, 0, [Identity.own(rank) for rank in range(2)], failure_timeout_s=5)
    assert later.find_failure([layout.member_word(1)]) is None
    later.close()


def test_the_heartbeat_moves_counters_and_ends_with_the_last_one() -> None:
    segment, _ = make_segment(1)
    words = segment.words()
    heart = Heartbeat()
    key = heart.add(counter(words, LIFE), 0.01)
    started = time.monotonic()
    while words[LIFE] < 3 and time.monotonic() - started < 10:
        time.sleep(0.01)
    assert words[LIFE] >= 3
    heart.remove(key)
    assert heart._thread is None or not heart._thread.is_alive()


def test_no_memory_says_how_much_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = count_open_files()
    with pytest.raises(CommunicationError) as caught:
        create_segment(8 << 20, "a group of 4 workers on this host")
    message = str(caught.value)
    assert "a group of 4 workers on this host needs 8.0 MiB (No space left on device)" in message
    assert "BackendSettings(shared_memory=False)" in message
    assert count_open_files() == before


def test_a_segment_has_no_name_and_ends_with_its_users() -> None:
    segment, fd = create_segment(1 << 16, "a test")
    address = Address.decode(Address(os.getpid(), fd, 1 << 16).encode())
    other = attach_segment(address)
    os.close(fd)
    segment.words()[3] = 42
    assert other.words()[3] == 42
    with pytest.raises(CommunicationError, match="cannot open the shared memory of process"):
        attach_segment(address)


def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_by_host(["a", "b", "a", "c", "b"]) == [[0, 2], [1, 4], [3]]
    settings = BackendSettings()
    assert own_host_id(settings, 0) == own_host_id(settings, 1)
    assert own_host_id(BackendSettings(host_id="left"), 0) == "left"
    alone = BackendSettings(shared_memory=False)
    assert own_host_id(alone, 0) != own_host_id(alone, 1)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.warns(RuntimeWarning, match="gloo is used instead"):
        assert own_host_id(settings, 0).endswith("/alone/0")
    record = MemberRecord("host", Identity.own(3), None, 2)
    assert exchange_records(HashStore(), 0, 1, record) == [record]


def test_memory_that_no_worker_of_this_user_made_is_refused(tmp_path: Path) -> None:
    """What an address in the store points to may be anything that this process could open."""
    with (tmp_path / "precious").open("w+b") as file:
        file.truncate(1 << 16)
        with pytest.raises(CommunicationError, match="somebody else writes to the store"):
            attach_segment(Address(os.getpid(), file.fileno(), 1 << 16))
    other = os.memfd_create("other")
    os.ftruncate(other, 1 << 16)
    with pytest.raises(CommunicationError, match="somebody else writes to the store"):
        attach_segment(Address(os.getpid(), other, 1 << 16))
    os.close(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root opens what belongs to others")
def test_memory_of_another_user_is_refused() -> None:
    _, fd = create_segment(1 << 16, "a test")
    os.fchown(fd, 12345, 12345)
    with pytest.raises(CommunicationError, match="somebody else writes to the store"):
        attach_segment(Address(os.getpid(), fd, 1 << 16))
    os.close(fd)


def test_a_segment_of_other_members_is_refused() -> None:
    """An address in the store that was changed to that of another group of the same user."""
    settings = BackendSettings(slot_bytes=4096)
    records = [MemberRecord("here", Identity.own(rank), 4096, 1) for rank in range(2)]
    store, other = HashStore(), HashStore()
    owner = threading.Thread(target=lambda: form_host_team(other, 0, [0, 1], records, settings).close())
    owner.start()
    store.set("segment/0", other.get("segment/0"))
    store.set("attached/0", "yes")
    strangers = [MemberRecord("here", Identity.own(rank + 5), 4096, 1) for rank in range(2)]
    with pytest.raises(CommunicationError, match="is that of other workers"):
        form_host_team(store, 1, [0, 1], strangers, settings)
    other.set("attached/1", "yes")
    owner.join()
