"""Walks the fault points of runs of one's own script, under `cordee run --elastic`.

    PYTHONPATH=tests:tests/faults python -m fault_walk_script [--strategy two_models] [--point P] [--scenario S]

The gradients of the script are whole numbers and its rates powers of two, so that sums are exact in any order: the
weights are the same bits on any number of workers, and other bits if a batch is left out, counted twice or moved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from signal import SIGCONT

from fault_trials import Scenario, Trial, Walker
from team_actions import interrupt, join, kill_coordinator, scale, until_size
from walking import DEATHS, Case, Walk, cases, main, of

from cordee.core.fault_points import Fault
from warm_launch import WarmProcess, WarmServer

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import cordee

torch.manual_seed(0)
inputs = torch.randint(-4, 5, (64, 6)).double()
targets = torch.randint(-2, 3, (64, 2)).double()
train_set = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
test_set = DataLoader(TensorDataset(inputs[:10], targets[:10]), batch_size=4)

class Net(nn.Module):  # with statistics that change in the forward pass, the same on all workers
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2, bias=False).double()
        nn.init.zeros_(self.linear.weight)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.training:
            self.num_passes += 1
        return self.linear(x)

def make():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

one, optimizer, scheduler = make()
other, second, _ = make()
with cordee.join() as team:
    one, other, optimizer, second, batches, tests = team.prepare(one, other, optimizer, second, train_set, test_set)
    state = team.state(one=one, other=other, optimizer=optimizer, second=second, scheduler=scheduler, epoch=0, seen=[])

    @team.elastic
    def train():
        while state.epoch < 3:
            for x, y in batches:
                team.backward((one(x) * y).sum(), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
                if TWO_MODELS:
                    fixed = one.linear.weight.detach().round()
                    team.backward((other(x) * (x @ fixed.T)).sum(), reduction="sum")
                    second.step()
                    second.zero_grad()
                team.commit()
            one.eval()
            with torch.no_grad():
                rows = torch.cat([team.gather(one(x) * 0 + y) for x, y in tests])
            one.train()
            assert torch.equal(rows, targets[:10]), rows
            assert int(one.num_passes) == 4 * (state.epoch + 1), one.num_passes
            scheduler.step()
            state.seen = [*state.seen, state.epoch]
            state.epoch += 1
            state.save()
        assert state.seen == [0, 1, 2], state.seen

    train()
"""
STEP = "loop.computed"
HOLD_0 = Fault(STEP, "worker-0", "hold", 5)
HOLD_0_LATE = Fault(STEP, "worker-0", "hold", 7)
HOLD_1 = Fault(STEP, "worker-1", "hold", 7)


class ScriptWalker(Walker):
    """Tries faults on the run of a script."""

    accepted_notes = frozenset({"samples"})  # how many an epoch has is the script's

    def _train(self, folder: Path, environment: Mapping[str, str], options: list[str]) -> WarmProcess:
        (folder / "script.py").write_text(self._job)
        common = ["--set", "failure_timeout=2s", "--set", "max_restarts=20"]
        arguments = ["run", "--elastic", "-n", "2", "--run-dir", str(folder / "run"), *common, *options]
        return self._server.cordee(*arguments, str(folder / "script.py"), folder=folder, environment=environment)


def _until_replaced(trial: Trial, hold: Fault) -> None:
    """Wait until a worker that was lost is back, or who is held has heard that it waits."""
    trial.until_held(hold)

    def is_replaced() -> bool:
        formed = trial.events("generation")
        is_back = len(formed) >= 2 and len(formed[-1]["members"]) == 2
        return is_back or trial.num_visits("link.pause", hold.process) > 0

    trial.until(is_replaced)
    trial.release(hold)


def _after_loss(trial: Trial) -> None:
    _until_replaced(trial, HOLD_0_LATE)


def _after_loss_of_first(trial: Trial) -> None:
    _until_replaced(trial, HOLD_1)


def _wake(trial: Trial) -> None:
    trial.until_held(HOLD_0_LATE)
    trial.signal(trial.pid_of("worker_started", 1), SIGCONT)
    _until_replaced(trial, HOLD_0_LATE)


