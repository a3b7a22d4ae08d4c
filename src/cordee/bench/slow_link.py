"""Two hosts with 10 Mbit/s between them: `local_sgd` beside DDP on gloo, plain and with PowerSGD; and a small GPT.

LeNet and ResNet-20 on Fashion-MNIST: all contestants take as many steps with the same shares of the same batches, and
measure the model on the same test samples after every 50th step, which is part of the time. A figure is the time to
the first measurement that reaches the accuracy, the accuracy after the last step, and the bytes that left both hosts
(counted by the network devices, with all headers). Each host computes with one thread, since both share the cores of
this machine. The GPT learns the documentation of this repository, or the licences of the system; the link has no limit
there, for loss and bytes do not depend on its speed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from cordee import checkpoint
from cordee.bench.harness import Place, Processes, Report, describe_machine, goal_outcome, measure_cases
from cordee.bench.two_hosts import count_bytes, enter_host, two_hosts
from cordee.cluster import Team
from cordee.communication.shared_memory import BackendSettings, register
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.data import Loader
from cordee.monitoring import AnyEvent, Monitor, events
from cordee.trainer import Trainer
from cordee.training.components import Components, assemble

ROUNDS = 1
RATE = 10e6  # bits a second
STEPS, EVERY, ACCURACY = 900, 50, 0.80
ANSWER_TIMEOUT_S = 1200.0  # 900 exchanges of LeNet's gradients by DDP alone take more than five minutes
SPEED_GOALS = {"ddp": 10.0, "ddp_powersgd": 2.0}
BYTES_GOAL, POINTS = 100.0, 0.01
LOSS_GOAL = 1.03
DILOCO = {"use": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
Raw = dict[str, list[float]]
Points = list[tuple[float, float, float]]  # seconds, loss, accuracy

LENET: dict[str, Any] = {
    "model": {"use": "lenet"},
    "data": {"use": "fashion-mnist", "test_limit": 2000},
    "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9},
    "training": {"batch_size": 64, "steps": STEPS, "threads": 1},
    "evaluation": {"every_steps": EVERY, "every_epochs": 0},
}
# Of batches of 64 computing alone would take a fifth of the time of an exchange here.
RESNET: dict[str, Any] = {
    **LENET,
    "model": {"use": "resnet", "depth": 20},
    "training": {"batch_size": 16, "steps": 400, "threads": 1},
}
IMAGES = {"lenet": LENET, "resnet20": RESNET}
GPT: dict[str, Any] = {
    "model": {"use": "gpt", "num_layers": 2, "num_heads": 4, "embedding_width": 64},
    "optimizer": {"use": "adamw", "lr": 0.002},
    "training": {"batch_size": 32, "steps": 600, "threads": 1},
    "evaluation": {"every_epochs": 0},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    # The mean learns as fast per step as DDP here. Outer momentum is slower at first (docs/benchmarks.md).
    "local_sgd": {"name": "local_sgd", "sync_every": EVERY},
    "local_sgd_int4": {"name": "local_sgd", "sync_every": EVERY, "compress": "int4"},
    "diloco": {"name": "local_sgd", "sync_every": EVERY, "outer": DILOCO, "compress": "int4"},
    "data_parallel": {"name": "data_parallel"},
}


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    cases: Sequence[str] = (),
    earlier: Report | None = None,
) -> Report:
    """Measure the cases that are named, or all: one contestant each, since DDP takes minutes."""
    if rounds < 1:
        raise JobError(f"rounds is {rounds}: it must be at least 1")
    measures: dict[str, Callable[[], Raw]] = {}
    for work, tables in IMAGES.items():
        for name in ("local_sgd", "local_sgd_int4"):
            main = partial(_train_cordee, _job(tables, STRATEGIES[name]))
            measures[f"{work}/{name}"] = partial(_measure, main, RATE, rounds)
        for name, has_hook in (("ddp", False), ("ddp_powersgd", True)):
            main = partial(_train_ddp, _job(tables, {"name": "data_parallel"}), has_hook)
            measures[f"{work}/{name}"] = partial(_measure, main, RATE, rounds)
    text = {**GPT, "data": {"use": "text", "path": _find_text(), "sequence": 64, "test_fraction": 0.1}}
    for name in ("data_parallel", "diloco"):
        measures[f"gpt/{name}"] = partial(_measure, partial(_train_cordee, _job(text, STRATEGIES[name])), 0.0, rounds)
    raw, dates = measure_cases(measures, cases, earlier, say)
    settings = {
        "bits_per_second": RATE,
        "steps": {work: tables["training"]["steps"] for work, tables in IMAGES.items()},
        "evaluated_every_steps": EVERY,
        "accuracy": ACCURACY,
        "strategies": STRATEGIES,
        "measured": dates,
    }
    return Report("slow_link", describe_machine(), settings, raw, "s, bytes", list(_rows(raw)))


def _rows(raw: Mapping[str, list[float]]) -> Iterable[dict[str, Any]]:
    for case in sorted({name.partition(": ")[0] for name in raw}):
        work, _, name = case.partition("/")
        own = {key: raw[f"{case}: {key}"] for key in ("seconds_to_accuracy", "accuracy", "loss", "bytes")}
        peer = "gpt/data_parallel" if work == "gpt" else f"{work}/ddp"
        fewer = _ratio(raw.get(f"{peer}: bytes"), own["bytes"])
        sooner = (
            {
                other: _ratio(raw.get(f"{work}/{other}: seconds_to_accuracy"), own["seconds_to_accuracy"])
                for other in SPEED_GOALS
            }
            if work in IMAGES
            else dict.fromkeys(SPEED_GOALS)
        )
        row: dict[str, Any] = {
            "work": work,
            "contestant": name,
            "seconds_to_accuracy": next(iter(own["seconds_to_accuracy"]), None),
            "accuracy": own["accuracy"][0] if work in IMAGES else None,
            "test_loss": own["loss"][0],
            "megabytes": own["bytes"][0] / 1e6,
            "times_fewer_bytes": fewer,
            **{f"times_sooner_than_{other}": times for other, times in sooner.items()},
        }
        yield {**row, "outcome": _outcome(raw, work, name, own, fewer, sooner)}


def _outcome(
    raw: Mapping[str, list[float]],
    work: str,
    name: str,
    own: Mapping[str, list[float]],
    fewer: float | None,
    sooner: Mapping[str, float | None],
) -> str:
    """Return whether the goals of a contestant are met; nothing for peers, and where peers were not measured."""
    if fewer is None or name in ("ddp", "ddp_powersgd", "data_parallel"):
        return ""
    if work == "gpt":
        return goal_outcome(fewer >= BYTES_GOAL and own["loss"][0] <= LOSS_GOAL * raw["gpt/data_parallel: loss"][0])
    is_fast = all((times or 0.0) >= SPEED_GOALS[other] for other, times in sooner.items())
    is_good = own["accuracy"][0] >= raw[f"{work}/ddp: accuracy"][0] - POINTS
    return goal_outcome(is_fast and is_good and fewer >= BYTES_GOAL)


def _ratio(theirs: list[float] | None, ours: list[float]) -> float | None:
    return theirs[0] / ours[0] if theirs and ours and ours[0] else None


def _find_text() -> str:
    docs = Path(__file__).parents[3] / "docs"
    return str(docs / "**" / "*.md") if docs.is_dir() else "/usr/share/common-licenses/*"


def _job(tables: Mapping[str, Any], strategy: Mapping[str, Any]) -> dict[str, Any]:
    return {**tables, "strategy": {**strategy, "workers": 2}, "checkpoint": {"every_steps": 0}, "name": "slow-link"}


def _measure(main: Callable[..., Points], rate: float, rounds: int) -> Raw:
    """Return the figures of a contestant, which answers with its curve: seconds, loss and accuracy."""
    raw: Raw = {key: [] for key in ("seconds_to_accuracy", "accuracy", "loss", "bytes", "seconds")}
    for _ in range(rounds):
        with two_hosts(rate) as names:
            with contextlib.closing(Processes(partial(_serve, names, main), 2, ANSWER_TIMEOUT_S)) as group:
                group.answers()  # that all is loaded
                before = count_bytes(names)
                curve = group.ask("go")[0]
            raw["bytes"].append(float(count_bytes(names) - before))
        reached = [seconds for seconds, _, accuracy in curve if accuracy >= ACCURACY]
        raw["seconds_to_accuracy"] += reached[:1]  # none where it was never reached: a file has no infinity
        seconds, loss, accuracy = curve[-1]
        for key, value in (("accuracy", accuracy), ("loss", loss), ("seconds", seconds)):
            raw[key].append(value)
    return raw


def _serve(names: Sequence[str], main: Callable[..., Any], place: Place, pipe: Connection) -> None:
    enter_host(names[place.rank])

    def await_start() -> None:
        pipe.send("ready")
        pipe.recv()

    pipe.send(main(place, await_start))
    time.sleep(60)  # until it is ended: leaving would end the others' connections


class _Curve:
    """Keeps what was measured, and when."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.points: Points = []

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, events.Evaluation):
            self.points.append(
                (time.perf_counter() - self.started_s, event.test_loss or 0.0, event.test_accuracy or 0.0)
            )

    def refresh(self, step: int, loss: object) -> None:
        pass

    def close(self) -> None:
        pass


