"""Ctrl-C and SIGTERM on a real process: once stops after the step and saves, twice stops at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from workspace import (
    CORDEE,
    STEPS,
    TIMEOUT_S,
    Workspace,
    assert_ended_well,
    events,
    hear_ctrl_c,
    living_descendants,
    settings,
    summary,
    wait_until,
    warnings_of,
)

pytestmark = pytest.mark.timeout(300)

# Slow enough to be met in the middle: 1.8 s in all.
SLOWLY = {"TEST_STEP_MS": "15"}


def command_to_resume(printed: str) -> str:
    """Return the command that the end of a run tells the user to give."""
    return printed.rpartition("next\n")[2].strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_once_saves_and_says_how_to_go_on(number: signal.Signals, workspace: Workspace, reference_sha256: str) -> None:
    run = workspace.path / "my runs" / "first"  # a path that has to be quoted
    with workspace.started("train", "job.toml", "--run-dir", run, **SLOWLY) as process:
        workspace.wait_for_step(process, 21, run)
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (130, "")
    found = summary(run)
    assert (found["status"], found["stopped_by"]) == ("interrupted", "interrupt")
    assert 21 <= found["steps"] < STEPS
    assert (run / "checkpoints" / f"step-{found['steps']}").is_dir()
    assert warnings_of(run) == ["stopping after this step; Ctrl-C again stops at once"]
    assert events(run)[-1]["type"] == "run_ended"

    command = command_to_resume(out)
    assert command.startswith("cordee train ") and "--resume" in command
    assert shlex.quote(str(run)) in command
    assert_ended_well(workspace.execute(["bash", "-c", command], cwd=Path("/")))
    assert (summary(run)["status"], summary(run)["weights_sha256"]) == ("completed", reference_sha256)
    assert summary(run)["samples"] == STEPS * 16


def test_twice_stops_at_once_and_leaves_no_process(workspace: Workspace) -> None:
    """The signal goes to the whole group, as from a terminal, also to the processes that read the data."""
    own_data = ["--set", 'data={use="parts:Images", test_fraction=0.2, processes=2}']
    arguments = ["train", "job.toml", "--run-dir", "run", *own_data]
    with workspace.started(*arguments, TEST_HANG_AT="22") as process:
        workspace.wait_for_step(process, 21)
        readers = living_descendants(process.pid)
        assert len(readers) >= 2  # and a helper of the warm launcher
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: bool(warnings_of(workspace.path / "run")), process)
        time.sleep(0.3)
        assert process.poll() is None, "the first one waits for the step"
        os.killpg(process.pid, signal.SIGINT)
        started_s = time.monotonic()
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started_s < 2.0
        _, alive = psutil.wait_procs(readers, timeout=2)
        assert not alive
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert err.startswith("cordee: interrupted") and err.count("cordee: ") == 1
    assert summary(workspace.path / "run")["status"] == "interrupted"
    kept = sorted(path.name for path in (workspace.path / "run" / "checkpoints").iterdir())
    assert kept == ["step-10", "step-20"], "what was saved before stays"
    assert_ended_well(workspace.train("--resume", *own_data, *settings(stop__steps=25)))


def test_before_training_has_begun(workspace: Workspace) -> None:
    """While torch is imported and the data is loaded there is nothing to save: one Ctrl-C is enough."""
    slow_data = ["--set", 'data={use="slow:data"}']
    # A folder and not a file: Python drops a KeyboardInterrupt that comes while it closes a file nobody refers to.
    (workspace.path / "slow.py").write_text(
        "import os, time\ndef data():\n    os.mkdir('begun')\n    time.sleep(600)\n"
    )
    with workspace.started("train", "job.toml", "--run-dir", "run", *slow_data) as process:
        wait_until((workspace.path / "begun").exists, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, "", "cordee: interrupted\n")
    assert not (workspace.path / "run").exists()


def test_around_the_end_of_an_epoch(workspace: Workspace, reference_sha256: str) -> None:
    """Wherever it falls, neither the epoch nor its evaluation may be counted twice or left out."""
    with workspace.started("train", "job.toml", "--run-dir", "run", TEST_STEP_MS="15") as process:
        workspace.wait_for_step(process, 26)
        time.sleep(4 * 0.015)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert_ended_well(workspace.train("--resume"))
    found = summary(workspace.path / "run")
    assert (found["epochs"], found["weights_sha256"]) == (4, reference_sha256)
    assert {event["step"] for event in events(workspace.path / "run") if event["type"] == "evaluation"} == {
        30,
        60,
        90,
        120,
    }


@contextlib.contextmanager
def on_a_terminal(workspace: Workspace, *arguments: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start `cordee` with a terminal of 100 columns for its own; yield the process and the other end."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    environ = {**workspace.environ, "TERM": "xterm-256color", **env}
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [str(CORDEE), *arguments],
        cwd=workspace.path,
        env=environ,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=take_the_terminal,
    )
    try:
        yield process, outer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(outer)
        os.close(inner)


def take_the_terminal() -> None:
    """Called in a new process: makes the terminal its own, so that ^C becomes a signal."""
    hear_ctrl_c()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_available(outer: int, timeout_s: float) -> bytes:
    ready, _, _ = select.select([outer], [], [], timeout_s)
    return os.read(outer, 1 << 16) if ready else b""


def read_until_it_ends(process: subprocess.Popen[bytes], outer: int) -> bytes:
    seen, deadline_s = b"", time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        assert time.monotonic() < deadline_s, seen
        seen += read_available(outer, 0.05)
    while piece := read_available(outer, 0.1):
        seen += piece
    return seen


@pytest.mark.parametrize("presses", [1, 2])
def test_the_terminal_is_left_as_it_was(presses: int, workspace: Workspace) -> None:
    slowness = SLOWLY if presses == 1 else {"TEST_HANG_AT": "26"}
    with on_a_terminal(workspace, "train", "job.toml", "--run-dir", "run", **slowness) as (process, outer):
        before = termios.tcgetattr(outer)
        seen, deadline_s = b"", time.monotonic() + TIMEOUT_S
        while workspace.steps_taken() < 21:
            assert process.poll() is None and time.monotonic() < deadline_s, seen
            seen += read_available(outer, 0.02)
        assert "━".encode() in seen or "╸".encode() in seen, "there is no bar"
        os.write(outer, b"\x03")
        if presses == 2:
            while b"stopping after this step" not in seen:
                assert process.poll() is None and time.monotonic() < deadline_s, seen
                seen += read_available(outer, 0.02)
            os.write(outer, b"\x03")
        seen += read_until_it_ends(process, outer)
        assert termios.tcgetattr(outer) == before
    assert process.returncode == 130
    assert b"\x1b[?25h" in seen
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l"), "the cursor is left hidden"
    assert b"Traceback" not in seen
    assert b"stopping after this step" in seen
    if presses == 1:
        assert b"--resume" in seen
    assert seen.endswith(b"\n"), "the prompt must start on a line of its own"
