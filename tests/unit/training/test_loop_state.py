"""What a loop continues from: kept, found again, and what cannot be kept is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cordee.checkpoint.layout import decode_values, encode_values
from cordee.checkpoint.state import State
from cordee.core.errors import CheckpointError, JobError
from cordee.training.commits import Commits
from cordee.training.loop_state import LoopContents, LoopState


class Parts:
    """A model with a batch norm, its optimizer and scheduler, and plain values."""

    def __init__(
        self, seed: int = 0, width: int = 4, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        self.contents = LoopContents(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "average": torch.zeros(2),
                "epoch": 0,
                "history": [],
            }
        )
        self.commits = Commits(self.contents, lambda: lambda: {"samples": 0})
        self.commits.begin(0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 3)).square().sum().backward()
        self.commits.note_step()
        self.optimizer.step()
        self.scheduler.step()
        self.contents.tensors["average"].add_(1)
        self.contents.values["epoch"] += 1
        self.contents.values["history"].append(0.5)


def flat(state: State) -> tuple[dict[str, list[Any]], bytes]:
    return {name: tensor.flatten().tolist() for name, tensor in state.tensors.items()}, encode_values(state.values)


def through_messages(state: State) -> State:
    """A state as another process gets it."""
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    return State(tensors, decode_values(encode_values(state.values)))


def test_another_process_continues_with_the_same() -> None:
    one, other = Parts(0), Parts(1)
    for _ in range(3):
        one.step()
        one.commits.commit()
    other.contents.load(through_messages(one.commits.state()))
    other.commits.begin(3)
    assert flat(other.commits.state()) == flat(one.commits.state())
    assert other.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    for parts in (one, other):
        torch.manual_seed(7)
        parts.step()
        parts.commits.commit()
    assert flat(other.commits.state()) == flat(one.commits.state())


def test_a_forward_pass_and_changed_settings_are_taken_back_without_a_copy() -> None:
    """What is lost with a member before an optimizer's step: statistics of norms, rates, values, gradients."""
    parts = Parts()
    parts.step()
    parts.commits.commit()
    before = flat(parts.commits.state())
    copied_step = parts.commits._copy.values["progress"]["step"]
    parts.scheduler.step()
    parts.contents.values["epoch"] = 17
    parts.contents.values["history"].append(9.0)
    parts.model(torch.randn(8, 3)).sum().backward()
    assert not parts.commits.is_changed
    held = parts.commits.state()
    assert flat(held) == before
    parts.contents.load(held)
    parts.commits.begin(1)
    assert flat(parts.commits.state()) == before
    assert parts.contents.values["epoch"] == 1 and parts.contents.values["history"] == [0.5]
    assert all(parameter.grad is None for parameter in parts.model.parameters())
    assert parts.model[1].num_batches_tracked == 1
    assert copied_step in (0, 1)


def test_a_step_that_was_not_committed_is_taken_back_from_a_copy() -> None:
    parts = Parts()
    parts.commits.is_copying = True
    parts.step()
    parts.commits.commit()
    before = flat(parts.commits.state())
    parts.step()
    assert parts.commits.is_changed
    parts.contents.load(parts.commits.state())
    parts.commits.begin(1)
    assert flat(parts.commits.state()) == before


def test_weights_that_no_optimizer_changed_are_noticed() -> None:
    parts = Parts()
    parts.commits.commit()
    with torch.no_grad():
        parts.model[0].weight.clamp_(-0.01, 0.01)
    assert parts.commits.is_changed


def test_layers_are_frozen_as_they_were_at_the_commit() -> None:
    """A script thaws a layer in the third epoch, and a worker that joins in the fifth never runs that line."""
    one, other = Parts(0), Parts(1)
    one.model[0].requires_grad_(False)
    other.model[2].bias.requires_grad_(False)
    one.commits.commit()
    held = through_messages(one.commits.state())
    one.model[0].requires_grad_(True)
    assert one.contents.digest(held) != one.contents.digest(other.commits.state())
    for parts in (one, other):
        parts.contents.load(held)
        trained = [parameter.requires_grad for parameter in parts.model.parameters()]
        assert trained == [False, False, True, True, True, True]
    del held.values["frozen"]  # as saved by an earlier release
    one.model[0].requires_grad_(True)
    one.contents.load(held)
    assert one.model[0].weight.requires_grad


