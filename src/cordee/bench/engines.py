"""LeNet with two workers on every engine, beside torchrun, Ray Train and TorchDistributor on the same clusters.

Each contestant is a command that trains and ends. Measured are its speed between its lines, the time from the command
to the first step, and, in runs of their own, what the loss of a node costs. A bare start is as many processes on the
same cluster that import torch and do nothing: no training starts sooner. Clusters run all the time: their start is not
measured. Each engine has cases of its own (`speed/ray`, `loss/ray`), with the local engine beside it. Which engines
take part depends on which packages are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cordee.bench.clusters import RayCluster, SparkCluster
from cordee.bench.engine_peers import BATCH_SIZE, NUM_WORKERS
from cordee.bench.harness import (
    Report,
    describe_machine,
    goal_outcome,
    interleave,
    measure_cases,
    median_ratio,
)
from cordee.bench.loops import LEARNING_RATE, image_data
from cordee.bench.recovery import await_gap, read_lines, running, wait_for
from cordee.core import Job
from cordee.core.errors import CordeeError

ROUNDS = 5
NUM_STEPS = 1500
WARM_STEPS = 200  # before the speed is measured
LINE_EVERY = 20  # steps; what Cordée does unless it is told otherwise
SAVES_EVERY = 20  # steps, where a node is lost
STEPS_BEFORE_LOSS = 100
NUM_NODES = 3  # one more than workers: a node that is lost can be replaced
TIMEOUT_S = 600.0  # for a training; a busy machine takes minutes to start a JVM
RECOVERY_TIMEOUT_S = 120.0
SPEED_GOAL = 1.3  # how many times as fast as the peer the engine of the cluster should be
LOCAL_GOAL = 0.95  # of the local engine's speed
START_GOAL = 1.5  # of the bare start
RECOVERY_GOAL_S, REPLACED_GOAL_S, REDONE_GOAL = 3.0, 10.0, 1
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]

Clusters = RayCluster | SparkCluster
Raw = dict[str, list[float]]


class _Kind(NamedTuple):
    """An engine, and who else trains on its cluster."""

    peer: str
    package: str = ""  # that is needed
    make_cluster: Callable[[int], Clusters] | None = None  # of so many nodes; None needs no cluster


KINDS: Mapping[str, _Kind] = {
    "env": _Kind("torchrun"),
    "ray": _Kind("ray train", "ray", RayCluster),
    "spark": _Kind("torchdistributor", "pyspark", SparkCluster),
}


class _Run(NamedTuple):
    """What a contestant is asked to do."""

    folder: Path
    num_steps: int
    line_every: int
    saves_every: int


class _Contestant(NamedTuple):
    command: Callable[[_Run], list[str]]
    lines: str  # the file with its steps, in the folder of the run
    cluster: Clusters | None
    is_peer: bool = False


class _Figures(NamedTuple):
    start_s: float
    speed: float  # samples/s


class _Loss(NamedTuple):
    """What the loss of a node cost."""

    next_step_s: float
    steps_redone: int
    replaced_s: float | None  # until the team was complete again; None for a peer, which is complete or not there


def measure(
    *, rounds: int, say: Callable[[str], None], cases: Sequence[str] = (), earlier: Report | None = None
) -> Report:
    """Measure the cases that are named, or all; figures of other cases in `earlier` are kept."""
    measures: dict[str, Callable[[], Raw]] = {}
    for engine, kind in KINDS.items():
        if kind.package and importlib.util.find_spec(kind.package) is None:
            say(f"{engine} is not measured: pip install 'cordee[{engine}]'")
            continue
        measures[f"speed/{engine}"] = partial(_measure_speed, engine, rounds, say)
        if kind.make_cluster is not None:
            measures[f"loss/{engine}"] = partial(_measure_loss, engine, rounds, say)
    raw, dates = measure_cases(measures, cases, earlier, say)
    settings = {
        "model": "lenet",
        "data": image_data().use,
        "workers": NUM_WORKERS,
        "batch_size_per_worker": BATCH_SIZE,
        "steps": NUM_STEPS,
        "nodes_of_one_cpu": NUM_NODES,
        "spares_where_a_node_is_lost": NUM_NODES - NUM_WORKERS,
        "saved_every_steps_where_a_node_is_lost": SAVES_EVERY,
        "packages": _packages(),
        "measured": dates,
    }
    rows = [row for engine in KINDS if f"speed/{engine}" in dates for row in _speed_rows(engine, raw)]
    rows += [row for engine in KINDS if f"loss/{engine}" in dates for row in _loss_rows(engine, raw)]
    return Report("engines", describe_machine(), settings, raw, "samples/s; s; -1 is no further step", rows)


@contextmanager
def _cluster_of(engine: str) -> Iterator[Clusters | None]:
    make = KINDS[engine].make_cluster
    with nullcontext() if make is None else closing(make(NUM_NODES)) as cluster:
        yield cluster


@contextmanager
def _folders() -> Iterator[Callable[[], Path]]:
    """Inside, a function is there that makes a new folder with each call."""
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        numbers = iter(range(10**9))

        def make() -> Path:
            path = Path(folder) / str(next(numbers))
            path.mkdir()
            return path

        yield make


def _measure_speed(engine: str, rounds: int, say: Callable[[str], None]) -> Raw:
    peer, bare = KINDS[engine].peer, _bare_name(engine)
    with _cluster_of(engine) as cluster, _folders() as make_folder:
        contestants = {"local": _ours("local", None), engine: _ours(engine, cluster), peer: _peer(peer, cluster)}
        runs: dict[str, Callable[[], _Figures]] = {
            name: lambda one=one: _train(one, make_folder())  # type: ignore[misc]
            for name, one in contestants.items()
        }
        starter = _peer("bare torchrun" if cluster is None else bare, cluster)
        runs[bare] = lambda: _start_bare(starter, make_folder())
        figures = interleave(runs, rounds, say)
    raw = {f"{name}, samples/s": [one.speed for one in figures[name]] for name in contestants}
    return raw | {f"{name}, start s": [one.start_s for one in found] for name, found in figures.items()}


def _measure_loss(engine: str, rounds: int, say: Callable[[str], None]) -> Raw:
    peer = KINDS[engine].peer
    raw: Raw = {}
    with _cluster_of(engine) as cluster, _folders() as make_folder:
        for number in range(rounds):
            for name, one in ((engine, _ours(engine, cluster)), (peer, _peer(peer, cluster))):
                loss = _lose_node(one, make_folder())
                say(f"{name}, loss {number + 1} of {rounds}: {'no further step' if loss is None else loss}")
                raw.setdefault(f"{name}, next step s", []).append(-1.0 if loss is None else loss.next_step_s)
                raw.setdefault(f"{name}, steps redone", []).append(-1.0 if loss is None else float(loss.steps_redone))
                if not one.is_peer:
                    replaced_s = None if loss is None else loss.replaced_s
                    raw.setdefault(f"{name}, replacement s", []).append(-1.0 if replaced_s is None else replaced_s)
    return raw


def _bare_name(engine: str) -> str:
    return f"bare {engine}"


def _speed_rows(engine: str, raw: Raw) -> list[dict[str, Any]]:
    def figures(name: str, what: str) -> list[float]:
        return raw[f"speed/{engine}: {name}, {what}"]

    rows, peer = [], KINDS[engine].peer
    for name in ("local", engine, peer):
        of_local = median_ratio(figures(name, "samples/s"), figures("local", "samples/s"))
        of_peer = median_ratio(figures(engine, "samples/s"), figures(name, "samples/s"))
        of_bare = median_ratio(figures(name, "start s"), figures(_bare_name(engine), "start s"))
        goals = {}
        if name == engine:
            goals = {"speed": of_local >= LOCAL_GOAL, "start": of_bare <= START_GOAL}
        elif name == peer:
            goals = {"our speed": of_peer >= SPEED_GOAL}
        measured = {
            "samples_per_second": statistics.median(figures(name, "samples/s")),
            "of_local": of_local,
            "our_engine_is_times": of_peer,
            "command_to_first_step_s": statistics.median(figures(name, "start s")),
            "of_bare_start": of_bare,
        }
        rows.append(_row(f"speed/{engine}", name, measured, goals))
    return rows


def _loss_rows(engine: str, raw: Raw) -> list[dict[str, Any]]:
    rows = []
    for name in (engine, KINDS[engine].peer):
        next_s, redone, replaced_s = (
            raw.get(f"loss/{engine}: {name}, {what}", []) for what in ("next step s", "steps redone", "replacement s")
        )
        recovered_s, known_s = [one for one in next_s if one >= 0], [one for one in replaced_s if one >= 0]
        measured = {
            "loss_to_next_step_s": statistics.median(recovered_s) if recovered_s else None,
            "steps_redone": max(redone),
            "loss_to_replacement_s": statistics.median(known_s) if known_s else None,
            "never_continued": len(next_s) - len(recovered_s),
        }
        goals = {}
        if name == engine:
            has_all = len(recovered_s) == len(next_s)
            goals["next step"] = has_all and statistics.median(recovered_s) <= RECOVERY_GOAL_S
            goals["redone"] = has_all and max(redone) <= REDONE_GOAL
            goals["replaced"] = len(known_s) == len(next_s) and statistics.median(known_s) <= REPLACED_GOAL_S
        rows.append(_row(f"loss/{engine}", name, measured, goals))
    return rows


_COLUMNS = (
    "samples_per_second",
    "of_local",
    "our_engine_is_times",
    "command_to_first_step_s",
    "of_bare_start",
    "loss_to_next_step_s",
    "steps_redone",
    "loss_to_replacement_s",
    "never_continued",
)


def _row(case: str, name: str, measured: Mapping[str, float | None], goals: Mapping[str, bool]) -> dict[str, Any]:
    return {
        "case": case,
        "contestant": name,
        **{column: measured.get(column) for column in _COLUMNS},
        "goals": ", ".join(f"{goal} {goal_outcome(is_reached)}" for goal, is_reached in goals.items()),
    }


def _ours(engine: str, cluster: Clusters | None) -> _Contestant:
    def command(run: _Run) -> list[str]:
        # Of the nodes one is free: it is held ready where a node is lost.
        spares = NUM_NODES - NUM_WORKERS if cluster is not None and run.saves_every else 0
        tables: dict[str, Any] = {
            "name": "engines",
            "model": "lenet",
            "data": image_data(),
            "optimizer": {"use": "adam", "lr": LEARNING_RATE},
            "training": {"batch_size": BATCH_SIZE * NUM_WORKERS, "steps": run.num_steps, "threads": 1},
            "strategy": {"name": "data_parallel", "workers": NUM_WORKERS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": run.saves_every},
            "monitoring": {"every_steps": run.line_every},
            "cluster": {
                "engine": engine,
                "connect": cluster.connect if cluster else "",
                "max_restarts": 100,
                "spares": spares,
            },
        }
        job = run.folder / "job.toml"
        job.write_text(Job(**tables).to_toml())
        starter = [*TORCHRUN, "-m"] if engine == "env" else ["-m"]
        return [sys.executable, *starter, "cordee", "train", str(job), "--run-dir", str(run.folder / "run"), "-q"]

    return _Contestant(command, "run/events.jsonl", cluster)


def _peer(name: str, cluster: Clusters | None) -> _Contestant:
    def command(run: _Run) -> list[str]:
        counts = [str(run.num_steps), str(run.line_every), str(run.saves_every)]
        arguments = [name, cluster.connect if cluster else "", str(run.folder), *counts]
        starter = ["-m"] if cluster else [*TORCHRUN, "-m"]
        return [sys.executable, *starter, "cordee.bench.engine_peers", *arguments]

    return _Contestant(command, "events-0.jsonl", cluster, is_peer=True)


@contextmanager
def _started(contestant: _Contestant, run: _Run) -> Iterator[Any]:
    log = run.folder / "output.log"
    with running(contestant.command(run), log) as process:
        try:
            yield process
        except CordeeError as error:
            raise CordeeError(f"{error}:\n{log.read_text(errors='replace')[-2000:]}") from None


def _steps(contestant: _Contestant, folder: Path) -> list[tuple[float, int]]:
    lines = read_lines(folder / contestant.lines)
    return [(line["time"], line["step"]) for line in lines if line.get("type") == "step"]


def _train(contestant: _Contestant, folder: Path) -> _Figures:
    began_s = time.time()
    with _started(contestant, _Run(folder, NUM_STEPS, LINE_EVERY, 0)) as process:
        _wait_for_end(process)
        steps = _steps(contestant, folder)
        warm = [(at_s, step) for at_s, step in steps if step >= WARM_STEPS]
        if len(warm) < 2:
            raise CordeeError(f"{process.args!r} wrote {len(steps)} lines, the last for {steps[-1:]}")
    (first_s, first), (last_s, last) = warm[0], warm[-1]
    step_s = (last_s - first_s) / (last - first)
    line_s, line_step = steps[0]
    return _Figures(line_s - (line_step - 1) * step_s - began_s, BATCH_SIZE * NUM_WORKERS / step_s)


def _start_bare(contestant: _Contestant, folder: Path) -> _Figures:
    began_s = time.time()
    with _started(contestant, _Run(folder, 0, 0, 0)) as process:
        _wait_for_end(process)
    ready_s = [line["time"] for rank in range(NUM_WORKERS) for line in read_lines(folder / f"events-{rank}.jsonl")]
    assert len(ready_s) == NUM_WORKERS
    return _Figures(max(ready_s) - began_s, 0.0)


def _wait_for_end(process: Any) -> None:
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CordeeError(f"{process.args!r} did not end within {TIMEOUT_S:g} s") from None
    if status != 0:
        raise CordeeError(f"{process.args!r} failed with exit code {status}")


def _lose_node(contestant: _Contestant, folder: Path) -> _Loss | None:
    """Kill a node that has a worker; return what that cost, None if no further step came.

    The node is replaced afterwards.
    """
    cluster = contestant.cluster
    assert cluster is not None

    def steps() -> list[tuple[float, int]]:
        return _steps(contestant, folder)

    with _started(contestant, _Run(folder, 10**9, 1, SAVES_EVERY)) as process:
        wait_for(lambda: len(steps()) >= STEPS_BEFORE_LOSS, process, TIMEOUT_S)
        lines = read_lines(folder / contestant.lines)
        workers = {line["pid"] for line in lines if line.get("type") == "worker_started"}  # spares have agents too
        killed_s = cluster.kill_node(cluster.busy_node(workers))
        try:
            last_s, next_step, next_s = await_gap(steps, killed_s, process, RECOVERY_TIMEOUT_S)
            reached = max(step for at_s, step in steps() if at_s <= last_s)
            replaced_s = (
                None if contestant.is_peer else _await_replacement(folder / contestant.lines, killed_s, process)
            )
        except CordeeError:
            return None
        finally:
            cluster.forget_dead()
            cluster.add_node()
    return _Loss(next_s - killed_s, max(0, reached + 1 - next_step), replaced_s)


def _await_replacement(path: Path, killed_s: float, process: Any) -> float | None:
    """Return the seconds until the team had all its workers again; None if it had not."""

    def complete() -> list[float]:
        teams = [line for line in read_lines(path) if line.get("type") == "generation"]
        return [team["time"] - killed_s for team in teams if len(team["members"]) == NUM_WORKERS]

    try:
        wait_for(lambda: any(after_s > 0 for after_s in complete()), process, RECOVERY_TIMEOUT_S)
    except CordeeError:
        return None
    return min(after_s for after_s in complete() if after_s > 0)


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("ray", "pyspark", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
