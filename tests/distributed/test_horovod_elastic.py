"""`hvd.elastic` under `cordee run --elastic`: ranks are killed, join and leave; the weights are those of one process.

The faults of the loop below it are in `tests/faults/fault_walk_script.py`.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, run, run_python, run_script, started, wait_until

from cordee.tools.audit import audit_run

pytestmark = pytest.mark.timeout(200)

# Gradients are whole numbers and rates powers of two, and a batch is of 12 samples on any number of ranks: sums are
# exact, so that the weights are the same bits whoever computes them.
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import horovod.torch as hvd

def die():
    if not os.path.exists("died"):
        open("died", "w")
        os.kill(os.getpid(), signal.SIGKILL)

hvd.init()
torch.manual_seed(0)
inputs = torch.randint(-4, 5, (48, 6)).double()
targets = torch.randint(-2, 3, (48, 2)).double()
train_set = TensorDataset(inputs, targets)
sampler = hvd.elastic.ElasticSampler(train_set)
model = nn.Linear(6, 2, bias=False).double()
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
{setup}
@hvd.elastic.run
def train(state):
    {begin}
    while state.epoch < 3:
        loader = DataLoader(train_set, batch_size=12 // hvd.size(), sampler=sampler)
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            {computed}
            (model(x) * y).sum().backward()
            {backward}
            optimizer.step()
            sampler.record_batch(batch, len(x))
            state.steps += 1
            {step}
            {commit}
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()
    return "done"

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0{things})
{before}
print("result", train(state))
total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after")
if hvd.rank() == 0:
    print("weights", sum((2.0**place * value) for place, value in enumerate(model.weight.flatten().tolist())))
"""
PLACES = {"setup": "", "things": "", "commit": "state.commit()"}


def write(folder: Path, **parts: str) -> str:
    filled = dict.fromkeys(("begin", "computed", "backward", "step", "before"), "pass") | PLACES | parts
    (folder / "script.py").write_text(SCRIPT.format(**filled))
    return str(folder / "script.py")


def elastic(folder: Path, *options: str, script: str, num_workers: int = 2) -> Ended:
    command = ("run", "--elastic", "--as-horovod", "-n", str(num_workers), "--run-dir", str(folder / "run"))
    return run(*command, *options, script, folder=folder)


