"""`local_sgd` against plain torch: what each worker does alone, and where all agree. Losses are real."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import warm_launch
from cordee.checkpoint import load, weights_sha256
from cordee.cluster import Team
from cordee.core import Job, fault_points
from cordee.tools.audit import audit_run
from cordee.training.components import Components, assemble

pytestmark = pytest.mark.timeout(240)

# Double precision, and batches that are cut unevenly, of epochs that windows do not divide.
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_classes)).double()
    def forward(self, x):
        return self.body(x.double())
"""
JOB: dict[str, Any] = {
    "model": {"use": "net:Net"},
    "data": {"use": "synthetic", "shape": [6], "size": 90, "test_size": 16, "num_classes": 3},
    "optimizer": {"use": "sgd", "lr": 0.1, "momentum": 0.9},
    "training": {"batch_size": 12, "steps": 20, "threads": 1},
    "monitoring": {"every_steps": 1},
    "checkpoint": {"every_steps": 0},
    "strategy": {"name": "local_sgd", "workers": 2, "sync_every": 5},
}
DILOCO = {"use": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}


def job_of(folder: Path, **changes: Mapping[str, Any]) -> Job:
    table = {section: {**JOB.get(section, {}), **changes.get(section, {})} for section in {*JOB, *changes}}
    (folder / "net.py").write_text(NET)
    return Job.from_dict({**table, "python_path": [str(folder)]})