def _train_cordee(
    job: dict[str, Any], place: Place, await_start: Callable[[], None]
) -> list[tuple[float, float, float]]:
    register()
    dist.init_process_group(
        "cordee",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.size,
        pg_options=BackendSettings(encrypt=True),
    )
    parts = _parts(job, place)
    await_start()
    curve = _Curve()
    with Monitor([curve]) as monitor:
        trainer = Trainer(parts, monitor, checkpoint.Folder(Path(place.folder) / f"saved-{place.rank}"))
        parts.setup()
        trainer.enter(parts, None)
        trainer.run()
    return curve.points


def _parts(job: dict[str, Any], place: Place) -> Components:
    return assemble(Job.from_dict(job), Team(place.rank, place.size, num_local_workers=1, local_rank=0, generation=1))


def _train_ddp(job: dict[str, Any], has_hook: bool, place: Place, await_start: Callable[[], None]) -> Points:
    """Train with torch alone; data, model and optimizer are the job's."""
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    parts = _parts(job, place)
    await_start()
    started_s, curve = time.perf_counter(), []
    model = DistributedDataParallel(parts.model)
    if has_hook:
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = parts.recipe.make(parts.model.named_parameters())
    num_steps = parts.job.training.steps or 0
    step, epoch = 0, 0
    while step < num_steps:
        with contextlib.closing(parts.train.batches(epoch, 0)) as batches:
            for inputs, targets in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call, arg-type]
                optimizer.step()
                step += 1
                if step % EVERY == 0:
                    assert parts.test is not None
                    curve.append((time.perf_counter() - started_s, *_evaluate(parts.model, parts.test)))
                if step == num_steps:
                    break
        epoch += 1
    return [(float(seconds), loss, accuracy) for seconds, loss, accuracy in curve]


def _evaluate(model: torch.nn.Module, test: Loader) -> tuple[float, float]:
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad(), contextlib.closing(test.batches(0)) as batches:
        for inputs, targets in batches:
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")  # type: ignore[arg-type]
            totals += torch.tensor([float(loss), float((outputs.argmax(1) == targets).sum()), float(len(targets))])
    model.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])
