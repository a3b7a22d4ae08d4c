"""The full screen of a run, by Textual's pilot: at 80 columns, with a run that grows, and with text that is hostile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import RunDirectory, events
from cordee.tools.watch import Curve, WatchApp, Watched, on_a_scale


def write(run: Path, *emitted: events.AnyEvent) -> None:
    with (run / "events.jsonl").open("ab") as file:
        for event in emitted:
            file.write(msgspec.json.encode(event) + b"\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "digits-1", 'name = "digits"\n') as made:
        path = made.path
    write(path, events.RunStarted(time=1000.0, strategy="data_parallel", workers=2, start_step=0, total_steps=400))
    write(path, events.Generation(time=1000.0, generation=1, members=[0, 1]))
    for step in range(1, 101):
        write(path, events.Step(time=1000.0 + step, step=step, epoch=1, loss=2.0 / step, samples_per_second=5000.0))
    write(path, events.Evaluation(time=1100.0, step=100, test_accuracy=0.9, test_loss=0.2))
    write(path, events.WorkerLost(time=1101.0, worker=1, step=100, reason="was killed by SIGKILL"))
    write(path, events.Warned(time=1102.0, message="[bold]markup[/bold] \x1b[31mand colour is text"))
    return path


def screen_text(app: WatchApp) -> str:
    return "\n".join("".join(segment.text for segment in line) for line in app.screen._compositor.render_strips())


def test_the_screen_at_80_columns(run: Path) -> None:
    async def look() -> tuple[str, str]:
        app = WatchApp(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            before = screen_text(app)
            write(run, events.Step(time=1103.0, step=200, epoch=2, loss=0.123))
            write(run, events.WorkerStarted(time=1103.0, worker=1, pid=2, host="h", role="worker"))
            app.look()
            await pilot.pause()
            after = screen_text(app)
            await pilot.press("q")
        return before, after

    before, after = asyncio.run(look())
    assert all(len(line) <= 80 for line in before.splitlines())
    for part in ("digits-1", "25%", "workers 1/2, 1 rejoining", "training loss 0.0200", "test accuracy 90.00 %"):
        assert part in before, before
    assert "worker 1 was killed by SIGKILL" in before
    assert "[bold]markup[/bold]" in before
    assert "\x1b" not in before
    for part in ("50%", "workers 2/2", "training loss 0.1230"):
        assert part in after, after


def test_a_run_that_has_ended_is_complete_and_its_screen_may_be_gone(run: Path) -> None:
    write(run, events.RunEnded(time=1110.0, status="completed", steps=400))
    assert Watched(run).read() is False
    watched = Watched(run)
    watched.read()
    assert (watched.step, watched.total_steps) == (400, 400)
    assert "rejoining" not in watched.title()

    async def look_late() -> None:
        app = WatchApp(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            assert app.query_one("#happened").show_horizontal_scrollbar is False
            await app.query("*").remove()
            app.look()

    asyncio.run(look_late())


def test_rounds_of_clients_and_all_that_happens_are_shown(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "clients", 'name = "clients"\n') as made:
        run = made.path
    write(run, events.RunStarted(time=1000.0, strategy="federated", workers=2, start_step=0, total_steps=20))
    write(run, *(events.Round(time=1000.0 + n, round=n, num_asked=5, num_took_part=4, loss=1 / n) for n in (1, 2, 3)))
    write(run, events.Fault(time=1004.0, fault="kill", target="worker 1"))
    watched = Watched(run)
    watched.read()
    assert (watched.step, watched.loss.last, watched.left_s) == (3, pytest.approx(1 / 3), 17.0)
    said = [line.partition("  ")[2] for line in watched.happened]
    assert said == [*(f"round {n}: 4 of 5 clients" for n in (1, 2, 3)), "cordee chaos: kill worker 1"]


def test_a_run_that_is_damaged_or_not_there(tmp_path: Path, run: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        Watched(tmp_path)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"type": "step", broken\n')
    watched = Watched(run)
    assert watched.read() is False
    assert ("unreadable", "1 line") in watched.rows()


def test_the_last_value_is_known_where_it_is_not_kept_and_a_loss_is_shown_by_its_powers() -> None:
    curve = Curve()
    for value in range(1, 4004):
        curve.append(float(value))
    assert curve.values[-1] != 4003.0
    assert curve.last == 4003.0
    assert on_a_scale([10.0, 0.1, 0.01]) == pytest.approx([1.0, -1.0, -2.0])
    assert on_a_scale([2.0, 1.0]) == [2.0, 1.0]
    assert on_a_scale([2.0, 0.0]) == [2.0, 0.0]


def test_curves_stay_small() -> None:
    curve = Curve()
    for value in range(100_000):
        curve.append(float(value))
    assert len(curve.values) <= 2001
    assert curve.values[0] == 0.0
    assert curve.values[-1] > 95_000
