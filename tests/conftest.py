"""What holds for every test: nothing outlives it, and data that is not here is a reason to skip."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm_launch
from cordee.core.env import cache_folder
from cordee.monitoring import AnyEvent, JsonlSink
from cordee.monitoring.events import decode_event
from cordee.monitoring.files import to_json

SHARED_MEMORY = Path("/dev/shm")
# Set by libraries when they are first imported or used: scikit-learn, torch.export, pytest itself.
SET_BY_OTHERS = ("KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "PYTEST_")
# Files that take minutes, in `make test` or in `make test-long`.
LONGEST_FIRST = (
    "differences/test_settings.py",
    "faults/test_fault_walk.py",
    "faults/test_leaks.py",
    "faults/test_team_faults.py",
    "differences/test_own_loops.py",
    "differences/test_random_jobs.py",
    "distributed/backend/test_torch_collectives.py",
    "distributed/test_reproducible_matrix.py",
    "faults/test_parameter_server_faults.py",
    "faults/test_fault_walk_dispatched.py",
    "faults/test_fault_walk_script.py",
    "faults/test_split_faults.py",
    "distributed/test_federation.py",
    "distributed/test_hybrid_training.py",
    "faults/test_storage_faults.py",
    "faults/test_checkpoint_faults.py",
    "faults/test_agents_on_hosts.py",
    "e2e/test_readme.py",
)
# How long what a test ended may take to be gone.
GRACE_S = 3.0


def pytest_configure(config: pytest.Config) -> None:
    """Keep what was measured on this machine out of the tests, and the tests' measurements out of it."""
    config.add_cleanup(warm_launch.close_shared)
    if "CORDEE_CACHE" in os.environ:
        return
    cache = tempfile.TemporaryDirectory(prefix="cordee-test-cache-")
    (Path(cache.name) / "data").symlink_to(cache_folder() / "data")  # data sets are not measurements
    os.environ["CORDEE_CACHE"] = cache.name
    config.add_cleanup(cache.cleanup)
    config.add_cleanup(lambda: os.environ.pop("CORDEE_CACHE", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: where two run at a time, none of them is left for the end."""
    places = {config.rootpath / "tests" / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True, scope="session")
def recorded_events_have_their_fields() -> Iterator[None]:
    """Fail a run that records an event that cannot be read back as what it was: a field of another type, no time."""
    record = JsonlSink.emit

    def check_and_record(sink: JsonlSink, event: AnyEvent) -> None:
        found = decode_event(to_json(event))
        assert isinstance(found, type(event)), found
        record(sink, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlSink, "emit", check_and_record)
        yield


@pytest.fixture(scope="module")
def warm_processes() -> Iterator[None]:
    """Have Python processes forked from one that has imported torch, which takes seconds (`warm_launch`).

    Used by all tests of some folders. A file whose processes must start from nothing has a fixture of this name that
    does nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", warm_launch.ForkingPopen)
        yield


@pytest.fixture(autouse=True)
def nothing_outlives_the_test() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, shared memory or a changed environment behind."""
    threads, children = set(threading.enumerate()), child_processes()
    segments, environment = shared_memory(), dict(os.environ)
    on_child = signal.getsignal(signal.SIGCHLD)
    yield
    if on_child is not None:  # torch's loaders install one that raises in whatever comes later
        signal.signal(signal.SIGCHLD, on_child)

    def left() -> list[str]:
        return [
            *(f"thread {thread.name}" for thread in set(threading.enumerate()) - threads if _is_ours(thread)),
            *(f"process {pid}: {command}" for pid, command in child_processes().items() if pid not in children),
            *(f"{SHARED_MEMORY}/{name}" for name in sorted(shared_memory() - segments) if not _is_used_by_others(name)),
        ]

    deadline_s = time.monotonic() + GRACE_S
    while (remains := left()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    changed = _changed(environment, dict(os.environ))
    for name in changed:  # so that the tests after this one do not fail for it as well
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    remains += [f"environment variable {name}" for name in changed]
    assert not remains, f"the test left behind: {'; '.join(remains)}"


def _is_ours(thread: threading.Thread) -> bool:
    """Whether a new thread counts: those that keep a program alive, and Cordée's own."""
    if not thread.daemon:
        return True
    homes = (type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or "")
    return thread.name.startswith("cordee") or any(home.split(".")[0] == "cordee" for home in homes)


def child_processes() -> dict[int, str]:
    """Return the living and the unburied children of this process, with their command lines."""
    multiprocessing.active_children()  # buries those of multiprocessing that have ended
    try:
        # Asks the kernel without reaping; looking through all processes takes milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    found = {}
    launched = [psutil.Process(pid)] if (pid := warm_launch.shared_pid()) is not None else []
    for child in [child for parent in [psutil.Process(), *launched] for child in parent.children()]:
        try:
            command = " ".join(child.cmdline()) or child.name()
        except psutil.Error:
            continue
        # Python's own helper and the warm launcher, started once and kept until the end of the program.
        if "multiprocessing.resource_tracker" not in command and child.pid != pid:
            found[child.pid] = command
    return found


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("*cordee*")}


def _is_used_by_others(segment: str) -> bool:
    """Whether a process that this one did not start has the segment mapped: another run on this machine."""
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in family and segment in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except (OSError, psutil.Error):
            continue
    return False


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = [name for name in before.keys() | after.keys() if not name.startswith(SET_BY_OTHERS)]
    return sorted(name for name in names if before.get(name) != after.get(name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs_data"):
        if not has_data(marker.args[0]):
            pytest.skip(f"the files of {marker.args[0]} are not on this machine: set CORDEE_DATA to their folder")


@functools.cache
def has_data(name: str) -> bool:
    from cordee.core.errors import DataError
    from cordee.core.settings import Data
    from cordee.data import load_data

    try:
        load_data(Data(use=name), seed=0)
    except DataError as error:
        if "cannot find" not in str(error):
            raise
        return False
    return True
