"""The simulator against sums done by hand, formulas of textbooks, and bad scenarios."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cordee.core.errors import JobError, MissingExtraError
from cordee.planner.simulate import charts_of, draw_page, draw_picture
from cordee.planner.simulator import ClusterOutcome, Scenario, load_scenario, read_scenario, simulate
from cordee.planner.simulator.cluster import effective_share

BASE: dict[str, Any] = {
    "workers": 4,
    "step": 1.0,
    "gradients": "100 MB",
    "bandwidth": "1 GB/s",
    "latency": 0.0,
    "steps": 20,
    "checkpoint_time": "0s",
}


def one(**changes: Any) -> ClusterOutcome:
    return simulate(read_scenario({**BASE, **changes}))[0]


def test_one_worker_loses_nothing() -> None:
    alone = one(workers=1)
    assert (alone.efficiency, alone.idle_share, alone.sent_bytes) == (1.0, 0.0, 0.0)


def test_a_ring_without_overlap_adds_the_textbook_time() -> None:
    found = one(overlap=False)
    assert found.step_s == pytest.approx(1.0 + 2 * 3 / 4 * 0.1)
    assert found.sent_bytes == pytest.approx(2 * 3 / 4 * 100e6)
    assert found.exchange_share == pytest.approx(0.15 / 1.15)


def test_overlap_leaves_only_the_last_layers() -> None:
    found = one(layers=10)
    # The link is free before each next layer is ready, so only the last one's exchange is seen.
    assert found.step_s == pytest.approx(1.0 + 0.15 / 10)
    late = one(layers=10, order=[[1.0, 1.0]], backward=0.0)
    assert late.step_s == pytest.approx(1.15)


def test_traffic_of_servers_is_that_of_the_formula() -> None:
    # In and out: four workers' 100 MB through one link of 1 GB/s each way, one after the other.
    few = one(strategy="parameter_server", servers=1)
    many = one(strategy="parameter_server", servers=4)
    assert few.sent_bytes == many.sent_bytes == 100e6
    assert few.step_s > many.step_s
    # With as many servers as workers all push at once: a quarter of the bytes each, and back.
    alone = one(strategy="parameter_server", servers=4, workers=2)
    assert alone.exchange_share == pytest.approx(0.2 / 1.2, rel=0.1)


def test_staleness_bounds_how_far_workers_are_apart() -> None:
    for bound in (0, 2, 5):
        found = one(strategy="parameter_server", staleness=bound, spread=0.5, workers=16, steps=60)
        assert found.apart_most <= bound + 1
    free = one(strategy="parameter_server", staleness="unbounded", spread=0.5, workers=16, steps=60)
    assert free.apart_most > 6 and free.idle_share == 0.0
    assert one(strategy="parameter_server").behind_mean == 0.0


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert one(spread=0.3, seed=1) == one(spread=0.3, seed=1) != one(spread=0.3, seed=2)


def expected_share(scenario: Scenario, workers: int) -> float:
    """Return the same in closed form, after J. T. Daly (2006), "A higher order estimate of the optimum checkpoint
    interval": each round succeeds with probability exp(-round / mtbf), and starting again costs exp(restart / mtbf).
    """
    every_s, saving_s = scenario.checkpoint_every_s, scenario.checkpoint_time_s
    if not scenario.mtbf_s:
        return every_s / (every_s + saving_s)
    mean_s = scenario.mtbf_s / workers
    return every_s / (mean_s * math.exp(scenario.restart_s / mean_s) * math.expm1((every_s + saving_s) / mean_s))


@pytest.mark.parametrize(("workers", "mtbf"), [(64, "20d"), (1024, "20d"), (1024, "5d")])
def test_losses_by_failures_are_those_of_dalys_formula(workers: int, mtbf: str) -> None:
    scenario = read_scenario(
        {**BASE, "mtbf": mtbf, "restart": "2m", "checkpoint_every": "10m", "checkpoint_time": "10s"}
    )
    assert effective_share(scenario, workers) == pytest.approx(expected_share(scenario, workers), abs=0.02)


def test_thousands_of_workers() -> None:
    found = one(workers=4096, spread=0.1)
    assert 0.5 < found.efficiency < 1.0
    assert found.idle_share > 0.1


def test_the_page_has_everything_in_it() -> None:
    scenario = read_scenario({**BASE, "workers": [1, 8, 64], "name": "<b>", "mtbf": "10d"})
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    page = draw_page(scenario, simulate(scenario))
    assert page.count("<svg") == 2 and "<h1>&lt;b&gt;</h1>" in page
    assert (
        "training kept" in page and ">workers<" in page and ">times as fast as 1 worker<" in page and "src=" not in page
    )
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))  # parts of the page itself
    assert page == draw_page(scenario, simulate(scenario))


def test_workers_that_fail_all_the_time_are_drawn_as_well() -> None:
    scenario = read_scenario({**BASE, "workers": [1000, 100, 1], "mtbf": "10h"})
    outcomes = simulate(scenario)
    assert [outcome.throughput > 0 for outcome in outcomes] == [False, True, True]
    assert charts_of(scenario, outcomes)[1].height_means == "times as fast as 1 worker"
    hopeless = read_scenario({**BASE, "mtbf": "1s"})
    assert len(charts_of(hopeless, simulate(hopeless))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrokers": 4}, "a scenario has no key 'wrokers'; did you mean 'workers'"),
        ({"workers": []}, r"workers = \[\] names no number of workers"),
        ({"workers": [0]}, "0 must be from 1 to 100,000"),
        ({"staleness": 3}, "staleness and servers belong to strategy = 'parameter_server'"),
        ({"strategy": "parameter_server", "staleness": -1}, "staleness = -1 must be at least 0"),
        ({"strategy": "allreduce"}, "did you mean 'all_reduce'"),
        ({"step": "fast"}, "step = 'fast' is not a length of time"),
        ({"gradients": "many"}, "gradients = 'many' is not an amount"),
        ({"spread": 2.5}, "spread = 2.5 must be at least 0 and below 2"),
        ({"order": [[0.5, 0.5]]}, "the last share of the bytes must be 1.0"),
        ({"order": [[0.5, 0.9], [0.4, 1.0]]}, "shares must be from 0 to 1 and grow"),
        ({"step": math.inf}, "step = inf must be a length of time"),
        ({"mtbf": -5}, "mtbf = -5.0 must be a length of time"),
        ({"restart": math.nan}, "restart = nan must be a length of time"),
        ({"latency": "1e999us"}, "latency = '1e999us' is more than can be computed with"),
        ({"steps": 10**9}, "steps = 1000000000 of 4 workers are more than 20,000,000 in all: set steps to at most"),
        ({"layers": 10**9}, "layers = 1000000000 must be at most 10,000"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"checkpoint_every": "0s"}, "checkpoint_every must be longer than nothing"),
    ],
)
def test_bad_scenarios(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_scenario({**BASE, **changes})


def test_scenario_files(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    with pytest.raises(JobError, match="no scenario file"):
        load_scenario(file)
    file.write_text('workers = [2, 4]\nstep = "100ms"\n')
    with pytest.raises(JobError, match="the scenario has no 'gradients'"):
        load_scenario(file)
    scenario = load_scenario(file, ["gradients=4 MB", "spread=0"])
    assert (scenario.name, scenario.step_s, scenario.gradient_bytes) == ("lab", 0.1, 4e6)


def test_the_picture_has_both_charts() -> None:
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    from PIL import Image

    scenario = read_scenario({**BASE, "workers": [1, 8, 64], "name": "Große Seilschaft 大 $x_{1", "mtbf": "10d"})
    with Image.open(io.BytesIO(draw_picture(scenario, simulate(scenario)))) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert image.size == (1440, 1580)
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)} <= colours  # a line each


def test_charts_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    scenario = read_scenario(BASE)
    for draw in (draw_picture, draw_page):
        with pytest.raises(MissingExtraError, match=r"a chart needs optional packages: pip install 'cordee\[report\]'"):
            draw(scenario, simulate(scenario))
