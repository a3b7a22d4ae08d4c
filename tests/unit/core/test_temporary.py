"""Temporary folders: gone at the end, and gone when the next is made if their process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cordee.core.temporary import temporary_folder

HOLD = """
import sys
from cordee.core.temporary import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(parent: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        for folder in folders:
            os.utime(folder, (0, 0))
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert folders[0].exists(), "nobody has looked yet"
        with temporary_folder() as own:
            assert not folders[0].exists() and folders[1].exists() and Path(own).exists()
    finally:
        for holder in holders:
            holder.communicate()
    assert not list(parent.iterdir())
