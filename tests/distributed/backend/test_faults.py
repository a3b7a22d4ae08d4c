"""A peer that dies, freezes, raises or leaves: the others say who it was, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_pool import ProcessPool

from cordee.communication.shared_memory import BackendSettings
from cordee.core.errors import CommunicationError

QUICK = BackendSettings(failure_timeout_s=1.0)


def communicate_until_it_fails(rank: int, operation: str) -> tuple[str, str, float]:
    data = torch.ones(300_000)
    try:
        while True:
            if operation == "all_reduce":
                dist.all_reduce(data)
            elif operation == "asynchronous":
                dist.all_reduce(data, async_op=True).wait()
            elif operation == "broadcast":
                dist.broadcast(data, 0)
            elif rank == 0:
                dist.send(data, 1)
            elif rank == 1:
                dist.recv(data, 0)
            else:
                return "idle", "", 0.0
    except Exception as error:  # noqa: BLE001 - the error is what the test asks for
        return type(error).__name__, str(error), time.monotonic()


def do_nothing(rank: int) -> None:
    """The first function of this file takes the ranks a second to import."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operation", ["all_reduce", "asynchronous", "broadcast", "send"])
def test_a_killed_peer_is_named_at_once(size: int, operation: str) -> None:
    with ProcessPool(size, QUICK) as pool:
        pool.run(do_nothing)
        pool.post(communicate_until_it_fails, operation)
        time.sleep(0.1)
        killed_at = time.monotonic()
        os.kill(pool.pids[1], signal.SIGKILL)
        for rank in (rank for rank in range(size) if rank != 1):
            kind, message, failed_at = pool.answer(rank)[1]
            if kind == "idle":
                continue
            assert kind == "CommunicationError"
            assert f"rank 1 (process {pool.pids[1]}) died" in message or "rank 1 died" in message
            assert failed_at - killed_at < 1.0, message  # 0.01–0.03 s on an idle machine


@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_a_frozen_peer_is_named_after_the_failure_timeout(operation: str) -> None:
    with ProcessPool(2, QUICK) as pool:
        pool.run(do_nothing)
        pool.post(communicate_until_it_fails, operation)
        time.sleep(0.1)
        stopped_at = time.monotonic()
        os.kill(pool.pids[1], signal.SIGSTOP)
        kind, message, failed_at = pool.answer(0)[1]
        assert kind == "CommunicationError"
        assert f"rank 1 (process {pool.pids[1]}) is frozen" in message
        assert 0.9 < failed_at - stopped_at < 5


def be_late(rank: int, seconds: float, how: str) -> None:
    if rank == 1 and how == "sleeping":
        time.sleep(seconds)
    elif rank == 1:
        # One call that keeps the interpreter lock: the heartbeat thread can not run either.
        stop = time.monotonic() + seconds
        numbers = list(range(3_000_000))
        while time.monotonic() < stop:
            numbers.sort(key=float)
            numbers.reverse()
    dist.barrier()


@pytest.mark.parametrize("how", ["sleeping", "computing"])
def test_a_peer_that_is_merely_late_is_waited_for(how: str) -> None:
    with ProcessPool(2, BackendSettings(failure_timeout_s=0.4)) as pool:
        pool.run(be_late, 1.5, how)
        pool.leave()


def wait_and_report_cpu(rank: int) -> float:
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()
    before = time.process_time()
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()
    return time.process_time() - before


def test_waiting_does_not_keep_the_machine_busy() -> None:
    with ProcessPool(2) as pool:
        waiting_cpu_s = pool.run(wait_and_report_cpu)[0]
        assert waiting_cpu_s < 0.3


def raise_on_rank_one(rank: int) -> str:
    if rank == 1:
        raise ValueError("a bug in the training script")
    dist.barrier()
    return ""


def leave(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
    else:
        dist.all_reduce(torch.ones(3))


def test_a_peer_that_left_is_named() -> None:
    with ProcessPool(2, QUICK) as pool:
        pool.post(leave)
        answer = pool.answer(0)
        assert answer[0] == "error"
        assert "CommunicationError: rank 1" in answer[1]
        assert "has left this process group" in answer[1]


def disagree(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


def test_ranks_that_disagree_are_told_so() -> None:
    with ProcessPool(2, QUICK) as pool:
        pool.post(disagree)
        errors = [pool.answer(rank)[1] for rank in (0, 1)]
        assert any("rank 1 is in all_reduce(4 × float32, sum) while this rank is in" in error for error in errors)


def open_segments() -> list[str]:
    """The memfd segments that any process of this machine still holds open or mapped."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found += [f"{maps.parent.name} {line}" for line in maps.read_text().splitlines() if "memfd:cordee" in line]
    return found


def own_segments(pids: list[int]) -> list[str]:
    return [entry for entry in open_segments() if int(entry.split()[0]) in pids]


@pytest.mark.parametrize("how", ["exit", "kill one", "kill all", "exception"])
def test_nothing_is_left_behind(how: str) -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    with ProcessPool(3, QUICK) as pool:
        pool.run(communicate_a_little)
        assert own_segments(pool.pids)
        if how == "exit":
            pool.leave()
        elif how == "exception":
            pool.post(raise_on_rank_one)
        else:
            for pid in pool.pids[: 1 if how == "kill one" else None]:
                os.kill(pid, signal.SIGKILL)
    assert own_segments(pool.pids) == []
    assert set(os.listdir("/dev/shm")) - before == set()  # noqa: PTH208


def communicate_a_little(rank: int) -> None:
    dist.all_reduce(torch.ones(10))
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(10), group=group)


def form_and_destroy_groups(rank: int, count: int) -> tuple[int, int]:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def cycle() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(10), group=group)
        dist.destroy_process_group(group)

    cycle()
    before = open_files()
    for _ in range(count):
        cycle()
    return before, open_files()


def test_destroyed_groups_give_their_files_back() -> None:
    with ProcessPool(2) as pool:
        for before, after in pool.run(form_and_destroy_groups, 5):
            assert after <= before + 2
        pool.leave()


def limit_file_size(rank: int) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        dist.new_group([0, 1])
    except Exception as error:  # noqa: BLE001 - the error is what the test asks for
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_too_little_memory_is_a_clear_error_on_every_rank() -> None:
    with ProcessPool(2) as pool:
        answers: list[Any] = pool.run(limit_file_size)
        for answer in answers:
            assert answer.startswith("CommunicationError:")
            assert "no room for shared memory: a group of 2 workers on this host needs" in answer
            assert "shared_memory=False" in answer


def count_segments_of_ended_groups(rank: int) -> tuple[int, int]:
    """Return how much shared memory this process has before a group was made, and after a member of it died."""
    before = count_segments()
    gc.disable()  # what is left to the collector stays mapped for many generations
    group = dist.new_group()
    dist.all_reduce(torch.ones(300_000), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(CommunicationError):
        while True:
            dist.all_reduce(torch.ones(300_000), group=group)
    dist.destroy_process_group(group)
    del group
    deadline = time.monotonic() + 10  # a thread that is ending may still have it
    while (after := count_segments()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.enable()
    return before, after


def count_segments() -> int:
    return sum(line.endswith("/memfd:cordee (deleted)") for line in Path("/proc/self/maps").read_text().splitlines())


def test_shared_memory_of_a_group_ends_with_the_group() -> None:
    with ProcessPool(2, QUICK) as pool:
        pool.run(do_nothing)
        pool.post(count_segments_of_ended_groups)
        before, after = pool.answer(0)[1]
        assert before >= 1 and after == before
