"""What a server learns: who is drawn, when privacy ends the run, and that a checkpoint has everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import CheckpointError, JobError
from cordee.monitoring import Monitor
from cordee.runs.federation.learning import FederationLearning
from cordee.runs.federation.messages import Result
from cordee.runs.federation.store import RoundRecord
from cordee.strategies.federated.sampling import draw_clients
from cordee.training.components import assemble

PRIVACY = {"clip_norm": 1.0, "noise": 1.0}


def learn(folder: Path, num_clients: int = 3, **settings: object) -> FederationLearning:
    sections = {name: settings.pop(name) for name in ("evaluation", "stop") if name in settings}
    job = Job.from_dict(
        {
            "model": {"use": "mlp", "hidden": [4]},
            "data": "iris",
            "optimizer": {"use": "sgd", "lr": 0.1},
            "training": {"threads": 1},
            "strategy": {"name": "federated", "rounds": 10, **settings},
            **sections,
        }
    )
    parts = assemble(job, Team())
    return FederationLearning(
        parts, folder / "checkpoints", Monitor([]), run="r", noise_seed=5, num_clients=num_clients
    )


def finish_round(learning: FederationLearning, names: tuple[str, ...]) -> None:
    """Make a round in which each client sends its own constant."""
    record = RoundRecord(round=learning.num_rounds, attempt=0, asked=names, started=0.0)
    one = learning.open_round(record)
    own = learning.sent().own
    for number, name in enumerate(names):
        update = torch.full_like(learning.sent().parameters, 0.01 * (number + 1))
        sent = Result(one.task(), num_samples=5, num_steps=1, num_payload=1, summed=tuple(own))
        arrays = [update, torch.zeros(0, dtype=torch.float64), *(torch.ones_like(v) for v in own.values())]
        assert one.take(name, sent, arrays)
    one.end_stage()
    learning.finish(one, *one.result(), [])


def test_a_round_waits_for_as_many_clients_as_it_asks(tmp_path: Path) -> None:
    learning = learn(tmp_path, clients_per_round=3)
    asked, waits = learning.draw(["a", "b"], ["a", "b"], 1)
    assert not asked and waits == "waiting for clients: 2 of 3 are here, strategy.clients_per_round = 3"
    asked, waits = learning.draw(["a", "b", "c", "d"], ["a", "b", "c", "d"], 1)
    assert len(asked) == 3 and not waits
    assert learning.draw(["a", "b", "c", "d"], ["a", "b", "c", "d"], 1)[0] == asked  # the same round, the same clients


def test_privacy_draws_from_all_clients_and_takes_no_more(tmp_path: Path) -> None:
    learning = learn(tmp_path, num_clients=4, clients_per_round=2, privacy=PRIVACY)
    assert learning.draw(["a", "b"], ["a", "b"], 1)[1] == "waiting for clients: 2 of 4 have joined"
    drawn = set(learning.draw(["a", "b"], ["a", "b", "c", "d"], 1)[0])  # whoever is not there drops out
    assert len(drawn) == 2 and drawn <= {"a", "b", "c", "d"}
    assert learning.refuses_new(3) == ""
    assert "counts 4 clients" in learning.refuses_new(4)


def test_privacy_ends_the_run_before_its_limit_is_passed(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="passed by the first round"):
        learn(tmp_path, privacy={**PRIVACY, "max_epsilon": 1.0})
    learning = learn(tmp_path, privacy={**PRIVACY, "max_epsilon": 7.0})
    spent = []
    while learning.end_reason() is None:
        finish_round(learning, ("a", "b", "c"))
        assert learning.epsilon is not None
        spent.append(learning.epsilon)
    assert learning.end_reason() == "epsilon" and len(spent) < 10
    assert spent == sorted(spent) and spent[-1] <= 7.0


@pytest.mark.parametrize("settings", [{}, {"algorithm": "scaffold"}, {"algorithm": "fedadam"}, {"privacy": PRIVACY}])
def test_a_loaded_server_continues_with_the_same_bits(tmp_path: Path, settings: dict[str, object]) -> None:
    whole = learn(tmp_path / "whole", **settings)
    for _ in range(3):
        finish_round(whole, ("a", "b", "c"))
    first = learn(tmp_path / "cut", **settings)
    for _ in range(2):
        finish_round(first, ("a", "b", "c"))
    second = learn(tmp_path / "cut", **settings)
    last = second.load()
    assert last is not None and last.round == 2
    finish_round(second, ("a", "b", "c"))
    assert second.weights_sha256 == whole.weights_sha256 and second.epsilon == whole.epsilon
    assert all(torch.equal(v, whole.sent().own[name]) for name, v in second.sent().own.items())
    assert second.counted("a") == 2 and second.counted("stranger") == -1


def test_a_client_without_its_state_is_refused(tmp_path: Path) -> None:
    learning = learn(tmp_path, algorithm="scaffold")
    finish_round(learning, ("a", "b", "c"))
    assert learning.check_state("a", 0) == ""
    assert "no state of round 1" in learning.check_state("a", -1)
    assert learning.check_state("d", -1) == ""


def test_a_simulation_cannot_continue_a_federation(tmp_path: Path) -> None:
    learning = learn(tmp_path)
    finish_round(learning, ("a", "b", "c"))
    from cordee import checkpoint

    loaded = checkpoint.load_newest(tmp_path / "checkpoints")
    assert loaded is not None and "server" not in loaded.state.part("federated").values
    state = checkpoint.State(loaded.state.part("model").tensors, {"progress": loaded.state.values["progress"]})
    checkpoint.save(tmp_path / "checkpoints", 9, checkpoint.State.join(model=state), keep=3)
    with pytest.raises(CheckpointError, match="not that of a federation"):
        learning.load()


def test_whoever_knows_the_job_does_not_know_whom_privacy_draws(tmp_path: Path) -> None:
    names = [f"site-{number}" for number in range(40)]
    private = {"privacy": PRIVACY, "sampling": "poisson", "fraction": 0.5}
    learning = learn(tmp_path, 40, **private)
    guessed = draw_clients(learning.settings, 40, learning.parts.job.seed, 0)
    assert learning.draw(names, names, 1)[0] != [names[number] for number in guessed]


def test_a_private_round_that_draws_nobody_is_made(tmp_path: Path) -> None:
    learning = learn(tmp_path, privacy=PRIVACY, sampling="poisson", fraction=0.01)
    before = learning.sent().parameters.clone()
    record = RoundRecord(round=0, attempt=0, asked=(), started=0.0)
    one = learning.open_round(record)
    assert not one.missing and one.end_stage()
    learning.finish(one, *one.result(), [])
    assert learning.num_rounds == 1 and learning.epsilon is not None
    assert not torch.equal(learning.sent().parameters, before), "noise is added all the same"


@pytest.mark.parametrize(
    ("every", "stop", "measured"),
    [
        ({"every_epochs": 3, "every_steps": 2}, {}, [2, 3, 4, 6]),
        ({"every_epochs": 0}, {"steps": 4}, [4]),
    ],
)
def test_rounds_are_measured_when_the_job_says_so_and_at_the_end(
    tmp_path: Path, every: dict[str, int], stop: dict[str, int], measured: list[int]
) -> None:
    learning = learn(tmp_path, evaluation=every, stop=stop)
    found = []
    for number in range(1, 7):
        finish_round(learning, ("a", "b"))
        if learning.progress.evaluated_at == number:
            found.append(number)
        if learning.end_reason() is not None:
            break
    assert found == measured


def test_a_server_that_was_killed_when_its_last_round_was_saved_ends(tmp_path: Path) -> None:
    stop = {"loss": 100.0}
    finish_round(learn(tmp_path, stop=stop), ("a", "b"))
    again = learn(tmp_path, stop=stop)
    again.load()
    assert again.end_reason() == "loss"
