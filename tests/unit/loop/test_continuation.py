"""Commits, checkpoints and refusals of a loop of one's own, alone in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cordee
from cordee.core.errors import CommunicationError, JobError
from cordee.loop import LoopTeam


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Loop:
    """A model, its data and its state; `run` trains an epoch after the other and calls back after each batch."""

    def __init__(self, team: LoopTeam) -> None:
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4, shuffle=True)
        self.team, self.losses = team, []
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.batches = team.prepare(model, optimizer, data)
        self.state = team.state(model=model, optimizer=optimizer, epoch=0, step=0)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = (self.model(x) - y).square().mean()
        self.losses.append(loss.item())
        self.team.backward(loss)

    def run(self, num_epochs: int = 2, after: Callable[[], None] = lambda: None) -> list[float]:
        @self.team.elastic
        def train() -> None:
            while self.state.epoch < num_epochs:
                for x, y in self.batches:
                    self.backward(x, y)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.state.step += 1
                    self.team.commit()
                    after()
                self.state.epoch += 1

        train()
        return self.losses


def test_saved_in_the_middle_of_an_epoch_and_continued(folder: Path) -> None:
    class EndError(Exception):
        pass

    with cordee.join() as team:
        expected = Loop(team).run()
    with pytest.raises(EndError), cordee.join() as team:
        first = Loop(team)

        def save() -> None:
            if first.state.step == 4:
                first.state.save()
                raise EndError

        first.run(after=save)
    (checkpoints,) = folder.glob("*-checkpoints")
    assert [path.name for path in checkpoints.iterdir()] == ["step-5"]  # four commits, and that of the save
    with cordee.join() as team:
        torch.manual_seed(3)
        second = Loop(team)
        assert second.state.restore() and (second.state.epoch, second.state.step) == (1, 4)
        assert second.run() == expected[4:]


def test_two_runs_do_not_save_to_one_folder(folder: Path) -> None:
    """Else the second, once it is resumed, would continue from the later step of the first."""

    def run(loop: Loop, place: str | None) -> None:
        loop.run(num_epochs=1, after=lambda: loop.state.save(place))

    with cordee.join() as team:
        run(Loop(team), None)
    with cordee.join() as team, pytest.raises(JobError, match=r"has checkpoints of another run \(step-\d+\)"):
        run(Loop(team), None)
    with cordee.join() as team:
        other = Loop(team)
        run(other, "other")
        run(other, "other")
    with cordee.join() as team:
        resumed = Loop(team)
        assert resumed.state.restore("other")
        resumed.state.save("other")
        with pytest.raises(JobError, match="of another run"):
            resumed.state.save()
    with cordee.join() as team:
        rewound = Loop(team)
        (early, *later) = sorted(Path("other").iterdir())
        assert later and rewound.state.restore(early)
        with pytest.raises(JobError, match="of another run"):
            rewound.state.save("other")
    (first,) = folder.glob("*-checkpoints")
    (max(first.glob("step-*"), key=lambda path: int(path.name[5:])) / "values.json").write_text("damaged")
    with cordee.join() as team, pytest.raises(JobError, match="of another run"):
        Loop(team).state.save()


def test_where_nothing_was_saved_nothing_is_restored() -> None:
    with cordee.join() as team:
        assert not Loop(team).state.restore()


def inside(act: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    def call(loop: Loop) -> None:
        loop.run(after=lambda: act(loop))

    return call


def commit_after_the_batches(loop: Loop) -> None:
    @loop.team.elastic
    def train() -> None:
        for x, y in loop.batches:
            loop.backward(x, y)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.team.commit()

    train()


def commit_before_the_step(loop: Loop) -> None:
    @loop.team.elastic
    def train() -> None:
        for x, y in loop.batches:
            loop.backward(x, y)
            loop.team.commit()

    train()


def begin_outside(loop: Loop) -> None:
    iterator = iter(loop.batches)
    next(iterator)

    @loop.team.elastic
    def train() -> None:
        next(iterator)

    train()


def decorate_a_generator(loop: Loop) -> None:
    @loop.team.elastic
    def train() -> Iterator[float]:
        for x, y in loop.batches:
            loop.backward(x, y)
            yield loop.losses[-1]

    list(train())


def commit_before_the_end_of_a_batch(loop: Loop) -> None:
    """After each of two optimizers, say: continued from the first, the second would take no step for this batch."""

    @loop.team.elastic
    def train() -> None:
        for x, y in loop.batches:
            for _ in range(2):
                loop.backward(x, y)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if not loop.team._continuation.num_commits:
                    loop.team.commit()

    train()


def commit_what_failed(loop: Loop) -> None:
    """A script that catches everything goes on to the next batch."""

    @loop.team.elastic
    def train() -> None:
        for _ in loop.batches:
            with contextlib.suppress(Exception), loop.team._continuation.exchanging():
                raise CommunicationError("worker 1 was lost")
            loop.team.commit()

    train()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda loop: loop.team.commit(), "outside of the loop"),
        (lambda loop: loop.team.state(more=1), "there is a state already"),
        (inside(lambda loop: loop.state.restore()), "restore before it begins"),
        (inside(lambda loop: loop.run()), "one loop inside of another"),
        (commit_after_the_batches, "state.epoch is still 0"),
        (commit_before_the_step, r"between team.backward and optimizer.step\(\)"),
        (begin_outside, "begun before the loop"),
        (decorate_a_generator, "train is a generator"),
        (commit_what_failed, "worker 1 was lost"),
        (commit_before_the_end_of_a_batch, r"SGD.step\(\) after team.commit\(\) in one iteration"),
    ],
)
def test_mistakes_are_refused(act: Callable[[Loop], None], message: str) -> None:
    with pytest.raises(cordee.CordeeError, match=message), cordee.join() as team:
        act(Loop(team))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("'scheduler'", lambda parts: parts.scheduler.step()),
        ("'epoch'", lambda parts: setattr(parts.state, "epoch", 1)),
        ("'history'", lambda parts: parts.state.history.append(1)),
        ("'average'", lambda parts: parts.average.add_(1)),
        ("the settings of 'optimizer'", lambda parts: parts.optimizer.param_groups[0].update(lr=0.2)),
        ("weights", lambda parts: parts.model.weight.data.clamp_(-1e-3, 1e-3)),
    ],
)
@pytest.mark.parametrize("is_copying", [False, True])
def test_a_change_after_the_commit_of_an_iteration_is_refused(
    name: str, change: Callable[[Any], object], is_copying: bool
) -> None:
    """Continued from the commit, the loop would do without it: its rates would be one step late from there on."""
    parts = SimpleNamespace(model=nn.Linear(3, 1), average=torch.zeros(2))
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    parts.scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 100)
    with pytest.raises(JobError, match=f"{name} changed after team.commit"), cordee.join() as team:
        batches = team.prepare(DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4))
        parts.state = team.state(epoch=0, history=[], **vars(parts))

        @team.elastic
        def train() -> None:
            for (x,) in batches:
                team.backward(parts.model(x).square().mean())
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                if is_copying:
                    team.sum(1.0)
                team.commit()
                change(parts)

        train()


def test_what_is_changed_and_put_back_after_a_commit_is_no_change() -> None:
    """An average that is evaluated in place of the weights, say; and a last commit takes everything."""
    with cordee.join() as team:
        loop = Loop(team)

        def after() -> None:
            kept = loop.model.weight.detach().clone()
            loop.model.weight.data.zero_()
            loop.model.weight.data.copy_(kept)
            loop.state.step += 1
            team.commit()

        assert len(loop.run(after=after)) == 6


@pytest.mark.parametrize("missing", ["target", "optimizer", "scheduler"])
def test_what_was_prepared_is_in_the_state(missing: str) -> None:
    model, target = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = {"model": model, "target": target, "optimizer": optimizer, "scheduler": scheduler}
    name = type(things[missing]).__name__
    with cordee.join() as team:
        team.prepare(*things.values())
        state = team.state(epoch=0, **{key: thing for key, thing in things.items() if key != missing})
        for use in (team.elastic(lambda: None), state.save, state.restore):
            with pytest.raises(JobError, match=f"the {name} that was given to team.prepare is not in the state"):
                use()


def test_a_part_of_a_model_in_the_state_is_in_the_state() -> None:
    whole = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with cordee.join() as team:
        team.prepare(whole[0], whole[1])
        team.state(whole=whole)
        team.elastic(lambda: None)()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_whose_momentum_no_commit_keeps(momentum: float) -> None:
    with cordee.join() as team:
        loop = Loop(team)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=momentum)
        if not momentum:
            assert len(loop.run()) == 6
            return
        with pytest.raises(JobError, match=r"SGD.step\(\): the optimizer has accumulated values over several commits"):
            loop.run()


def test_an_optimizer_that_is_made_for_each_step_is_not_refused() -> None:
    with cordee.join() as team:
        loop = Loop(team)

        def renew() -> None:
            loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.1)

        renew()
        assert len(loop.run(after=renew)) == 6


def test_a_loop_needs_a_state() -> None:
    with pytest.raises(JobError, match="make the state"), cordee.join() as team:
        team.elastic(lambda: None)()


def test_a_pass_inside_of_another_is_no_end_of_an_epoch() -> None:
    with cordee.join() as team:
        loop = Loop(team)
        outer = team.prepare(DataLoader(TensorDataset(torch.randn(4, 3)), batch_size=2))

        @team.elastic
        def train() -> None:
            for _ in outer:
                for x, y in loop.batches:
                    loop.backward(x, y)
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                team.commit()

        train()
    assert len(loop.losses) == 6


@pytest.mark.parametrize("every", [1, 2, 9])
def test_a_loop_may_read_beside_other_batches(every: int) -> None:
    with cordee.join() as team:
        loop = Loop(team)
        data = TensorDataset(torch.randn(4, 3))
        other, third = team.prepare(DataLoader(data, batch_size=2), DataLoader(data, batch_size=1))

        @team.elastic
        def train() -> None:
            beside = iter(other)
            for number, (x, y) in enumerate(loop.batches):
                if number % every == every - 1:
                    next(beside, None)
                loop.team.backward((loop.model(x) - y).square().mean(), batches=loop.batches)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                team.commit()
            for (x, y), _ in zip(loop.batches, third, strict=False):
                loop.team.backward((loop.model(x) - y).square().mean(), batches=loop.batches)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                state = loop.state
                state.step += 1
                state.epoch = 1
                team.commit()

        train()


def test_a_step_that_is_left_out_may_be_committed() -> None:
    with cordee.join() as team:
        loop = Loop(team)

        @team.elastic
        def train() -> None:
            for x, y in loop.batches:
                loop.backward(x, y)
                loop.optimizer.zero_grad(set_to_none=False)
                team.commit()

        train()
