"""Two hundred teams in one process, one after the other: nothing is left behind by any of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from test_team_faults import Launched, launch

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

WARM_UP, GENERATIONS = 20, 200


class Held(NamedTuple):
    """What a process has."""

    descriptors: int
    threads: int
    memory_bytes: int

    @classmethod
    def of(cls, pid: int) -> Held:
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)


def generation_of(run: Launched) -> int:
    return int(run.of("generation")[-1]["generation"])


def lose_and_replace(run: Launched) -> None:
    """Kill worker 1 and wait until its replacement is a member: two generations."""
    before, pid = generation_of(run), run.pids()[1]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while generation_of(run) < before + 2 or run.of("generation")[-1]["members"] != [0, 1]:
        assert run.process.poll() is None and time.monotonic() < deadline, run.of("generation")[-1]
        time.sleep(0.05)
    run.wait_for_step(run.of("generation")[-1]["step"] + 2)


def test_two_hundred_generations_leave_nothing_behind(tmp_path: Path) -> None:
    options = ("--set", "cluster.max_restarts=1000", "--set", "monitoring.every_steps=1")
    with launch(tmp_path, *options, steps=10_000_000) as run:
        run.wait_for_step(5)
        held: dict[str, Held] = {}
        while generation_of(run) < GENERATIONS:
            lose_and_replace(run)
            if not held and generation_of(run) >= WARM_UP:
                held, segments = look(run), shared_memory()
        after = look(run)
        assert shared_memory() <= segments
        for name, before in held.items():
            print(f"{name}: {before} -> {after[name]}")
            assert after[name].descriptors <= before.descriptors + 2, name
            assert after[name].threads <= before.threads, name
            assert after[name].memory_bytes <= before.memory_bytes + 30e6, name
        run.process.send_signal(signal.SIGINT)
        assert run.finish(timeout_s=60)[0] == 130
        assert not run.survivors()


def look(run: Launched) -> dict[str, Held]:
    survivor, coordinator = run.pids()[0], run.of("coordinator_started")[-1]["pid"]
    fork_server = run.fork_server()
    pids = {"launcher": run.process.pid, "fork server": fork_server, "coordinator": coordinator, "worker 0": survivor}
    return {name: Held.of(pid) for name, pid in pids.items()}


def shared_memory() -> int:
    return len(list(Path("/dev/shm").glob("*cordee*")))