def weights(ended: Ended) -> str:
    assert ended.code == 0, ended.stderr
    (found,) = set(re.findall(r"weights (\S+)", ended.stdout))
    return str(found)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def assert_sound(folder: Path) -> None:
    assert not [finding for finding in audit_run(folder / "run") if finding.state == "problem"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    return weights(run_python("-m", "cordee.horovod", write(folder), folder=folder))


@pytest.mark.parametrize(
    "parts",
    [
        {"step": "if state.steps == 6 and hvd.rank() == 1: die()"},
        {"computed": "if state.steps == 5 and hvd.rank() == 0: die()"},
        {"backward": "if state.steps == 5 and hvd.rank() == 1: die()\n            hvd.allreduce(x.sum(), name='loss')"},
        {"commit": "state.steps % 3 or state.commit()", "step": "if state.steps == 8 and hvd.rank() == 1: die()"},
    ],
    ids=["before-commit", "rank-0", "between-backward-and-step", "rare-commits"],
)
def test_a_killed_rank_leaves_the_weights_as_they_are(tmp_path: Path, expected: str, parts: dict[str, str]) -> None:
    ended = elastic(tmp_path, script=write(tmp_path, **parts))
    assert weights(ended) == expected
    summary = read(tmp_path)
    assert (summary["status"], summary["recoveries"]) == ("completed", 1)
    assert summary["samples"] == 144
    assert "result done" in ended.stdout
    assert_sound(tmp_path)


def test_the_script_runs_in_every_way(tmp_path: Path, expected: str) -> None:
    script = write(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cordee.horovod")
    assert weights(run_python(*torchrun, script, folder=tmp_path)) == expected
    assert weights(run("run", "--as-horovod", "-n", "3", script, folder=tmp_path)) == expected


def test_ranks_join_and_the_callbacks_follow(tmp_path: Path, expected: str) -> None:
    """All ranks, newcomers too, call what was registered: the rate stays what it was, and the calls are counted."""
    reset = "state.register_reset_callbacks([lambda: setattr(state, 'resets', state.resets + 1)])"
    wait = "while state.steps == 4 and hvd.size() == 2: time.sleep(0.02); state.commit()"
    slow = write(tmp_path, step=wait, things=", resets=0", before=reset)
    slow_path = Path(slow)
    slow_path.write_text(slow_path.read_text() + "\nprint('resets', state.resets, hvd.size())\n")
    command = ("run", "--elastic", "--as-horovod", "-n", "2", "--run-dir", str(tmp_path / "run"), slow)
    with started(*command, folder=tmp_path) as first:
        wait_until(lambda: events(tmp_path, "step"))
        assert run("scale", str(tmp_path / "run"), "3").code == 0
        ended = first.finish()
    assert weights(ended) == expected
    assert set(re.findall(r"resets (\d+ \d+)", ended.stdout)) == {"1 3"}
    assert ended.stdout.count("result done") == 3
    assert_sound(tmp_path)


def test_ctrl_c_saves_and_resume_continues(tmp_path: Path, expected: str) -> None:
    wait = "while state.steps == 4 and not os.path.exists('resumed'): time.sleep(0.02); state.commit()"
    slow = write(tmp_path, step=wait)
    command = ("run", "--elastic", "--as-horovod", "-n", "2", "--run-dir", str(tmp_path / "run"), slow)
    with started(*command, folder=tmp_path) as first:
        wait_until(lambda: events(tmp_path, "step"))
        first.process.send_signal(signal.SIGINT)
        assert first.finish().code == 130
    assert read(tmp_path)["status"] == "interrupted"
    (tmp_path / "resumed").touch()
    assert weights(run("resume", str(tmp_path / "run"), folder=tmp_path)) == expected


def test_restore_is_of_the_last_commit(tmp_path: Path, expected: str) -> None:
    undo = "if state.steps == 5: model.weight.data.add_(3); optimizer.state.clear(); state.epoch = 7; state.restore()"
    assert weights(elastic(tmp_path, script=write(tmp_path, computed=undo))) == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"before": "state.commit()"}, r"state.save\(\) outside of the loop.*@hvd.elastic.run"),
        ({"before": "hvd.allreduce(torch.ones(1))"}, "before the loop: under --elastic the ranks meet"),
        ({"before": "hvd.broadcast_parameters(model.state_dict(), 0)"}, "before the loop"),
        ({"commit": "hvd.rank() == 0 and state.commit()"}, "rank 0 is in .*hvd.elastic.commit.*every rank must make"),
        ({"commit": "hvd.rank() == 0 and state.save(); state.commit()"}, "committed different steps"),
        ({"backward": "state.commit()"}, r"between loss.backward\(\) and optimizer.step"),
        ({"step": "hvd.rank() == 0 and hvd.allreduce(torch.ones(1), name='odd')"}, "'allreduce.odd'"),
        ({"step": "state.loss = 1.0"}, "the state has no 'loss'"),
        ({"step": "state.epoch = object()"}, "'epoch' cannot be saved"),
        ({"things": ", commit=1"}, "'commit' cannot be a name"),
        ({"begin": "train(state)"}, "one loop inside of another"),
        ({"step": "state.steps += hvd.rank()"}, "states differ.*'steps'"),
        ({"before": "train('no state')"}, "the first argument is a str"),
        ({"step": "raise ValueError('mine')"}, "ValueError: mine"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_named(tmp_path: Path, parts: dict[str, str], message: str) -> None:
    ended = elastic(tmp_path, script=write(tmp_path, **parts))
    assert ended.code == 1, ended
    assert re.search(message, ended.stderr, re.DOTALL), ended.stderr
    assert read(tmp_path)["status"] == "failed"


def test_a_commit_outside_of_the_loop_is_refused_alone_too(tmp_path: Path) -> None:
    script = Path(write(tmp_path, before="state.commit()"))
    script.write_text(script.read_text().replace("import horovod.torch", "import cordee.horovod.torch"))
    ended = run_script(str(script), folder=tmp_path)
    assert ended.code == 1 and "outside of the loop" in ended.stderr
