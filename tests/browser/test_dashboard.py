"""The dashboard in a real browser: what a person sees, in both themes, on a phone, by keyboard and by screen reader.

Run by `make test-dashboard`, which needs Debian's chromium. CORDEE_PICTURES=folder keeps pictures of the pages.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cordee.monitoring import RunDirectory, events
from cordee.monitoring.summary import Summary
from cordee.monitoring.timeline import Line, StepPasses

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
pytestmark = pytest.mark.timeout(120)


def write(run: Path, *emitted: events.AnyEvent) -> None:
    with (run / "events.jsonl").open("ab") as file:
        for event in emitted:
            file.write(msgspec.json.encode(event) + b"\n")


def fill(run: Path, num_steps: int = 400) -> None:
    """A run of two workers, one of which is lost and comes back."""
    write(run, *(events.WorkerStarted(time=1000.0, worker=w, pid=1, host="h", role="worker") for w in range(2)))
    write(run, events.RunStarted(time=1001.0, strategy="data_parallel", workers=2, start_step=0, total_steps=num_steps))
    for step in range(1, num_steps + 1):
        at = 1001.0 + step / 10
        write(run, events.Step(time=at, step=step, epoch=1, loss=2.0 / step**0.5, samples_per_second=5000.0 + step % 7))
        if step % 50 == 0:
            write(run, events.Evaluation(time=at, step=step, test_loss=1.0 / step, test_accuracy=1 - 1 / step**0.5))
            write(run, events.Checkpoint(time=at, step=step, path="p", seconds=0.1, stall_s=0.0))
        if step == 150:
            write(run, events.WorkerLost(time=at, worker=1, step=150, reason="was killed by SIGKILL"))
            write(run, events.WorkerStarted(time=at + 3, worker=1, pid=2, host="h", role="worker"))
            write(run, events.Recovery(time=at + 0.1, lost=[1], seconds=0.1, step=150, steps_redone=1))
    for number in (1, 2):
        facts = {"num_asked": 5, "num_took_part": 4, "late": [3], "epsilon": 0.375 * number}
        write(run, events.Round(time=1041.0, round=number, **facts))
    write(run, events.Staleness(time=1042.0, ages={"0": 300, "1": 80, "2": 20}))
    (run / "timeline").mkdir()
    for worker in range(2):
        times = {"data": 100, "compute": 5000 - 2000 * worker, "exchange": 400, "wait": 100 + 2000 * worker}
        columns = {name: [1000 * time] for name, time in times.items()}
        columns |= {"step": [9], "steps": [9], "at": [0], "evaluate": [0], "save": [0]}
        passes = StepPasses(
            step=9, kind=[0, 1], stage=[worker] * 2, microbatch=[0, 0], at=[10_000 * worker, 30_000 - 10_000 * worker],
            spent=[10_000, 20_000 if not worker else 10_000],
        )  # fmt: skip
        states = [(0, "loading"), (600_000, "training")]
        facts = {"origin_us": 10**9, "passes": [passes], "states": states, "links": {"coordinator": 2_500_000}}
        line = Line(member=f"worker-{worker}", pid=1, host="h", **facts, **columns)  # type: ignore[arg-type]
        (run / "timeline" / f"worker-{worker}.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    write(run, events.Warned(time=1042.0, message="<img src=x onerror=alert(1)> is text"))


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    for name in ("first", "second"):
        with RunDirectory.create(tmp_path / "runs" / name, 'name = "digits"\n') as run:
            fill(run.path)
            (run.path / "logs" / "worker-0.log").write_text("2026-11-18 10:00:00,000 INFO    a: hello\n")
    with serving(tmp_path / "runs") as found:
        yield found


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "cordee", "dashboard", "first", "--until-closed", "--runs", runs.name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=runs.parent
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def opened(browser: Browser, address: str, **options: object) -> tuple[Page, list[str]]:
    page = browser.new_context(viewport={"width": 1200, "height": 900}, **options).new_page()  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    expect(page.locator("polyline.curve").first).to_be_visible()
    return page, problems


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("CORDEE_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_run_on_one_screen(browser: Browser, address: str, theme: str) -> None:
    page, problems = opened(browser, address, color_scheme=theme)
    assert "token" not in page.url
    expect(page.locator("h1")).to_contain_text("first died")
    expect(page.locator(".diagnosis")).to_contain_text("cordee resume")
    assert page.locator("rect.lost").count() == 1
    assert page.locator("svg[aria-label='Members'] path.f1").count() == 2  # each member has computed
    page.locator("svg[aria-label='Members']").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("figure").first.locator("output")).to_contain_text("worker 0: ")
    expect(page.locator("figcaption").filter(has_text="Rounds: clients")).to_be_visible()
    expect(page.get_by_text("ε 0.75 spent after round 2")).to_be_visible()
    page.get_by_text("Members as a table").click()
    expect(page.get_by_role("cell", name="worker 1 was killed by SIGKILL")).to_be_visible()
    expect(page.get_by_role("cell", name="<img src=x onerror=alert(1)> is text")).to_be_visible()
    assert page.locator("img").count() == 0
    page.get_by_text("Shares as a table").click()
    table = page.get_by_role("region", name="Where the time of each member went").locator("tbody tr")
    rows = table.all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["worker 0", "worker 1"]  # worker 1 waits for worker 0
    page.get_by_text("Staleness as a table").click()
    expect(page.get_by_role("cell", name="75.00 %")).to_be_visible()
    page.get_by_text("Links as a table").click()
    expect(page.get_by_role("row", name="worker 1 coordinator 2.5 MB")).to_be_visible()
    page.get_by_role("button", name="logs at 0:16").first.click()
    expect(page.locator("ol.logs li.happened.lost")).to_contain_text("worker 1 was killed by SIGKILL")
    expect(page.locator("ol.logs")).to_contain_text("hello")
    expect(page.get_by_text("The bubble, in which workers have no pass to compute, is 50.00 %")).to_be_visible()
    page.get_by_text("Passes as a table").click()
    expect(page.get_by_role("row", name="worker 1 1 0 backward 20 ms 10 ms")).to_be_visible()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    keep(page, f"dashboard-{theme}")
    assert problems == []
    page.context.close()


def test_zooming_and_the_cursor_by_keyboard(browser: Browser, address: str) -> None:
    page, _ = opened(browser, address)
    chart = page.locator("svg.chart[aria-label='Training loss']")
    chart.focus()
    page.keyboard.press("ArrowRight")
    readout = page.locator("figure", has=chart).locator("output")
    expect(readout).to_have_text(re.compile(r"\d"))
    with page.expect_response("**/series*"):
        page.keyboard.press("+")
    assert "0 s" not in chart.locator("text").all_inner_texts()
    with page.expect_response("**/series*"):
        page.keyboard.press("Escape")
    page.context.close()


def test_the_page_follows_the_run(browser: Browser, address: str, tmp_path: Path) -> None:
    page, _ = opened(browser, address)
    write(tmp_path / "runs" / "first", events.Step(time=1100.0, step=4321, loss=0.5))
    expect(page.locator("dl")).to_contain_text("4,321", timeout=10_000)
    page.context.close()


def test_runs_are_listed_and_compared(browser: Browser, address: str) -> None:
    page, problems = opened(browser, address)
    page.get_by_text("All runs").click()
    expect(page.locator("input[type=checkbox]")).to_have_count(2)
    for box in page.locator("input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("figure").first.locator("polyline")).to_have_count(2)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    keep(page, "dashboard-runs")
    assert problems == []
    page.context.close()


def test_the_focus_stays_where_it_is_while_pages_follow_runs(browser: Browser, address: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    page, problems = opened(browser, address)
    page.get_by_text("Logs of all members, by time").click()
    page.get_by_text("Members as a table").click()
    shares = page.get_by_text("Shares as a table")
    shares.focus()
    write(run, events.Step(time=1099.0, step=4320, loss=0.5))
    expect(page.locator("dl")).to_contain_text("4,320", timeout=10_000)
    expect(shares).to_be_focused()
    button = page.get_by_role("button", name="logs at 0:16").first
    button.focus()
    write(run, events.Step(time=1100.0, step=4321, loss=0.5))
    with (run / "logs" / "worker-0.log").open("a") as log:
        log.write("2026-11-18 10:00:01,000 INFO    a: said later\n")
    expect(page.locator("dl")).to_contain_text("4,321", timeout=10_000)
    expect(button).to_be_focused()
    page.wait_for_timeout(3100)  # logs are read no more often
    write(run, events.Step(time=1101.0, step=4322, loss=0.5))
    expect(page.locator("ol.logs")).to_contain_text("said later", timeout=10_000)
    page.get_by_text("All runs").click()
    box = page.get_by_role("checkbox", name="compare first")
    box.check()
    box.focus()
    write(run, events.Step(time=1110.0, step=5000, loss=0.5))
    expect(page.get_by_role("row", name="first")).to_contain_text("5,000", timeout=15_000)
    expect(box).to_be_focused()
    expect(box).to_be_checked()
    assert problems == []
    page.context.close()


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, address: str) -> None:
    page, _ = opened(browser, address)
    page.set_viewport_size({"width": 380, "height": 800})
    page.reload()
    expect(page.locator("polyline.curve").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    keep(page, "dashboard-phone")
    page.context.close()


def test_predicted_and_measured_and_many_members(browser: Browser, tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs" / "first", 'name = "digits"\n') as directory:
        run = directory.path
    fill(run)
    source = (run / "timeline" / "worker-0.jsonl").read_bytes()
    for worker in range(2, 120):
        (run / "timeline" / f"worker-{worker}.jsonl").write_bytes(source)
    summary = Summary(status="completed", step_seconds=0.01, predicted_step_seconds=0.011, prediction_is_sure=False)
    write(run, events.RunEnded(time=1050.0, **msgspec.structs.asdict(summary)))
    with serving(tmp_path / "runs") as address:
        page, problems = opened(browser, address)
        expect(page.get_by_role("row", name="time of a step 11 ms 10 ms +10 %")).to_be_visible()
        # Timelines are read a part at a time; the page asks for the rest.
        bars = page.locator("svg[aria-label^='Where the time'] rect")
        expect(bars).to_have_count(4 * 120, timeout=30_000)
        expect(page.locator("svg[aria-label='Members'] text").filter(has_text="worker 5")).to_have_count(0)
        legend = page.locator(".legend").filter(has_text="75 – 100 % busy")
        expect(legend).to_contain_text(re.compile(r"for which others wait, first: worker \d+, worker \d+, worker \d+"))
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        keep(page, "dashboard-many")
        assert problems == []
        page.context.close()


def kill_a_worker(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill worker 1 of a run as soon as the run has evaluated."""
    while process.poll() is None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            lines = [msgspec.json.decode(line) for line in (run / "events.jsonl").read_bytes().splitlines()]
            if any(line["type"] == "evaluation" for line in lines):
                started = [line for line in lines if line["type"] == "worker_started" and line["worker"] == 1]
                os.kill(started[-1]["pid"], signal.SIGKILL)
                return
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_a_real_run_in_which_a_worker_was_killed(browser: Browser, tmp_path: Path) -> None:
    """With CORDEE_PICTURES also makes the picture of the manual, docs/pictures/dashboard.png."""
    run = tmp_path / "runs" / "first"
    job = Path(__file__).parents[2] / "examples" / "digits.toml"
    settings = ["--set", "training.epochs=100", "--set", "evaluation.every_epochs=4", "--workers", "2"]
    command = [sys.executable, "-m", "cordee", "train", str(job), "--quiet", *settings, "--run-dir", str(run)]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        kill_a_worker(run, process)
        assert process.wait(300) == 0
    with serving(tmp_path / "runs") as address:
        page, problems = opened(browser, address)
        expect(page.locator("h1")).to_contain_text("first completed")
        expect(page.locator(".diagnosis")).to_contain_text("worker 1 was killed by SIGKILL")
        lanes = page.locator("svg[aria-label='Members']")
        assert lanes.locator("path.f1").count() == 2  # both have computed
        assert lanes.locator("rect.loading").count() >= 2
        assert lanes.locator("rect.lost").count() == 1
        assert lanes.locator("text.sign.lost").count() == 1
        for title in ("Training loss", "Test accuracy", "Samples per second", "Memory of each member, MB"):
            assert page.locator(f"svg.chart[aria-label='{title}'] polyline.curve").count() > 0
        if folder := os.environ.get("CORDEE_PICTURES"):
            clip = {"x": 0, "y": 0, "width": 1200, "height": 1180}
            page.screenshot(path=Path(folder) / "dashboard.png", full_page=True, clip=clip)  # type: ignore[arg-type]
        page.get_by_text("Members as a table").click()
        expect(page.get_by_role("cell", name=re.compile("recovered in .* redone"))).to_be_visible()
        page.get_by_text("Logs of all members, by time").click()
        expect(page.locator("ol.logs li.happened.lost")).to_contain_text("worker 1 was killed by SIGKILL")
        assert page.locator("ol.logs li:not(.happened)").count() > 0
        assert problems == []
        page.context.close()
