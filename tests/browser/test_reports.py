"""The pages that need no server, in a real browser: reports of searches and comparisons. Run by `make test-dashboard`.

CORDEE_PICTURES=folder keeps pictures of the pages, among them those of the manual: search.png and comparison.png.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect, sync_playwright

from cordee.dashboard.comparison import compare_runs, to_html
from cordee.monitoring import RunDirectory, Summary, events
from cordee.tuning.results import write_results
from cordee.tuning.study import Tried

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def tried(number: int, value: float | None, state: str = "completed", error: str = "") -> Tried:
    point = {"optimizer.lr": 10.0 ** -(1 + number / 4), "optimizer.use": "adam" if number % 2 else "<b>sgd</b>"}
    return Tried(number=number, state=state, value=value, point=point, evaluations=4, seconds=2.5, error=error)


@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 1100), ("dark", 380)])
def test_the_report_of_a_search(browser: Browser, tmp_path: Path, theme: str, width: int) -> None:
    trials = [tried(number, 0.9 - abs(number - 6) / 60) for number in range(12)]
    trials += [tried(12, 0.7, "pruned"), tried(13, None, "failed", "the loss of step 3 is nan")]
    write_results(trials, {"optimizer.lr": 0.8, "optimizer.use": 0.2}, "accuracy", True, tmp_path)
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme).new_page()  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "report.html").as_uri())
    assert problems == []
    expect(page.locator("li").first).to_contain_text("Best: trial 6 with accuracy 90.00 %")
    assert page.locator("svg").count() == 4  # history, importance, and one for each key
    assert page.locator("svg").first.locator("text.point").count() == 13
    expect(page.get_by_role("cell", name="the loss of step 3 is nan")).to_be_visible()
    history = page.locator("svg.chart").first
    ends = [float(point.split(",")[0]) for point in str(history.locator("polyline").get_attribute("points")).split()]
    assert max(ends) < float(str(history.get_attribute("viewBox")).split()[2]), "the line ends inside of the chart"
    assert page.locator("b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    if folder := os.environ.get("CORDEE_PICTURES"):
        page.screenshot(path=Path(folder) / f"tuning-{theme}-{width}.png", full_page=True)
    page.context.close()


def ended(path: Path, strategy: str, seed: int, rate: float) -> Path:
    """A run that has ended, of so many steps a second."""
    with RunDirectory.create(path, 'name = "digits"\n') as run:
        emitted: list[events.AnyEvent] = [events.RunStarted(time=0.0, strategy=strategy, workers=2, start_step=0)]
        for step in range(1, 201):
            at, loss = 5.0 + step / rate, 2.3 * math.exp(-step / (60 + seed)) + 0.02
            emitted.append(events.Step(time=at, step=step, loss=loss, samples_per_second=64 * rate + step % 5))
            if step % 20 == 0:
                accuracy = 0.98 - 0.6 * math.exp(-step / (50 + 4 * seed))
                emitted.append(events.Evaluation(time=at, step=step, test_accuracy=accuracy, test_loss=loss + 0.05))
        run.events_file.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in emitted))
        known = {"samples_per_second": 64 * rate, "test_accuracy": 0.97, "test_loss": 0.1, "wall_seconds": 200 / rate}
        measured = {"step_seconds": 1 / rate, "predicted_step_seconds": 1.1 / rate, "peak_memory_bytes": 4 * 10**8}
        run.write_summary(Summary(status="completed", strategy=strategy, workers=2, steps=200, **known, **measured))
    return path


@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 1100), ("dark", 380)])
def test_the_report_of_a_comparison(browser: Browser, tmp_path: Path, theme: str, width: int) -> None:
    runs = [
        ended(tmp_path / f"{strategy}-seed{seed}", strategy, seed, rate + seed)
        for seed in (0, 1)
        for strategy, rate in (("single", 40.0), ("data_parallel", 60.0))
    ]
    report = tmp_path / "report.html"
    report.write_text(to_html(compare_runs(runs, groups=["single", "data_parallel"] * 2), "digits <b>2</b>"))
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme).new_page()  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(report.as_uri())
    expect(page.locator("li").first).to_contain_text("test accuracy: data_parallel, 1.")
    expect(page.get_by_role("row", name="data_parallel 2")).to_be_visible()  # over two seeds
    chart = page.locator("svg.chart[aria-label='Training loss']")
    assert chart.locator("polyline.curve").count() == 4
    chart.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("figure", has=chart).locator("output")).to_contain_text("single-seed0: ")
    page.keyboard.press("+")
    page.get_by_text("Training loss as a table").click()
    assert page.locator("b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    if folder := os.environ.get("CORDEE_PICTURES"):
        page.screenshot(path=Path(folder) / f"comparison-{theme}-{width}.png", full_page=True)
    assert problems == []
    page.context.close()


TUNE = (
    "tune JOB --search optimizer.lr=log:1e-4..1e-1 --search model.dropout=lin:0..0.5 --trials 12 "
    "--set training.epochs=3 --folder search/digits"
)
COMPARE = (
    "compare JOB --strategies single,data_parallel,local_sgd --set strategy.workers=2 "
    "--set training.epochs=15 -o comparison.html"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "report", "picture", "said", "height"),
    [
        (TUNE, "search/digits/report.html", "search.png", "Best: trial", 668),
        (COMPARE, "comparison.html", "comparison.png", "Fastest to", 845),
    ],
)
def test_the_report_of_real_runs(
    browser: Browser, tmp_path: Path, command: str, report: str, picture: str, said: str, height: int
) -> None:
    """With CORDEE_PICTURES also makes the pictures of the manual."""
    job = Path(__file__).parents[2] / "examples" / "digits.toml"
    arguments = [str(job) if word == "JOB" else word for word in command.split()]
    subprocess.run([sys.executable, "-m", "cordee", *arguments], cwd=tmp_path, check=True, timeout=500)
    page = browser.new_context(viewport={"width": 1100, "height": 900}).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / report).as_uri())
    expect(page.locator("li").first).to_contain_text(said)
    assert page.locator("svg.chart").count() >= 4
    if folder := os.environ.get("CORDEE_PICTURES"):
        clip = {"x": 0, "y": 0, "width": 1100, "height": height}
        page.screenshot(path=Path(folder) / picture, full_page=True, clip=clip)  # type: ignore[arg-type]
    assert problems == []
    page.context.close()