@pytest.mark.parametrize("how", ["scaled", "replaced", "not a number"])
def test_weights_that_were_changed_past_autograd_are_noticed(how: str) -> None:
    """Averaged weights that are put in place to evaluate with, say: a member may be lost while they are there."""
    parts = Parts()
    parts.step()
    parts.commits.commit()
    assert not parts.commits.is_changed
    weight = parts.model[2].weight
    if how == "replaced":
        weight.data = weight.detach() + 1
    else:
        weight.data.mul_(0.9 if how == "scaled" else float("nan"))
    assert parts.commits.is_changed
    parts.contents.load(parts.commits.state())
    parts.commits.begin(0)
    assert not parts.commits.is_changed
    parts.step()
    weight.data.fill_(float("nan"))
    parts.commits.commit()
    assert not parts.commits.is_changed


@pytest.mark.parametrize("name", ["average", "nested"])
def test_tensors_of_a_state_are_compared_between_workers(name: str) -> None:
    class Nested:
        def __init__(self) -> None:
            self.values = torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, values: dict[str, Any]) -> None:
            self.values.copy_(values["values"])

    def digest(value: float) -> Any:
        torch.manual_seed(0)
        nested, average = Nested(), torch.zeros(2)
        (average if name == "average" else nested.values).fill_(value)
        contents = LoopContents({"model": nn.Linear(2, 2), "average": average, "nested": nested})
        commits = Commits(contents, lambda: lambda: {"samples": 0})
        commits.begin(0)
        return contents.digest(commits.state())

    assert digest(0.0) == digest(0.0) != digest(1.0)


def test_weights_that_are_changed_without_any_optimizer_are_copied_at_every_commit() -> None:
    """Nothing tells that they were changed through `.data`."""
    model = nn.Linear(3, 2)
    commits = Commits(LoopContents({"model": model}), lambda: lambda: {"samples": 0})
    commits.begin(0)
    for _ in range(2):
        model.weight.data.sub_(0.5)
        commits.commit()
    before = model.weight.tolist()
    model.weight.data.sub_(0.5)
    assert commits.state().tensors["model.weight"].tolist() == before
    assert commits.state().values["progress"]["step"] == 2


def test_an_exchange_after_a_step_has_every_commit_copied() -> None:
    parts = Parts()
    parts.commits.note_exchange()
    assert not parts.commits.is_copying
    parts.step()
    parts.commits.note_exchange()
    assert parts.commits.is_copying


def test_without_a_copy_the_loop_goes_back_to_an_earlier_commit() -> None:
    """Never to weights of one commit with the place in the data of another."""
    parts = Parts()
    first = flat(parts.commits.state())
    parts.commits._next_copy_s = float("inf")
    parts.step()
    parts.commits.commit()
    parts.step()
    held = parts.commits.state()
    assert held.values["progress"]["step"] == 0 and flat(held) == first


@pytest.mark.parametrize(
    ("things", "message"),
    [
        ({"seen": {1, 2}}, "'seen' cannot be saved.*set"),
        ({"when": object()}, "'when' cannot be saved.*object"),
        ({"save": 1}, "'save' cannot be a name"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)}, r"'optimizer' \(SGD\).*no model"),
    ],
)
def test_what_cannot_be_kept_is_named(things: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        LoopContents(things)


def test_a_state_is_read_and_set_by_its_names() -> None:
    parts = Parts()
    state = LoopState(parts.contents, lambda path: None, lambda path: False)
    state.epoch = 3
    assert (state.epoch, state.model) == (3, parts.model)
    with pytest.raises(JobError, match="'model' stays the object"):
        state.model = nn.Linear(1, 1)
    with pytest.raises(JobError, match=r"has no 'epochs'.*epoch"):
        state.epochs = 3
    with pytest.raises(AttributeError, match="has no 'epocs'"):
        _ = state.epocs
    with pytest.raises(JobError, match="'epoch' cannot be saved"):
        state.epoch = {1, 2}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Parts(width=5), "'0.weight' has shape"),
        (lambda: Parts(optimizer=torch.optim.SGD), "of Adam, the job uses SGD|optimizer state is of Adam"),
    ],
)
def test_a_state_of_another_model_is_refused(other: Any, message: str) -> None:
    one, another = Parts(), other()
    one.step()
    one.commits.commit()
    with pytest.raises(CheckpointError, match=message):
        another.contents.load(through_messages(one.commits.state()))


