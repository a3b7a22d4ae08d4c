"""Commands that are run to their end, or ended with everything they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "COMPARE_CHECKOUTS_COMMAND"  # inherited by all that a command starts, however deep, and not lost with a parent
GRACE_S = 5.0  # for processes to end by themselves, after their command or after SIGTERM
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    exit_code: int | None  # None: it did not end in time, and was ended
    stdout: str
    stderr: str
    left_behind: list[str]  # commands of processes that outlived it, and were killed

    def last_words(self, num_lines: int = 15) -> str:
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-num_lines:]
        end = "did not end in time" if self.exit_code is None else f"exit code {self.exit_code}"
        return "\n".join([*lines, end])


def run_command(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    grace_s: float = GRACE_S,
    while_running: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `command` in `folder` and return how it ended; `while_running` is called every 20 ms.

    After `timeout_s` it is ended. Whatever ends this call, also Ctrl-C, none of the command's processes lives on.
    """
    mark = uuid.uuid4().hex
    # Files, not pipes: a process that outlives its parent would keep a pipe open.
    out_path, error_path = folder / f"stdout-{mark}.txt", folder / f"stderr-{mark}.txt"
    with out_path.open("wb") as out, error_path.open("wb") as error, _ended_at_last(mark, grace_s) as left_behind:
        # A session of its own: Ctrl-C is for this program, which ends the command in order.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + timeout_s
            while process.poll() is None and time.monotonic() < deadline_s:
                while_running()
                time.sleep(POLL_S)
            exit_code = process.poll()
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            if process.poll() is None:
                process.kill()
                process.wait()
    texts = [path.read_text(errors="replace") for path in (out_path, error_path)]
    out_path.unlink()
    error_path.unlink()
    return Ended(exit_code=exit_code, stdout=texts[0], stderr=texts[1], left_behind=left_behind)


@contextlib.contextmanager
def _ended_at_last(mark: str, grace_s: float) -> Iterator[list[str]]:
    """At the end, wait for processes with the mark to be gone, kill those that are not, and list them."""
    killed: list[str] = []
    try:
        yield killed
    finally:
        deadline_s = time.monotonic() + grace_s
        while (left := _marked(mark)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        killed += left.values()
        while left:  # again and again: one of them may just have started another
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
            left = _marked(mark)


def _marked(mark: str) -> dict[int, str]:
    """Return the living processes that have the mark in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it has just ended, or belongs to another user
            continue
    return found
