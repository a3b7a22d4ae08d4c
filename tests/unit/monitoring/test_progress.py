"""Progress on a terminal, without one, and in a notebook."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from rich.console import Console

from cordee.monitoring import AnyEvent, Monitor, ProgressSink
from cordee.monitoring.events import Evaluation, RunEnded, RunStarted, Step, Warned

START = RunStarted(
    run_dir="runs/x",
    name="lenet",
    strategy="single",
    workers=1,
    device="cpu",
    threads=2,
    parameters=44_426,
    train_samples=60_000,
    test_samples=10_000,
    batch_size=128,
    total_steps=1000,
    epochs=5,
    start_step=0,
)
EVALUATION = Evaluation(step=200, epoch=1, test_loss=0.42, test_accuracy=0.8431, seconds=0.5)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def plain_run(steps_per_second: float, encoding: str = "utf-8", total_steps: int = 1000) -> list[str]:
    """Return what a run without a terminal prints, refreshed five times a second."""
    clock, raw = Clock(), io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    sink = ProgressSink(console, clock)
    sink.emit(msgspec.structs.replace(START, total_steps=total_steps))
    for step in range(1, total_steps + 1):
        clock.now_s += 1 / steps_per_second
        sink.refresh(step, 0.5)
        if step % (total_steps // 5) == 0:
            sink.emit(msgspec.structs.replace(EVALUATION, step=step, epoch=step * 5 // total_steps))
    sink.emit(Warned(message="[bold]the café is closed[/bold]"))
    sink.emit(RunEnded(status="completed"))
    sink.close()
    return raw.getvalue().decode(encoding).splitlines()


def test_without_a_terminal_there_are_few_plain_lines():
    lines = plain_run(steps_per_second=10)  # 100 s
    assert lines[0].startswith("lenet: 44,426 parameters")
    assert "run directory: runs/x" in lines
    assert sum("test accuracy 84.31 %" in line for line in lines) == 5
    steps = [line for line in lines if line.startswith("epoch") and "samples/s" in line]
    assert 4 <= len(steps) <= 10
    assert "loss 0.5000" in steps[0]
    assert "left" in steps[0]
    assert not any("\x1b" in line for line in lines)
    assert lines[-1] == "warning: [bold]the café is closed[/bold]"


def test_a_quick_run_prints_no_step_lines_and_a_long_one_at_most_one_a_minute():
    assert not any("samples/s" in line for line in plain_run(steps_per_second=5000))
    lines = plain_run(steps_per_second=0.05)  # five and a half hours
    assert sum("samples/s" in line for line in lines) <= 1000
    assert len([line for line in plain_run(steps_per_second=1, total_steps=3000) if "samples/s" in line]) <= 200


def test_a_console_that_cannot_show_all_letters_still_works():
    assert plain_run(100, encoding="ascii")[-1] == "warning: [bold]the caf? is closed[/bold]"


def test_progress_before_the_start_is_passed_over():
    sink = ProgressSink(Console(file=io.StringIO()))
    sink.refresh(1, 0.5)
    sink.emit(Step(step=1))
    sink.close()
    sink.close()


def test_a_reader_that_went_away_does_not_stop_training():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    messages: list[str] = []

    class Kept:
        def emit(self, event: AnyEvent) -> None:
            if isinstance(event, Warned):
                messages.append(event.message)

        def close(self) -> None:
            pass

    with Monitor([ProgressSink(Console(file=Gone())), Kept()]) as monitor:
        monitor.emit(START)
        monitor.progress(step=1, loss=0.5)
    assert messages == ["cannot write to the console: input/output error; progress is not shown any more"]


ON_A_TERMINAL = """
import sys, time
from rich.console import Console
from cordee.monitoring import Monitor, ProgressSink
from cordee.monitoring.events import Evaluation, RunStarted
with Monitor([ProgressSink(Console())]) as monitor:
    monitor.emit({start!r})
    for step in range(1, 100_000):
        time.sleep(0.01)
        monitor.progress(step=step, loss=0.5)
        if step == 30:
            monitor.emit({evaluation!r})
            print("a line of the user's own")
"""


def on_a_terminal(columns: int, environment: dict[str, str], stop: signal.Signals) -> str:
    """Run a training that never ends in a terminal, stop it after the first evaluation, return its output."""
    terminal, inside = pty.openpty()
    code = ON_A_TERMINAL.format(start=START, evaluation=EVALUATION)
    base = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=inside,
        stdout=inside,
        stderr=subprocess.DEVNULL,
        env={**base, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment},
        start_new_session=True,
    )
    os.close(inside)
    output, deadline = b"", time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            output += chunk
            if b"user's own" in output and process.poll() is None:
                process.send_signal(stop)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return output.decode()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_on_a_terminal_the_cursor_is_visible_however_training_ends(stop):
    output = on_a_terminal(80, {}, stop)
    assert "──" in output
    assert "a line of the user's own" in output
    assert "test accuracy 84.31 %" in output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_colour_is_left_out_when_it_is_not_wanted():
    output = on_a_terminal(40, {"NO_COLOR": "1"}, signal.SIGINT)
    assert "──" in output
    assert "\x1b[36m" not in output


def test_a_dumb_terminal_gets_plain_lines():
    output = on_a_terminal(80, {"TERM": "dumb"}, signal.SIGINT)
    assert "test accuracy 84.31 %" in output
    assert "\x1b" not in output


NOTEBOOK = """
from rich.console import Console
from cordee.monitoring import Monitor, ProgressSink
from cordee.monitoring.events import Evaluation, RunStarted
with Monitor([ProgressSink(Console())]) as monitor:
    monitor.emit({start!r})
    monitor.progress(step=100, loss=0.5)
    monitor.emit({evaluation!r})
"""


def test_in_a_notebook_everything_is_one_output_that_is_replaced():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    code = NOTEBOOK.format(start=START, evaluation=EVALUATION)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    (output,) = notebook.cells[0].outputs
    lines = output["data"]["text/plain"].splitlines()
    assert lines[0].startswith("lenet: 44,426 parameters")
    assert "test accuracy 84.31 %" in lines[-1]
