"""The simulator against published measurements. Where its inputs come from is written in `scenario.py`."""

from __future__ import annotations

import pytest

from cordee.planner.simulator import PUBLISHED, read_scenario, simulate

POINTS = 0.10  # of efficiency

# Scenario -> workers -> scaling efficiency as measured.
SCALING = {
    "horovod-inception3": {128: 0.90, 512: 0.90},
    "horovod-resnet101": {128: 0.90, 512: 0.90},
    "horovod-vgg16": {128: 0.79, 512: 0.68},
}
# Maximal delay -> share of the time that workers idle, as measured.
IDLING = {0: 0.50, 16: 0.017}


@pytest.mark.parametrize("name", sorted(SCALING))
def test_scaling_efficiency_of_horovod(name: str) -> None:
    measured = SCALING[name]
    outcomes = simulate(read_scenario({**PUBLISHED[name], "workers": sorted(measured)}))
    for outcome in outcomes:
        assert outcome.efficiency == pytest.approx(measured[outcome.workers], abs=POINTS), outcome


def test_vgg_scales_worse_than_the_others_as_measured() -> None:
    at_512 = {name: simulate(read_scenario({**PUBLISHED[name], "workers": 512}))[0].efficiency for name in SCALING}
    assert at_512["horovod-vgg16"] < min(at_512["horovod-inception3"], at_512["horovod-resnet101"]) - 0.1


def test_idle_time_falls_with_staleness_as_in_the_parameter_server_paper() -> None:
    idle = {}
    for staleness in (0, 1, 2, 4, 8, 16):
        table = {**PUBLISHED["parameter-server"], "workers": 800, "staleness": staleness}
        idle[staleness] = simulate(read_scenario(table))[0].idle_share
    for staleness, share in IDLING.items():
        assert idle[staleness] == pytest.approx(share, abs=POINTS)
    assert list(idle.values()) == sorted(idle.values(), reverse=True)
    assert idle[4] < idle[0] / 5  # most of the gain comes early
