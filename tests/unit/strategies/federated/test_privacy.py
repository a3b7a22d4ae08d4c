"""What ε relies on: keys that nobody finds, norms that are kept, and nothing that is sent beside."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_rounds import SIZES, Simulation

from cordee.core.errors import CheckpointError, JobError
from cordee.runs.federation.rounds import plan_secure
from cordee.strategies.federated.algorithms import Finished, LocalTraining
from cordee.strategies.federated.keyed import normals, uniforms
from cordee.strategies.federated.sampling import draw_clients
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.settings import FederatedSettings, SecureSettings

PRIVACY: dict[str, Any] = {"clip_norm": 1.0, "noise": 1.0}


def test_numbers_follow_from_all_bits_of_the_key() -> None:
    for high in (32, 63, 100):  # torch's generator drops all of them
        assert not np.array_equal(normals(8, 5, "a"), normals(8, 5 + 2**high, "a"))
    assert np.array_equal(normals(7, 5, "a"), normals(7, 5, "a"))
    assert not np.array_equal(normals(7, 5, "a"), normals(7, 5, "b"))


def test_numbers_have_their_distribution() -> None:
    count = 600_001  # several chunks
    even, normal = uniforms(count, 3), normals(count, 3)
    assert len(even) == len(normal) == count
    assert even.min() >= 0 and even.max() < 1
    assert abs(even.mean() - 0.5) < 0.002 and abs(even.var() - 1 / 12) < 0.002
    assert abs(normal.mean()) < 0.006 and abs(normal.var() - 1) < 0.01
    assert abs(np.mean(np.abs(normal) > 1.959964) - 0.05) < 0.0015
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 0.006


def test_who_is_drawn_follows_from_all_bits_of_the_key() -> None:
    poisson = FederatedSettings(sampling="poisson", fraction=0.3)
    assert draw_clients(poisson, 200, 5, 0) != draw_clients(poisson, 200, 5 + 2**40, 0)
    sizes = [len(draw_clients(poisson, 200, 1, number)) for number in range(200)]
    assert abs(sum(sizes) / 200 - 60) < 1.5 and 4 < float(np.std(sizes)) < 9  # 60 ± 6.5
    fixed = FederatedSettings(clients_per_round=3)
    drawn = [tuple(draw_clients(fixed, 5, 1, number)) for number in range(400)]
    assert all(len(set(one)) == 3 for one in drawn)
    assert all(abs(sum(client in one for one in drawn) / 400 - 0.6) < 0.1 for client in range(5))


@pytest.mark.parametrize("algorithm", ["fednova", "scaffold"])
@pytest.mark.parametrize("part", [{"privacy": PRIVACY}, {"robust": "median"}], ids=["privacy", "robust"])
def test_algorithms_that_send_more_than_a_difference_are_refused(algorithm: str, part: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="sends more than a difference"):
        Simulation(algorithm=algorithm, **part)


def test_an_algorithm_of_ones_own_cannot_send_more_than_a_difference() -> None:
    simulation = Simulation(privacy=PRIVACY)

    def finish(local: LocalTraining) -> Finished:
        return Finished(local.here - local.start, {"gradient": local.gradient.clone()}, {})

    simulation.trainer._algorithm = replace(simulation.algorithm, finish=finish)
    with pytest.raises(JobError, match="sends more than a difference"):
        simulation.train(0)


def test_noise_of_a_client_is_another_for_other_parameters() -> None:
    simulation = Simulation(privacy={**PRIVACY, "clip_norm": 1e-9, "noise": 1e9, "where": "local"})
    first, again = simulation.train(0).payload[0], simulation.train(0).payload[0]
    assert torch.equal(first, again)  # asked again, a client tells nothing new
    simulation.server.parameters.mul_(1.0001)
    assert float((simulation.train(0).payload[0] - first).norm()) > 1.0


def test_epsilon_of_other_settings_does_not_continue() -> None:
    simulation = Simulation(privacy=PRIVACY)
    simulation.round([0, 1, 2, 3])
    saved, parameters = simulation.server.state_dict(), simulation.server.parameters.clone()
    buffers = simulation.server.buffers
    changed: list[dict[str, Any]] = [{"privacy": {**PRIVACY, "noise": 4.0}}, {"privacy": PRIVACY, "fraction": 0.5}, {}]
    for settings in changed:
        with pytest.raises(CheckpointError, match="would be wrong"):
            Simulation(**settings).server.load_state_dict(saved, parameters, buffers)
    allowed = Simulation(privacy={**PRIVACY, "max_epsilon": 50.0, "delta": 1e-6})
    allowed.server.load_state_dict(saved, parameters, buffers)
    assert allowed.server.num_rounds == 1


@pytest.mark.parametrize("bits", [12, 20])
def test_rounding_does_not_lengthen_what_is_summed_beyond_the_clip_norm(bits: int) -> None:
    settings = FederatedSettings(secure=True, privacy=PRIVACY)
    plan = plan_secure(settings, SecureSettings(bits=bits, range=1.0), 5000, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        update = torch.randn(5000, generator=generator)
        update *= 1.0 / float(update.norm())
        sent = plan.fixed.decode(plan.encode(update, 1.0, "a")[:-1])
        assert 0.9 < math.sqrt(float((sent**2).sum())) <= 1.0
    with pytest.raises(JobError, match="set more bits"):
        plan_secure(settings, SecureSettings(bits=8, range=4.0), 50_000, 4)


def test_noise_of_clients_is_not_scaled_away_in_a_secure_round() -> None:
    settings = FederatedSettings(secure=True, privacy={**PRIVACY, "where": "local"})
    plan = plan_secure(settings, SecureSettings(range=8.0), 5000, 4)
    update = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    sent = torch.from_numpy(plan.fixed.decode(plan.encode(update, 1.0, "a")[:-1]))
    assert torch.allclose(sent, update.double(), rtol=0, atol=plan.fixed.step)


def test_sampling_that_may_draw_nobody_is_not_secure() -> None:
    with pytest.raises(JobError, match="may draw one client or none"):
        Simulation(secure=True, sampling="poisson", fraction=0.5, weights="equal")


def test_a_deadline_that_nobody_keeps_is_refused() -> None:
    simulation = Simulation(algorithm="fedbuff", clients_per_round=2, deadline=0.001)
    schedule = Schedule(simulation.settings, simulation.algorithm, 0, SIZES, 8)
    with pytest.raises(JobError, match=r"over before any client is done: the fastest takes 0\.007 s"):
        schedule.check()


def test_the_virtual_clock_counts_the_steps_that_are_taken() -> None:
    settings = Simulation(local_steps=4).settings  # of 20 samples in batches of 8: 8 + 8 + 4, and 8 again
    schedule = Schedule(settings, Simulation().algorithm, 0, SIZES, 8)
    assert math.isclose(schedule.duration_s(1), 0.028)
