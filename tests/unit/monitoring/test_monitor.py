"""The monitor: what reaches the sinks, and what happens when one of them fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from cordee.core.errors import StorageError
from cordee.monitoring import AnyEvent, Monitor
from cordee.monitoring.events import Checkpoint, Step, Warned


class Recorder:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.closed = 0

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    @property
    def types(self) -> list[str]:
        return [str(event.__struct_config__.tag) for event in self.events]


class FullDisk(Recorder):
    def emit(self, event: AnyEvent) -> None:
        super().emit(event)
        raise StorageError("cannot write x: no space left on device")

    def close(self) -> None:
        super().close()
        raise StorageError("cannot write the rest either")


class Display(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[int, float]] = []

    def refresh(self, step: int, loss) -> None:
        self.shown.append((step, float(loss)))


def test_importing_monitoring_does_not_import_torch_nor_configure_logging():
    code = (
        "import sys, logging, cordee.monitoring; "
        "assert 'torch' not in sys.modules; assert not logging.getLogger('cordee').handlers; "
        "assert not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_events_carry_the_time_and_reach_all_sinks_in_order():
    first, second = Recorder(), Recorder()
    before = time.time()
    with Monitor([first, second]) as monitor:
        monitor.emit(Step(step=1, loss=0.5))
        monitor.emit(Checkpoint(step=1, path="x", seconds=0.1, stall_s=0.0))
    assert first.types == second.types == ["step", "checkpoint"]
    assert before <= first.events[0].time <= time.time()
    assert first.events[0] == Step(step=1, loss=0.5, time=first.events[0].time)
    assert first.closed == second.closed == 1


def test_closing_twice_closes_the_sinks_once_and_later_events_go_nowhere():
    sink = Recorder()
    monitor = Monitor([sink])
    monitor.close()
    monitor.close()
    monitor.emit(Step(step=1))
    monitor.progress(step=1, loss=0.1)
    assert sink.closed == 1
    assert sink.events == []


@pytest.mark.parametrize("order", [0, 1])
def test_a_sink_that_cannot_write_is_left_out_and_the_others_are_told_once(order):
    broken, console = FullDisk(), Recorder()
    sinks = [broken, console] if order == 0 else [console, broken]
    with Monitor(sinks) as monitor:
        monitor.emit(Step(step=1))
        monitor.emit(Step(step=2))
    assert sorted(console.types) == ["step", "step", "warning"]
    warning = next(event for event in console.events if isinstance(event, Warned))
    assert "no space left" in warning.message
    assert broken.types == ["step"]
    assert broken.closed == 1


def test_all_sinks_failing_does_not_stop_the_caller():
    with Monitor([FullDisk(), FullDisk()]) as monitor:
        monitor.emit(Step(step=1))
        monitor.emit(Step(step=2))


def test_an_error_that_is_not_about_storage_is_not_hidden():
    class Wrong(Recorder):
        def emit(self, event: AnyEvent) -> None:
            raise KeyError("a mistake in a sink")

    with pytest.raises(KeyError), Monitor([Wrong()]) as monitor:
        monitor.emit(Step(step=1))


def test_progress_is_throttled_and_reads_the_loss_only_when_it_is_shown():
    class Loss:
        reads = 0

        def __float__(self) -> float:
            Loss.reads += 1
            return 0.25

    display = Display()
    with Monitor([display]) as monitor:
        for step in range(1000):
            monitor.progress(step=step, loss=Loss())
    assert display.shown[0] == (0, 0.25)
    assert len(display.shown) == Loss.reads <= 3
    assert display.events == []


def test_progress_costs_little():
    with Monitor([Display()]) as monitor:
        best_s = min(_seconds_of_calls(monitor, 20_000) for _ in range(5))
    assert best_s / 20_000 < 2e-6  # measured: 0.2 µs


def _seconds_of_calls(monitor: Monitor, num_calls: int) -> float:
    start = time.perf_counter()
    for step in range(num_calls):
        monitor.progress(step=step, loss=0.5)
    return time.perf_counter() - start


def test_a_slow_display_is_redrawn_less_often():
    class Slow(Display):
        def refresh(self, step: int, loss) -> None:
            super().refresh(step, loss)
            time.sleep(0.002)

    slow = Slow()
    with Monitor([slow]) as monitor:
        end = time.monotonic() + 0.5  # room for three redraws of a quick display; 400 times 2 ms is longer
        while time.monotonic() < end:
            monitor.progress(step=1, loss=0.5)
    assert len(slow.shown) == 1


def test_a_display_that_fails_between_events_is_left_out():
    class Gone(Display):
        def refresh(self, step: int, loss) -> None:
            raise StorageError("cannot write to the console: broken pipe")

    gone, other = Gone(), Recorder()
    with Monitor([gone, other]) as monitor:
        monitor.progress(step=1, loss=0.1)
        monitor.progress(step=2, loss=0.1)
    assert other.types == ["warning"]
    assert gone.events == []


def test_events_from_many_threads_are_all_there():
    sink = Recorder()
    with Monitor([sink]) as monitor:
        threads = [threading.Thread(target=lambda: [monitor.emit(Step(step=i)) for i in range(200)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sink.events) == 1600


def test_a_signal_handler_may_emit_while_an_event_is_being_emitted():
    class Interrupted(Recorder):
        def emit(self, event: AnyEvent) -> None:
            super().emit(event)
            if isinstance(event, Step):
                signal.raise_signal(signal.SIGUSR1)

    sink = Interrupted()
    with Monitor([sink]) as monitor:
        before = signal.signal(signal.SIGUSR1, lambda *_: monitor.emit(Warned(message="stopping")))
        try:
            monitor.emit(Step(step=1))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert sink.types == ["step", "warning"]
