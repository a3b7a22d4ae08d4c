"""The pages that need no server, in a real browser: the report of a search. Run by `make test-dashboard`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect, sync_playwright

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
    assert page.locator("b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    if folder := os.environ.get("CORDEE_PICTURES"):
        page.screenshot(path=Path(folder) / f"tuning-{theme}-{width}.png", full_page=True)
    page.context.close()
