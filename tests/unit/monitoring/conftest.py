"""A disk that is really full, and processes that are really killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOLD_A_RUN = """
import sys
from cordee.monitoring import RunDirectory
run = RunDirectory.{how}
{extra}
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def fill() -> Callable[[Path], None]:
    """Use up all space on the disk that a folder is on."""

    def fill_disk(folder: Path) -> None:
        descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(descriptor, b"\0" * 512)
        except OSError:
            pass
        finally:
            os.close(descriptor)

    return fill_disk


@pytest.fixture
def hold_run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that holds a run directory; it lives until it is killed or the test ends."""
    holders: list[subprocess.Popen[str]] = []

    def start(how: str, extra: str = "") -> subprocess.Popen[str]:
        code = HOLD_A_RUN.format(how=how, extra=extra)
        holder = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()
