"""The check that nothing outlives a test: it must notice each kind of thing."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SEGMENT = Path("/dev/shm/cordee-left-by-a-test")
UNTIDY = f"""
import os, pathlib, threading, time

def test_thread():
    threading.Thread(target=time.sleep, args=(0.3,)).start()

def test_own_daemon():
    threading.Thread(target=time.sleep, args=(0.3,), name="cordee-x", daemon=True).start()

def test_process():
    os.posix_spawn("/bin/sleep", ["sleep", "0.3"], {{}})

def test_shared_memory():
    pathlib.Path({str(SEGMENT)!r}).touch()

def test_environment():
    os.environ["CORDEE_X"] = "1"

def test_tidy():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
"""
NEEDY = """
import pytest

@pytest.mark.needs_data("mnist")
def test_not_here():
    pass

@pytest.mark.needs_data("synthetic")
def test_here():
    pass
"""


def test_files_that_are_started_first_exist() -> None:
    names = runpy.run_path(str(CONFTEST))["LONGEST_FIRST"]
    assert [name for name in names if not (CONFTEST.parent / name).is_file()] == []


def test_what_a_test_leaves_behind_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 3.0", "GRACE_S = 0.02"))
    pytester.makepyfile(UNTIDY)
    try:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        result.assert_outcomes(passed=6, errors=5)
        result.stdout.fnmatch_lines_random(
            [
                "*the test left behind: thread Thread-*",
                "*the test left behind: thread cordee-x",
                "*the test left behind: process *: sleep 0.3",
                f"*the test left behind: {SEGMENT}",
                "*the test left behind: environment variable CORDEE_X",
            ]
        )
    finally:
        SEGMENT.unlink(missing_ok=True)
        os.wait()


def test_data_that_is_not_here_is_a_reason_to_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_DATA", str(pytester.path))
    monkeypatch.setenv("CORDEE_CACHE", str(pytester.path))
    monkeypatch.setattr("cordee.data.files.SYSTEM_FOLDER", pytester.path / "nowhere")
    pytester.makeini("[pytest]\nmarkers = needs_data(name): x")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(NEEDY)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*the files of mnist are not on this machine*"])


def test_files_of_tests_have_names_of_their_own() -> None:
    """Two files of one name are collected apart, but not by a command that names no folder, as `make test-long`."""
    seen: dict[str, Path] = {}
    for path in sorted(CONFTEST.parent.rglob("test_*.py")):
        assert seen.setdefault(path.name, path) == path, f"{path} has the name of {seen[path.name]}"