def test_a_state_of_other_things_is_refused() -> None:
    model = nn.Linear(1, 1)
    one, other = LoopContents({"model": model, "epoch": 0}), LoopContents({"net": nn.Linear(1, 1), "epoch": 0})
    with pytest.raises(CheckpointError, match="models net; it has model"):
        other.load(one.recorded())


def test_several_models_and_optimizers_keep_apart() -> None:
    def make(seed: int) -> tuple[LoopContents, list[Tensor]]:
        torch.manual_seed(seed)
        generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=rate) for m, rate in ((generator, 0.1), (critic, 0.2))]
        for module, optimizer in zip((generator, critic), optimizers, strict=True):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        things = {"generator": generator, "critic": critic, "one": optimizers[0], "two": optimizers[1]}
        return LoopContents(things), [*generator.parameters(), *critic.parameters()]

    (one, weights), (other, others) = make(0), make(1)
    other.load(through_messages(one.recorded()))
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert other.optimizers["two"].param_groups[0]["lr"] == 0.2
    assert flat(other.recorded()) == flat(one.recorded())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.ASGD, torch.optim.Rprop])
def test_copies_of_every_commit_are_of_that_commit(optimizer: type[torch.optim.Optimizer]) -> None:
    """Also where only tensors are copied: what was changed since, in any way, is not in the state."""
    parts = Parts(optimizer=optimizer)
    parts.commits.is_copying = True
    for step in range(1, 5):
        parts.step()
        parts.contents.assign("epoch", step)
        parts.commits.commit()
        expected = {name: value.clone() for name, value in parts.model.state_dict().items()}
        rate = parts.optimizer.param_groups[0]["lr"]
        parts.step()
        next(parts.model.parameters()).data.fill_(9.0)
        parts.contents.assign("epoch", -1)
        parts.optimizer.param_groups[0]["lr"] = 7.0
        state = parts.commits.state()
        assert state.values["values"]["epoch"] == step and state.values["progress"]["step"] == step
        parts.contents.load(state)
        found = parts.model.state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        assert parts.optimizer.param_groups[0]["lr"] == rate


def test_copies_follow_parameters_whose_state_comes_late() -> None:
    """An optimizer that has state for another parameter than at the last copy is copied in full."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    contents = LoopContents({"model": model, "optimizer": optimizer})
    commits = Commits(contents, lambda: lambda: {"samples": 0})
    commits.begin(0)
    commits.is_copying = True
    for layer in (0, 0, 1, 1):
        optimizer.zero_grad()
        model[layer](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        commits.commit()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [float(inner["step"]) for inner in optimizer.state.values()]
    optimizer.step()
    contents.load(commits.state())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert [float(inner["step"]) for inner in optimizer.state.values()] == steps == [2.0, 2.0, 2.0, 2.0]


class Counting(nn.Linear):
    """Keeps a number beside its parameters and buffers."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


@pytest.mark.parametrize("kind", ["metric", "persistent metric", "extra state"])
def test_a_module_whose_state_no_commit_would_keep_is_refused(kind: str) -> None:
    """A metric that is updated in each step would count the step again that was lost with a worker."""
    if kind == "extra state":
        module: nn.Module = nn.Sequential(Counting(2, 2))
    else:
        metric = torchmetrics.MeanMetric()
        metric.persistent(kind == "persistent metric")
        module = metric
    message = "is a metric" if kind == "metric" else "which is no parameter and no buffer"
    with pytest.raises(JobError, match=message):
        LoopContents({"model": nn.Linear(2, 2), "other": module})
    LoopContents({"model": nn.Linear(2, 2), "loss": nn.CrossEntropyLoss()})  # has nothing to keep
