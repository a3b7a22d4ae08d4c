"""Own loops as scripts: the same printed however they are started, and an error for workers that drift apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run, run_python

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import cordee

torch.manual_seed(0)
x = torch.randn(37, 4)
data = TensorDataset(x, (x[:, 0] > 0).long())
model, other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with cordee.join() as team:
    train, test = DataLoader(data, 8, shuffle=True, num_workers=1), DataLoader(data, 16)
    model, optimizer, train, test = team.prepare(model, optimizer, train, test)
    for epoch in range(2):
        for step, (a, b) in enumerate(train):
            {body}
            optimizer.step()
            optimizer.zero_grad()
        right = sum(team.gather((model(a).argmax(1) == b).long()).sum() for a, b in test)
        team.print(epoch, int(right), f"{{sum(p.detach().abs().sum() for p in model.parameters()):.5f}}")
    {end}
"""
LOSS = "team.backward(F.cross_entropy(model(a), b))"


def write(folder: Path, body: str = LOSS, end: str = "pass") -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(body=body, end=end))
    return str(script)


def test_the_same_alone_and_together(tmp_path: Path) -> None:
    script = write(tmp_path)
    alone = run_python(script)
    assert alone.code == 0 and len(alone.stdout.splitlines()) == 2, alone.stderr
    together = run("run", "-n", "2", script)
    assert (together.code, together.stdout) == (0, alone.stdout), together.stderr


AGAIN = """
import time
import cordee

for attempt in range(3):
    with cordee.join() as team:
        time.sleep(0.2 * (team.worker_index == attempt % 2))  # the other one finds what was said before
        team.print(attempt, team.sum(1.0, float(team.worker_index)))
"""


def test_a_script_joins_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    ended = run("run", "-n", "2", str(script))
    assert ended.code == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"{attempt} [2.0, 1.0]" for attempt in range(3)]


@pytest.mark.long
def test_the_same_under_torchrun_and_on_three(tmp_path: Path) -> None:
    script = write(tmp_path)
    alone = run_python(script)
    torchrun = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    for ended in (torchrun, run("run", "-n", "3", script)):
        assert (ended.code, ended.stdout) == (0, alone.stdout), ended.stderr


@pytest.mark.parametrize(
    ("body", "end", "message"),
    [
        (
            LOSS,
            "model[0].bias.data += team.worker_index",
            "the workers' models are not the same any more: 0.bias of model 0 (Sequential) of worker 1 differs from "
            "that of worker 0",
        ),
        (LOSS.replace("b))", "b), exchange=False)"), "pass", "Adam.step() with gradients that have not been exchanged"),
        (
            f"{LOSS}; F.cross_entropy(other(a), b).backward(); torch.optim.SGD(other.parameters(), lr=1).step()",
            "pass",
            "SGD has a parameter of shape (2, 4) that is not of a prepared model",
        ),
        ("F.cross_entropy(model(a), b).backward()", "pass", "the workers' models are not the same any more"),
    ],
    ids=["weights changed", "not exchanged", "not prepared", "plain backward"],
)
def test_workers_that_drift_apart_are_an_error(tmp_path: Path, body: str, end: str, message: str) -> None:
    ended = run("run", "-n", "2", write(tmp_path, body, end))
    assert ended.code == 1, ended.stdout
    assert message in ended.stderr