SCENARIOS = {
    "plain": Scenario(),
    "loss": Scenario(_after_loss, (Fault(STEP, "worker-1", "kill", 4), HOLD_0_LATE)),
    "loss of the first": Scenario(_after_loss_of_first, (Fault(STEP, "worker-0", "kill", 4), HOLD_1)),
    "scale out": Scenario(scale(3, HOLD_0), (HOLD_0,)),
    "scale in": Scenario(scale(1, HOLD_0), (HOLD_0,)),
    "join": Scenario(join(3, HOLD_0), (HOLD_0,)),
    "leave": Scenario(until_size(1, HOLD_0), (Fault(STEP, "worker-1", "leave", 4), HOLD_0)),
    "coordinator": Scenario(kill_coordinator(HOLD_0), (HOLD_0,)),
    "interrupt": Scenario(interrupt(HOLD_0), (HOLD_0,), ends_early=True),
    "resume": Scenario(resumes="interrupt"),
    "woken": Scenario(_wake, (Fault(STEP, "worker-1", "freeze", 4), HOLD_0_LATE), settings=("max_restarts=0",)),
}

MEMBERS = (
    of("plain", "worker-0", 1),
    of("plain", "worker-1", 1),
    of("loss", "worker-0", 2),
    of("loss", "worker-1", 2),
    of("loss of the first", "worker-0", 2),
    of("loss of the first", "worker-1", 2),
    of("scale out", "worker-0", 2),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
    of("resume", "worker-1", 1),
)
STEPS = (
    of("plain", "worker-0", 1, 2, 4, 5, 12),
    of("plain", "worker-1", 1, 2, 4, 5, 12),
    of("scale out", "worker-2", 1),
    of("coordinator", "worker-1", 6),
)
HANDED = (
    of("loss", "worker-0", 2),
    of("loss", "worker-1", 2),
    of("loss of the first", "worker-1", 2),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
)

WALK: dict[str, Walk] = {
    "loop.computed": Walk(STEPS),
    "loop.exchanged": Walk(STEPS),
    "loop.commit": Walk(STEPS),
    "loop.committed": Walk(STEPS),
    "compare.begun": Walk((of("plain", "worker-0", 1, 2), of("plain", "worker-1", 1, 2), of("loss", "worker-1", 2))),
    "save.begun": Walk((of("plain", "worker-0", 1, 2, 3), of("interrupt", "worker-0", 2))),
    "checkpoint.written": Walk((of("plain", "worker-0", 1, 3),), DEATHS),
    "end.reached": Walk((of("plain", "worker-0"), of("plain", "worker-1"))),
    "enter.begun": Walk(MEMBERS),
    "enter.gathered": Walk(MEMBERS),
    "enter.loaded": Walk((of("resume", "worker-0"),)),
    "enter.shared": Walk(tuple(place._replace(visits=(1,)) for place in HANDED)),
    "enter.agreed": Walk(MEMBERS),
    "enter.set_up": Walk(MEMBERS),
    "enter.resumed": Walk(MEMBERS),
    "enter.done": Walk(MEMBERS),
    "share.begun": Walk(HANDED),
    "share.described": Walk(HANDED),
    "share.done": Walk(HANDED),
    "link.joined": Walk((of("plain", "worker-1"), of("scale out", "worker-2")), DEATHS),
    "link.ready": Walk(MEMBERS, DEATHS),
    "link.answered": Walk(MEMBERS, DEATHS),
    "link.pause": Walk((of("scale out", "worker-0"), of("scale out", "worker-1"), of("leave", "worker-1")), DEATHS),
    "link.stop": Walk((of("interrupt", "worker-0"), of("interrupt", "worker-1")), DEATHS),
    "link.given_up": Walk((of("woken", "worker-1"),), DEATHS),
    # Whether a goodbye was sent before the end is not known: what the script does after its loop may be incomplete.
    "link.goodbye": Walk((of("plain", "worker-0"), of("plain", "worker-1")), DEATHS, ends_early=DEATHS),
    "rendezvous.formed": Walk(MEMBERS),
    "generations.formed": Walk((of("plain", "coordinator"), of("loss", "coordinator", 2)), DEATHS),
    "generations.finish": Walk((of("interrupt", "coordinator"),), DEATHS),
    "losses.found": Walk((of("loss", "coordinator"),), DEATHS),
    "coordinator.over": Walk((of("plain", "coordinator"),), DEATHS),
}


def make_walker(server: WarmServer, folder: Path, *, two_models: bool = False) -> Walker:
    script = SCRIPT.replace("TWO_MODELS", str(two_models))
    return ScriptWalker(server, folder, "two_models" if two_models else "script", script, SCENARIOS)


def choose(walker: Walker) -> list[Case]:
    return cases(WALK)


if __name__ == "__main__":
    makers = {
        "script": make_walker,
        "two_models": lambda server, folder: make_walker(server, folder, two_models=True),
    }
    sys.exit(main(__doc__, makers, choose))