def train(
    folder: Path, job: Job, run: str, *arguments: str, faults: Sequence[fault_points.Fault] = ()
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = folder / f"{run}.toml"
    path.write_text(job.to_toml())
    environment = dict(os.environ)
    if faults:
        (where := folder / "faults").mkdir()
        (where / fault_points.FAULTS_FILE).write_bytes(msgspec.json.encode(faults))
        environment["CORDEE_FAULTS"] = str(where)
    process = warm_launch.start(
        "train", str(path), "--run-dir", run, *arguments, folder=folder, environment=environment
    )
    out = "".join(process.communicate(timeout=180))
    assert process.returncode == 0, out
    unsound = [finding for finding in audit_run(folder / run) if finding.state == "problem"]
    assert not unsound, unsound
    summary = json.loads((folder / run / "summary.json").read_text())
    state = load(folder / run / "checkpoints" / f"step-{summary['steps']}")
    return summary, state.part("model").tensors


class Simulated:
    """Workers that train alone, one after the other in this process, with plain torch."""

    def __init__(self, job: Job, num_workers: int) -> None:
        self.job = job
        self.parts = [self.part(index, num_workers) for index in range(num_workers)]
        self.models = [part.model for part in self.parts]
        self.optimizers = [part.recipe.make(part.model.named_parameters()) for part in self.parts]
        self.start = [p.detach().clone() for p in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.start]
        self.samples = 0

    def part(self, index: int, num_workers: int) -> Components:
        strategy = msgspec.structs.replace(self.job.strategy, workers=num_workers)
        return assemble(msgspec.structs.replace(self.job, strategy=strategy), Team(index, num_workers))

    def shares(self, part: Components, start: int, stop: int) -> Iterator[Any]:
        num_batches = part.train.num_batches
        assert num_batches is not None
        for step in range(start, stop):
            epoch, batch = divmod(step, num_batches)
            stream = part.train.batches(epoch, batch)
            yield next(stream)
            stream.close()

    def window(self, start: int, stop: int, members: list[int], outer: bool) -> None:
        """Have members train from `start` to `stop`, and agree."""
        ends, counts = [], []
        for index in members:
            count = 0
            for inputs, targets in self.shares(self.parts[index], start, stop):
                if len(inputs):
                    self.optimizers[index].zero_grad()
                    torch.nn.functional.cross_entropy(self.models[index](inputs), targets).backward()
                    self.optimizers[index].step()
                    count += len(inputs)
            ends.append([p.detach().clone() for p in self.models[index].parameters()])
            counts.append(count)
        self.samples += sum(counts)
        for place, begin in enumerate(self.start):
            mean = sum((end[place] - begin) * (n / sum(counts)) for end, n in zip(ends, counts, strict=True))
            assert isinstance(mean, Tensor)
            if outer:
                self.velocity[place] = 0.9 * self.velocity[place] - mean
                begin -= 0.7 * (-mean + 0.9 * self.velocity[place])
            else:
                begin += mean
        with torch.no_grad():
            for model in self.models:
                for parameter, begin in zip(model.parameters(), self.start, strict=True):
                    parameter.copy_(begin)

    def assert_equal(self, weights: Mapping[str, Tensor]) -> None:
        names = [name for name, _ in self.models[0].named_parameters()]
        for name, begin in zip(names, self.start, strict=True):
            torch.testing.assert_close(begin, weights[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("outer", [False, True], ids=["mean", "diloco"])
def test_windows_are_what_plain_torch_computes(tmp_path: Path, outer: bool) -> None:
    job = job_of(tmp_path, strategy={"outer": DILOCO} if outer else {}, training={"steps": 18})
    summary, weights = train(tmp_path, job, "run")
    simulated = Simulated(job, 2)
    for start, stop in ((0, 5), (5, 10), (10, 15), (15, 18)):
        simulated.window(start, stop, [0, 1], outer)
    simulated.assert_equal(weights)
    assert summary["samples"] == simulated.samples
    assert summary["samples_lost"] == 0


def test_one_step_alone_and_the_mean_are_data_parallel(tmp_path: Path) -> None:
    plain = {"optimizer": {"momentum": 0.0}}
    _, alone = train(tmp_path, job_of(tmp_path, strategy={"sync_every": 1}, **plain), "alone")
    other = Job.from_dict({**job_of(tmp_path, **plain).to_dict(), "strategy": {"name": "data_parallel", "workers": 2}})
    _, together = train(tmp_path, other, "together")
    for name, weight in together.items():
        torch.testing.assert_close(alone[name], weight, rtol=0, atol=1e-12)


def test_a_worker_that_is_lost_takes_only_its_own_window_with_it(tmp_path: Path) -> None:
    job = job_of(tmp_path, cluster={"max_restarts": 0, "failure_timeout": "2s"}, strategy={"outer": DILOCO})
    fault = fault_points.Fault("step.taken", "worker-1", "kill", 7)
    summary, weights = train(tmp_path, job, "run", faults=[fault])
    simulated = Simulated(job, 2)
    simulated.window(0, 5, [0, 1], True)
    simulated.window(5, 10, [0], True)  # the other one was lost in it
    lost = sum(len(inputs) for inputs, _ in simulated.shares(simulated.parts[1], 5, 10))
    simulated.parts[0] = simulated.part(0, 1)
    simulated.window(10, 15, [0], True)
    simulated.window(15, 20, [0], True)
    simulated.assert_equal(weights)
    assert (summary["samples"], summary["samples_lost"]) == (simulated.samples, lost)
    assert summary["recoveries"] == 1
    assert summary["steps_redone"] == 0


@pytest.mark.parametrize("point", ["agree.gathered", "agree.exchanged", "agree.done"])
def test_a_worker_that_is_lost_while_all_agree(tmp_path: Path, point: str) -> None:
    """Those left have agreed with it or without it, and count what is true."""
    job = job_of(tmp_path, cluster={"failure_timeout": "2s"}, strategy={"outer": DILOCO})
    summary, _ = train(tmp_path, job, "run", faults=[fault_points.Fault(point, "worker-1", "kill", 2)])
    assert summary["steps"] == 20
    in_two_epochs = 2 * 90 + 4 * 12 + 12 - 12  # 8 batches an epoch: 20 steps are two epochs and 4 batches
    assert summary["samples"] + summary["samples_lost"] == in_two_epochs
    assert summary["recoveries"] == 1


def test_an_evaluation_that_a_lost_worker_interrupts_is_made_by_those_left(tmp_path: Path) -> None:
    """The first epoch of 8 steps ends in the window of steps 6 to 10, and is evaluated after it."""
    job = job_of(tmp_path, cluster={"failure_timeout": "2s"})
    train(tmp_path, job, "run", faults=[fault_points.Fault("evaluate.begun", "worker-1", "kill", 1)])
    found = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in found if event["type"] == "evaluation"] == [10, 20]


def test_a_resumed_run_continues_where_members_agreed(tmp_path: Path) -> None:
    """Without momentum no worker has anything of its own where all agree: the same bits."""
    job = job_of(tmp_path, optimizer={"momentum": 0.0}, strategy={"outer": DILOCO}, checkpoint={"every_steps": 5})
    whole, _ = train(tmp_path, job, "whole")
    train(tmp_path, job, "halves", "--set", "stop.steps=10")
    halves, _ = train(tmp_path, job, "halves", "--resume")
    assert halves["weights_sha256"] == whole["weights_sha256"]
    assert halves["samples"] == whole["samples"]


@pytest.mark.parametrize(
    "strategy",
    [
        {"sync_every": 6, "fragments": 2, "outer": DILOCO},
        {"sync_every": 6, "delay": 2},
        {"sync_every": 6, "fragments": 3, "delay": 1, "compress": "int8", "outer": DILOCO},
        {"sync_every": 5, "compress": {"use": "topk_2bit", "share": 0.2}},
        pytest.param({"sync_every": 5, "compress": {"use": "powersgd", "rank": 1}}, marks=pytest.mark.long),
        pytest.param({"sync_every": 5, "compress": "int4", "outer": DILOCO}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_parts_delays_and_compression_learn_and_members_agree(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """Members are compared at each commit; a loss in between and a resume are survived."""
    job = job_of(
        tmp_path,
        strategy=strategy,
        training={"steps": 60},
        checkpoint={"every_steps": 10},
        cluster={"failure_timeout": "2s"},
    )
    whole, _ = train(tmp_path, job, "whole", faults=[fault_points.Fault("step.taken", "worker-1", "kill", 16)])
    assert whole["recoveries"] == 1
    assert whole["samples"] + whole["samples_lost"] == 7 * 90 + 4 * 12
    steps = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in steps if event["type"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
    train(tmp_path, job, "halves", "--set", "stop.steps=20")
    halves, _ = train(tmp_path, job, "halves", "--resume")
    assert halves["samples"] == 7 * 90 + 4 * 12
    assert halves["train_loss"] < 0.8 * losses[0]


def test_at_the_end_everything_counts_also_what_was_learnt_while_a_part_was_on_its_way(tmp_path: Path) -> None:
    """One window of six steps: the exchange that began before the last two is made again with them."""
    short = {"training": {"steps": 6}}
    _, at_once = train(tmp_path, job_of(tmp_path, strategy={"sync_every": 6}, **short), "at-once")
    _, delayed = train(tmp_path, job_of(tmp_path, strategy={"sync_every": 6, "delay": 2}, **short), "delayed")
    for name, weight in at_once.items():
        assert torch.equal(delayed[name], weight), name


@pytest.mark.parametrize("strategy", [{"sync_every": 6, "delay": 2}, {"sync_every": 6, "fragments": 2}], ids=str)
def test_a_worker_that_is_lost_at_the_very_end_of_a_run_that_a_rule_stopped(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """All is saved when it is lost. The one left has learnt more than was agreed on, which its replacement has not."""
    job = job_of(
        tmp_path,
        strategy=strategy,
        training={"steps": 60},
        stop={"accuracy": 0.05},
        cluster={"failure_timeout": "2s"},
    )
    summary, weights = train(tmp_path, job, "run", faults=[fault_points.Fault("end.reached", "worker-1", "kill", 1)])
    assert (summary["status"], summary["recoveries"]) == ("stopped", 0) and summary["steps"] < 60
    assert summary["weights_sha256"] == weights_sha256(weights)


def test_fragments_with_one_step_each_are_the_mean_of_each(tmp_path: Path) -> None:
    """With as many steps alone as fragments, each parameter is agreed on every second step: as plain torch has it."""
    job = job_of(
        tmp_path, strategy={"sync_every": 2, "fragments": 2}, optimizer={"momentum": 0.0}, training={"steps": 9}
    )
    _, weights = train(tmp_path, job, "run")
    simulated = Simulated(job, 2)
    names = [name for name, _ in simulated.models[0].named_parameters()]
    halves = [names[:1], names[1:]]  # by bytes: the first weight has 48 of 83 numbers
    counts = {name: [0, 0] for name in names}
    for step in range(9):
        for index, part in enumerate(simulated.parts):
            inputs, targets = next(iter(simulated.shares(part, step, step + 1)))
            simulated.optimizers[index].zero_grad()
            torch.nn.functional.cross_entropy(simulated.models[index](inputs), targets).backward()
            simulated.optimizers[index].step()
            for name in names:
                counts[name][index] += len(inputs)
        agreed = names if step == 8 else halves[step % 2]  # at the end on all
        with torch.no_grad():
            for name in agreed:
                copies = [dict(model.named_parameters())[name] for model in simulated.models]
                begin = simulated.start[names.index(name)]
                total = sum(counts[name])
                begin += sum((own - begin) * (n / total) for own, n in zip(copies, counts[name], strict=True))
                counts[name] = [0, 0]
                for own in copies:
                    own.copy_(begin)
    simulated.assert_equal(weights)


@pytest.mark.parametrize(
    ("strategy", "training", "message"),
    [
        ({"sync_every": 0}, {}, "sync_every = 0 must be at least 1"),
        ({"fragments": 3}, {}, "not a multiple of strategy.fragments = 3"),
        ({"delay": 5}, {}, "strategy.delay = 5 must be at least 0 and below 5"),
        ({"outer": {"use": "sgdd"}}, {}, "strategy.outer"),
        ({"compress": "int5"}, {}, "strategy.compress.use = 'int5' does not fit"),
        ({"compress": {"use": "int8", "share": 0.1}}, {}, "strategy.compress.share is for"),
        ({"compress": {"use": "topk", "share": 2.0}}, {}, "strategy.compress.share = 2.0 must be above 0"),
        ({"sync_every": 70, "fragments": 7}, {}, "set fragments to at most 4"),
        ({}, {"reproducible": True}, "training.reproducible = true is for"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, strategy: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    from cordee.core.errors import JobError

    with pytest.raises(JobError, match=message):
        assemble(job_of(tmp_path, strategy=strategy, training=training), Team(0, 2))
