"""How fast the dashboard shows a run of many events, in a real browser: first paint, zoom, and the server's memory.

.venv/bin/python benchmarks/dashboard_events.py [--events 500000] [-o FILE]      needs chromium and playwright
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
from playwright.sync_api import expect, sync_playwright

from cordee.monitoring import RunDirectory, events

ROUNDS = 3


def write_run(folder: Path, num_events: int) -> None:
    with RunDirectory.create(folder, 'name = "many"\n') as directory, directory.events_file.open("wb") as file:
        start = events.RunStarted(time=1000.0, strategy="single", workers=1, start_step=0, total_steps=num_events)
        file.write(msgspec.json.encode(start) + b"\n")
        for step in range(1, num_events):
            at = 1000.0 + step / 50
            event: events.AnyEvent = events.Step(
                time=at, member="worker 0", step=step, epoch=1 + step // 10_000, loss=2.0 / step**0.2, accuracy=0.5,
                lr=0.001, samples=64 * step, samples_per_second=3000.0 + step % 97,
            )  # fmt: skip
            if step % 1000 == 0:
                event = events.Evaluation(time=at, step=step, test_loss=1.0 / step, test_accuracy=1 - step**-0.3)
            file.write(msgspec.json.encode(event) + b"\n")


def measure(runs: Path) -> dict[str, float]:
    """Return the figures of one start of the server and one visit of a browser."""
    command = [sys.executable, "-m", "cordee", "dashboard", "many", "--until-closed", "--runs", str(runs)]
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=runs.parent,
            env={"CORDEE_RUNS": str(runs), "PATH": "/usr/bin:/bin"},
        ) as server,  # fmt: skip
        sync_playwright() as playwright,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        begun = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("polyline.curve")
        first_paint_s = time.perf_counter() - begun
        # Not wait_for_function, which evaluates text in the page: the policy of the page forbids that.
        expect(page.locator(".diagnosis")).not_to_contain_text("Reading the events", timeout=120_000)
        whole_s = time.perf_counter() - begun
        zooms = []
        chart = page.locator("svg.chart[aria-label='Training loss']")
        chart.focus()
        for key in ("+", "+", "+", "Escape"):
            begun = time.perf_counter()
            with page.expect_response("**/series*"):
                page.keyboard.press(key)
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            zooms.append(time.perf_counter() - begun)
            page.wait_for_timeout(200)
        memory_mb = psutil.Process(server.pid).memory_info().rss / 1e6
        browser.close()
        server.stdin.close()
    return {"first_paint_s": first_paint_s, "whole_s": whole_s, "slowest_zoom_s": max(zooms), "server_mb": memory_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        write_run(runs / "many", asked.events)
        rounds = [measure(runs) for _ in range(ROUNDS)]
    middle = {key: sorted(each[key] for each in rounds)[ROUNDS // 2] for key in rounds[0]}
    found = {"events": asked.events, "median": middle, "rounds": rounds}
    print(json.dumps(found, indent=1))
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
