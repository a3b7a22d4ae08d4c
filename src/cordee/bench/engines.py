"""LeNet with two workers on every engine, beside torchrun, Ray Train and TorchDistributor on the same clusters.

Each contestant is a command that trains and ends. Measured are its speed between its lines, the time from the command
to the first step, and, in runs of their own, what the loss of a node costs. A bare start is as many processes on the
same cluster that import torch and do nothing: no training starts sooner. Clusters run all the time: their start is not
measured. Which engines take part depends on which packages are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cordee.bench.clusters import RayCluster, SparkCluster
from cordee.bench.engine_peers import BATCH_SIZE, NUM_WORKERS
from cordee.bench.harness import Report, describe_machine, goal_outcome, interleave, median_ratio
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
    rival: str = ""  # the engine of ours on the same cluster


class _Figures(NamedTuple):
    start_s: float
    speed: float  # samples/s


class _Loss(NamedTuple):
    """What the loss of a node cost."""

    next_step_s: float
    steps_redone: int
    replaced_s: float | None  # until the team was complete again; None for a peer, which is complete or not there


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    with ExitStack() as stack:
        contestants, bare = _contestants(stack, say)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cordee-bench-")))
        numbers = iter(range(10**9))

        def new_folder() -> Path:
            path = folder / str(next(numbers))
            path.mkdir()
            return path

        runs: dict[str, Callable[[], _Figures]] = {
            name: lambda one=one: _train(one, new_folder())  # type: ignore[misc]
            for name, one in contestants.items()
        }
        runs |= {
            _bare_name(name): lambda one=one: _start_bare(one, new_folder())  # type: ignore[misc]
            for name, one in bare.items()
        }
        figures = interleave(runs, rounds, say)
        losses: dict[str, list[_Loss | None]] = {name: [] for name, one in contestants.items() if one.cluster}
        for number in range(rounds):
            for name, found in losses.items():
                loss = _lose_node(contestants[name], new_folder())
                found.append(loss)
                say(f"{name}, loss {number + 1} of {rounds}: {'no further step' if loss is None else loss.next_step_s}")
    raw = {f"{name}, samples/s": [one.speed for one in figures[name]] for name in contestants}
    raw |= {f"{name}, start s": [one.start_s for one in found] for name, found in figures.items()}
    for name, found in losses.items():
        raw[f"{name}, loss to next step s"] = [-1.0 if one is None else one.next_step_s for one in found]
        raw[f"{name}, steps redone"] = [-1.0 if one is None else float(one.steps_redone) for one in found]
        if not contestants[name].rival:
            raw[f"{name}, loss to replacement s"] = [
                -1.0 if one is None or one.replaced_s is None else one.replaced_s for one in found
            ]
    rows = [_row(name, one.rival, figures, losses.get(name, [])) for name, one in contestants.items()]
    settings = {
        "model": "lenet",
        "data": image_data().use,
        "workers": NUM_WORKERS,
        "batch_size_per_worker": BATCH_SIZE,
        "steps": NUM_STEPS,
        "nodes_of_one_cpu": NUM_NODES,
        "rounds": rounds,
        "saved_every_steps_where_a_node_is_lost": SAVES_EVERY,
        "packages": _packages(),
    }
    return Report("engines", describe_machine(), settings, raw, "samples/s; s; -1 is no further step", rows)


def _bare_name(engine: str) -> str:
    return f"bare {engine}"


def _row(name: str, rival: str, figures: dict[str, list[_Figures]], losses: list[_Loss | None]) -> dict[str, Any]:
    def speeds(of: str) -> list[float]:
        return [one.speed for one in figures[of]]

    def starts(of: str) -> list[float]:
        return [one.start_s for one in figures[of]]

    engine = rival or name
    of_engine = median_ratio(speeds(engine), speeds(name))
    of_local = median_ratio(speeds(name), speeds("local"))
    bare = _bare_name(engine)
    of_bare = median_ratio(starts(name), starts(bare)) if bare in figures else None
    recovered = [one for one in losses if one is not None]
    replaced_s = [one.replaced_s for one in recovered if one.replaced_s is not None]
    next_step_s = statistics.median(one.next_step_s for one in recovered) if recovered else None
    redone = max((one.steps_redone for one in recovered), default=None)
    goals = {}
    if rival:
        goals["engine's speed"] = of_engine >= SPEED_GOAL
    elif name != "local":
        goals["speed"] = of_local >= LOCAL_GOAL
        goals["start"] = of_bare is not None and of_bare <= START_GOAL
        if losses:
            is_whole = len(recovered) == len(losses)
            goals["next step"] = is_whole and next_step_s is not None and next_step_s <= RECOVERY_GOAL_S
            goals["redone"] = is_whole and redone is not None and redone <= REDONE_GOAL
            goals["replaced"] = len(replaced_s) == len(losses) and statistics.median(replaced_s) <= REPLACED_GOAL_S
    return {
        "contestant": name,
        "samples_per_second": statistics.median(speeds(name)),
        "of_local": of_local,
        "our_engine_is_times": of_engine,
        "command_to_first_step_s": statistics.median(starts(name)),
        "of_bare_start": of_bare,
        "loss_to_next_step_s": next_step_s,
        "steps_redone": redone,
        "loss_to_replacement_s": statistics.median(replaced_s) if replaced_s else None,
        "never_continued": len(losses) - len(recovered) if losses else None,
        "goals": ", ".join(f"{goal} {goal_outcome(is_reached)}" for goal, is_reached in goals.items()),
    }


def _contestants(stack: ExitStack, say: Callable[[str], None]) -> tuple[dict[str, _Contestant], dict[str, _Contestant]]:
    """Return what trains, and the bare starts by engine."""
    found = {"local": _ours("local", None), "env": _ours("env", None), "torchrun": _peer("torchrun", None, "env")}
    bare = {"env": _peer("bare torchrun", None, "env")}
    clusters: dict[str, tuple[str, type[Clusters], str]] = {
        "ray": ("ray", RayCluster, "ray train"),
        "spark": ("pyspark", SparkCluster, "torchdistributor"),
    }
    for engine, (package, make, peer) in clusters.items():
        if importlib.util.find_spec(package) is None:
            say(f"{engine} is not measured: pip install 'cordee[{engine}]'")
            continue
        cluster = stack.enter_context(closing(make(NUM_NODES)))
        found[engine] = _ours(engine, cluster)
        found[peer] = _peer(peer, cluster, engine)
        bare[engine] = _peer(f"bare {engine}", cluster, engine)
    return found, bare


def _ours(engine: str, cluster: Clusters | None) -> _Contestant:
    def command(run: _Run) -> list[str]:
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
            "cluster": {"engine": engine, "connect": cluster.connect if cluster else "", "max_restarts": 100},
        }
        job = run.folder / "job.toml"
        job.write_text(Job(**tables).to_toml())
        starter = [*TORCHRUN, "-m"] if engine == "env" else ["-m"]
        return [sys.executable, *starter, "cordee", "train", str(job), "--run-dir", str(run.folder / "run"), "-q"]

    return _Contestant(command, "run/events.jsonl", cluster)


def _peer(name: str, cluster: Clusters | None, rival: str) -> _Contestant:
    def command(run: _Run) -> list[str]:
        counts = [str(run.num_steps), str(run.line_every), str(run.saves_every)]
        arguments = [name, cluster.connect if cluster else "", str(run.folder), *counts]
        starter = ["-m"] if cluster else [*TORCHRUN, "-m"]
        return [sys.executable, *starter, "cordee.bench.engine_peers", *arguments]

    return _Contestant(command, "events-0.jsonl", cluster, rival)


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
        killed_s = cluster.kill_node(cluster.busy_node())
        try:
            last_s, next_step, next_s = await_gap(steps, killed_s, process, RECOVERY_TIMEOUT_S)
            reached = max(step for at_s, step in steps() if at_s <= last_s)
            replaced_s = None if contestant.rival else _await_replacement(folder / contestant.lines, killed_s, process)
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
