"""Rounds of federated learning against their formulas, in double precision. No processes: the parts that all share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.data import ArraySource
from cordee.strategies.federated.aggregation import SumTree, check_update, contribute
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import ClientTrainer, Update
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.partition import Partition
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.server import FederatedServer
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import assemble


class Net(nn.Module):
    """Double precision, so that only formulas differ."""

    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()
        self.head = nn.Linear(8, num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.double()))


class Spare(Net):
    """Has a layer that no sample passes through."""

    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.spare = nn.Linear(3, 3).double()


SIZES = (7, 20, 33, 30)


class Jittered(Dataset[tuple[Tensor, int]]):
    """Draws noise for each sample that is read, as random transforms of images do."""

    num_classes = 3

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.cat([torch.tensor([float(index)]), torch.rand(5)]), index % 3


class Simulation:
    """The rounds of a job in this process."""

    def __init__(self, **strategy: Any) -> None:
        optimizer = strategy.pop("optimizer", {"use": "sgd", "lr": 0.1})
        batch_size = strategy.pop("batch_size", sum(SIZES))
        loss = strategy.pop("loss", {"use": "cross_entropy"})
        schedule = strategy.pop("schedule", {"use": "constant"})
        model = strategy.pop("model", Net)
        synthetic = {"use": "synthetic", "shape": [6], "size": sum(SIZES), "test_size": 16, "num_classes": 3}
        self.job = Job.from_dict(
            {
                "model": {"use": model},
                "data": strategy.pop("data", synthetic),
                "loss": loss,
                "optimizer": optimizer,
                "schedule": schedule,
                "training": {"batch_size": batch_size, "threads": 1},
                "strategy": {"name": "federated", "partition": {"clients": len(SIZES)}, **strategy},
            }
        )
        self.components = assemble(self.job, Team())
        self.settings = settings_of(self.job)
        self.algorithm = make_algorithm(self.settings.use)
        self.flat = FlatModel(self.components.model, self.settings.is_personal)
        starts = torch.tensor([0, *SIZES]).cumsum(0)
        self.partition = Partition(torch.arange(sum(SIZES)), starts)
        self.trainer = ClientTrainer(
            self.job, self.settings, self.algorithm, self.flat, self.components.computation, self.components.recipe
        )
        self.codec = self.settings.parts.compress.feedback(self.flat.shapes, self.flat.values.dtype).codec
        self.server = FederatedServer(
            self.settings,
            self.algorithm,
            self.flat.shared,
            self.flat.read_buffers(),
            num_clients=len(SIZES),
            noise_key=self.job.seed,
        )
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.updates: dict[int, Update] = {}

    def train(self, client: int) -> Update:
        samples = self.partition.of(client)
        source = self.components.splits.train
        update = self.trainer.train(self.server.sent(), self.kept.get(client, {}), source, samples, client=str(client))
        self.kept[client] = update.state
        self.updates[client] = update
        return update

    def round(self, clients: list[int]) -> Tensor:
        tree = SumTree(len(clients))
        for place, client in enumerate(clients):
            update = self.train(client)
            difference = self.codec.decode(update.payload).clone()
            tree.take(place, contribute(self.settings, update, difference)[0])
        self.server.finish_round(tree.result())
        return self.server.parameters.clone()


def centralised(num_steps: int, lr: float = 0.1) -> Tensor:
    """Full-batch SGD on everybody's samples, in plain torch."""
    simulation = Simulation()
    model, batch = simulation.components.model, simulation.components.splits.train.gather(torch.arange(sum(SIZES)))
    for _ in range(num_steps):
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_one_full_batch_step_of_unequal_clients_is_centralised_sgd() -> None:
    simulation = Simulation()
    for _ in range(5):
        found = simulation.round([0, 1, 2, 3])
    assert (found - centralised(5)).abs().max() <= 1e-12


def test_random_transforms_draw_anew_in_each_epoch_and_round() -> None:
    simulation = Simulation(data={"use": Jittered()}, local_epochs=2, batch_size=4)
    source, samples = simulation.components.splits.train, simulation.partition.of(0)

    def drawn(number: int) -> list[Tensor]:
        """Return the noise of sample 3 in each of the epochs of a round."""
        batches = simulation.trainer._batches(source, samples, (0, "client", "0", "round", number))
        rows = torch.cat([batch.inputs for batch in batches])
        return list(rows[rows[:, 0] == 3][:, 1:])

    first, again, second = drawn(0), drawn(0), drawn(1)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert len({tuple(row.tolist()) for row in [*first, *second]}) == 4


@pytest.mark.parametrize(
    ("algorithm", "name"), [("fedavg", "sgd"), ("fedavg", "adamw"), ("fedprox", "adamw"), ("scaffold", "sgd")]
)
def test_parameters_without_a_gradient_are_left_alone_as_in_plain_training(algorithm: str, name: str) -> None:
    """Weight decay would change them."""
    optimizer = {"use": name, "lr": 0.1, "weight_decay": 0.5}
    simulation = Simulation(model=Spare, algorithm=algorithm, optimizer=optimizer, local_steps=3)
    before = {name: value.clone() for name, value in simulation.components.model.state_dict().items()}
    simulation.train(1)
    after = simulation.components.model.state_dict()
    assert {name.partition(".")[0] for name in before if torch.equal(before[name], after[name])} == {"spare"}
    assert not torch.equal(before["body.0.weight"], after["body.0.weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(momentum: float) -> None:
    optimizer = {"use": "sgd", "lr": 0.1, "momentum": momentum}
    results = []
    for algorithm in ("fedavg", "fednova"):
        simulation = Simulation(algorithm=algorithm, local_steps=4, batch_size=5, optimizer=optimizer)
        for _ in range(3):
            found = simulation.round([0, 1, 2, 3])
        results.append(found)
    assert (results[0] - results[1]).abs().max() <= 1e-12
    unequal = [Simulation(algorithm=name, local_epochs=1, batch_size=5).round([0, 2]) for name in ("fedavg", "fednova")]
    assert (unequal[0] - unequal[1]).abs().max() > 1e-4, "with unequal steps they are two algorithms"


def test_scaffold_keeps_c_the_mean_of_all_c_i() -> None:
    simulation = Simulation(algorithm="scaffold", batch_size=5, clients_per_round=2)
    for clients in ([0, 1], [2, 3], [1, 3], [0, 3]):
        simulation.round(clients)
        own = [simulation.kept.get(client, {}).get("control") for client in range(len(SIZES))]
        mean = sum((vector for vector in own if vector is not None), torch.zeros_like(simulation.server.parameters))
        assert (simulation.server.own["control"] - mean / len(SIZES)).abs().max() <= 1e-12
    assert simulation.server.own["control"].abs().max() > 1e-3


def test_fedprox_adds_the_gradient_of_its_term() -> None:
    plain, pulled = (Simulation(algorithm=a, local_steps=2) for a in ("fedavg", {"use": "fedprox", "mu": 0.5}))
    first = plain.train(0).payload[0]
    assert torch.equal(Simulation(algorithm={"use": "fedprox", "mu": 0.0}, local_steps=2).train(0).payload[0], first)
    one_step = Simulation(local_steps=1).train(0).payload[0]
    # The first step is the same; the second is shorter by lr · mu · (what the first moved).
    assert (pulled.train(0).payload[0] - (first - 0.1 * 0.5 * one_step)).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_servers_follow_their_formulas(name: str) -> None:
    simulation, reference = Simulation(algorithm=name), Simulation()
    here = simulation.server.parameters.clone()
    first, second = torch.zeros_like(here), torch.full_like(here, 1e-6)
    beta1 = 0.0 if name == "fedadagrad" else 0.9
    for _ in range(3):
        reference.server._outer.set_start({"shared": here})
        mean = reference.round([0, 1, 2, 3]) - here
        first = beta1 * first + (1 - beta1) * mean
        square = mean**2
        second = {
            "fedadam": 0.99 * second + 0.01 * square,
            "fedyogi": second - 0.01 * square * torch.sign(second - square),
            "fedadagrad": second + square,
        }[name]
        here = here + 0.1 * first / (second.sqrt() + 1e-3)
        reference.server.num_rounds = simulation.server.num_rounds + 1  # the same streams in the next round
        assert (simulation.round([0, 1, 2, 3]) - here).abs().max() <= 1e-12


@pytest.mark.parametrize("compress", ["int8", {"use": "topk", "share": 0.1}])
def test_what_is_sent_and_what_is_left_is_what_was_meant(compress: Any) -> None:
    simulation = Simulation(compress=compress, batch_size=5)
    meant = torch.zeros_like(simulation.server.parameters)
    sent = torch.zeros_like(meant)
    for _ in range(4):
        plain = Simulation(batch_size=5)
        plain.server._outer.set_start({"shared": simulation.server.parameters})
        plain.server.num_rounds = simulation.server.num_rounds
        meant += plain.train(2).payload[0]
        sent += simulation.codec.decode(simulation.train(2).payload)
        assert (sent + simulation.kept[2]["residual"] - meant).abs().max() <= 1e-12
        simulation.server.num_rounds += 1
    assert simulation.kept[2]["residual"].abs().max() > 0


def test_the_order_of_arrival_changes_no_bit() -> None:
    simulation = Simulation(batch_size=5)
    parts = [simulation.train(client % 4) for client in range(21)]
    results = []
    for order in (list(range(21)), list(reversed(range(21))), torch.randperm(21).tolist()):
        tree = SumTree(21)
        for place in order:
            dropped = place in (3, 17)
            difference = parts[place].payload[0].clone()
            tree.take(place, None if dropped else contribute(simulation.settings, parts[place], difference)[0])
            assert tree.num_held <= 12 or order != list(range(21))
        total = tree.result()
        assert total is not None and total.num_clients == 19
        results.append(total.difference)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_personal_layers_stay_with_the_client() -> None:
    simulation = Simulation(personal=["head.*"], local_steps=2)
    before = simulation.flat.personal.clone()
    shared = simulation.round([0, 1])
    assert shared.numel() == 6 * 8 + 8
    assert not torch.equal(simulation.kept[0]["personal"], simulation.kept[1]["personal"])
    third = Simulation(personal=["head.*"], local_steps=2)
    assert torch.equal(third.flat.personal, before)
    simulation.train(0)
    assert not torch.equal(simulation.kept[0]["personal"], before)


def test_a_client_trains_the_same_after_any_other() -> None:
    one, other = Simulation(batch_size=5), Simulation(batch_size=5)
    other.train(2)
    assert torch.equal(one.train(1).payload[0], other.train(1).payload[0])


@pytest.mark.parametrize("per", [{}, {"per": "epoch"}, {"per": "step"}])
def test_schedulers_of_torch_count_rounds(per: dict[str, str]) -> None:
    simulation = Simulation(batch_size=5, rounds=6, schedule={"use": "StepLR", "step_size": 2, "gamma": 0.5, **per})
    optimizer, recipe = simulation.trainer._optimizer, simulation.components.recipe
    assert [recipe.set_rate(optimizer, number) for number in range(6)] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]


def test_a_batch_without_a_label_that_counts_is_no_step() -> None:
    optimizer = {"use": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    loss = {"use": "cross_entropy", "ignore_index": 2}
    simulation = Simulation(batch_size=5, optimizer=optimizer, loss=loss)
    source = ArraySource(torch.randn(12, 6), torch.full((12,), 2))
    update = simulation.trainer.train(simulation.server.sent(), {}, source, torch.arange(12), client="0")
    assert update.num_steps == 0 and update.num_trained == 12 and not update.payload[0].any()


def test_buffers_that_are_not_finite_are_taken_as_they_were_sent() -> None:
    """Masks of infinities are buffers of many models; a client that makes others is refused."""
    simulation = Simulation()
    update = simulation.train(0)
    mask = torch.tensor([0.0, float("-inf")], dtype=torch.float64)
    difference, like = update.payload[0], simulation.server.parameters
    check_update(replace(update, buffers=mask), difference, like, mask.clone(), "0")
    for wrong in (mask.flip(0), mask.neg(), mask * float("nan")):
        with pytest.raises(Exception, match="not finite"):
            check_update(replace(update, buffers=wrong), difference, like, mask.clone(), "0")


def test_wrong_updates_are_refused(tmp_path: Path) -> None:
    simulation = Simulation()
    update = simulation.train(0)
    like, buffers = simulation.server.parameters, simulation.server.buffers
    for difference, message in (
        (like[:-1], "another model"),
        (like.float(), "another model"),
        (torch.full_like(like, float("nan")), "not finite"),
    ):
        with pytest.raises(Exception, match=message):
            check_update(update, difference, like, buffers, "0")
    claimed = Update(update.payload, update.buffers, num_samples=10**9, num_steps=1)
    capped = Simulation(most_samples=50).settings
    assert contribute(capped, claimed, update.payload[0].clone())[0].weight == 50
    bounded = Simulation(max_norm=1e-3).settings
    part, norm = contribute(bounded, update, update.payload[0].clone())
    assert norm > 1e-3 and abs(float(part.difference.norm()) / part.weight - 1e-3) < 1e-12
    with pytest.raises(Exception, match="took 1 steps with 0 samples"):
        check_update(Update(update.payload, update.buffers, 0, 1), like, like, buffers, "0")


def test_fedbuff_starts_anywhere_with_the_same_rounds() -> None:
    simulation = Simulation(
        algorithm={"use": "fedbuff", "concurrency": 3}, clients_per_round=2, rounds=20,
        clock={"stragglers": 0.3, "slowdown": 20.0, "failures": 0.1},
    )  # fmt: skip
    schedule = Schedule(simulation.settings, simulation.algorithm, 5, SIZES, 8)
    rounds = list(schedule.rounds())
    assert list(schedule.rounds(11)) == rounds[11:]
    assert any(task.base < one.number for one in rounds for task in one.tasks), "nothing was ever late"
    for one in rounds:
        assert len({task.client for task in one.tasks}) == len(one.tasks), "one difference would count twice"
    for one, later in itertools.pairwise(rounds):
        assert later.clock_s >= one.clock_s
        assert all(task.base >= one.needs_from for task in later.tasks)


def test_an_update_of_more_clients_than_are_ever_in_time_is_refused() -> None:
    slow = {"stragglers": 0.5, "slowdown": 100.0}
    settings = Simulation(algorithm="fedbuff", clients_per_round=4, deadline=1.0, clock=slow).settings
    with pytest.raises(JobError, match="of the clients are ever in time, and an update of the server takes"):
        Schedule(settings, make_algorithm(settings.use), 0, SIZES, 8).check()


def test_a_deadline_leaves_out_the_slow_and_failures_drop_out() -> None:
    settings = Simulation(deadline=0.025, clock={"failures": 0.4}, rounds=30).settings
    rounds = list(Schedule(settings, make_algorithm(settings.use), 0, SIZES, 8).rounds())
    assert all(set(one.late) <= {2, 3} for one in rounds) and any(one.late for one in rounds)
    assert any(one.dropped for one in rounds)
    for one in rounds:
        took_part = {task.client for task in one.tasks}
        assert took_part | set(one.late) | set(one.dropped) == set(one.asked) == {0, 1, 2, 3}
