"""LeNet with two workers on every engine, beside Ray Train and TorchDistributor on the same clusters.

Each contestant is a command that trains and ends. Measured are its speed between its lines, the time from the command
to the first line, and, in runs of their own, the time from the loss of a node to the next step. Clusters run all the
time: their start is not measured. Which engines take part depends on which packages are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cordee.bench.clusters import RayCluster, SparkCluster
from cordee.bench.engine_peers import BATCH_SIZE, LINE_EVERY, NUM_WORKERS
from cordee.bench.harness import Report, describe_machine, goal_outcome, interleave, median_ratio
from cordee.bench.loops import LEARNING_RATE, image_data
from cordee.bench.recovery import await_gap, read_lines, running, wait_for
from cordee.core import Job
from cordee.core.errors import CordeeError

ROUNDS = 5
NUM_STEPS = 1500
WARM_STEPS = 200  # before the speed is measured
SAVES_EVERY = 20
NUM_NODES = 3  # one more than workers: a node that is lost can be replaced
SPEED_GOALS = {"ray train": 1.3, "torchdistributor": 1.3}  # how many times as fast the engine of the cluster should be
LOCAL_GOAL = 0.95  # of the local engine's speed
RECOVERY_GOAL_S = 3.0


class _Contestant(NamedTuple):
    command: Callable[[Path, int, bool], list[str]]  # folder, steps, whether it saves
    lines: Callable[[Path], Path]
    cluster: RayCluster | SparkCluster | None
    rival: str = ""  # the engine of ours on the same cluster


class _Figures(NamedTuple):
    start_s: float
    speed: float  # samples/s


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    with ExitStack() as stack:
        contestants = _contestants(stack, say)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cordee-bench-")))
        numbers = iter(range(10**9))

        def take_round(contestant: _Contestant) -> _Figures:
            return _train(contestant, folder / str(next(numbers)))

        runs = {name: lambda one=one: take_round(one) for name, one in contestants.items()}
        figures = interleave(runs, rounds, say)
        losses: dict[str, list[tuple[float, int] | None]] = {
            name: [] for name, one in contestants.items() if one.cluster
        }
        for number in range(rounds):
            for name, found in losses.items():
                found.append(_lose_node(contestants[name], folder / str(next(numbers))))
                say(
                    f"{name}, loss {number + 1} of {rounds}: {'no further step' if found[-1] is None else found[-1][0]}"
                )
    raw = {f"{name}, samples/s": [one.speed for one in found] for name, found in figures.items()}
    raw |= {f"{name}, start s": [one.start_s for one in found] for name, found in figures.items()}
    raw |= {f"{name}, loss s": [-1.0 if one is None else one[0] for one in found] for name, found in losses.items()}
    rows = [_row(name, one, figures, losses) for name, one in contestants.items()]
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


def _row(
    name: str,
    contestant: _Contestant,
    figures: dict[str, list[_Figures]],
    losses: dict[str, list[tuple[float, int] | None]],
) -> dict[str, Any]:
    speeds = {other: [one.speed for one in found] for other, found in figures.items()}
    ours = contestant.rival or name
    of_ours = median_ratio(speeds[ours], speeds[name])
    of_local = median_ratio(speeds[name], speeds["local"])
    found = losses.get(name, [])
    recovered = [one for one in found if one is not None]
    outcomes = []
    if contestant.rival:
        outcomes.append(goal_outcome(of_ours >= SPEED_GOALS[name]))
    elif name != "local":
        outcomes.append(goal_outcome(of_local >= LOCAL_GOAL))
        outcomes.append(goal_outcome(bool(recovered) and max(seconds for seconds, _ in recovered) <= RECOVERY_GOAL_S))
    return {
        "contestant": name,
        "samples_per_second": statistics.median(speeds[name]),
        "of_local": of_local,
        "our_engine_is_times": of_ours,
        "command_to_first_step_s": statistics.median(one.start_s for one in figures[name]),
        "loss_to_next_step_s": statistics.median(seconds for seconds, _ in recovered) if recovered else None,
        "steps_taken_again": max((steps for _, steps in recovered), default=None),
        "never_continued": len(found) - len(recovered),
        "goals": ", ".join(outcomes),
    }


def _contestants(stack: ExitStack, say: Callable[[str], None]) -> dict[str, _Contestant]:
    found = {"local": _ours("local", None)}
    clusters: dict[str, tuple[str, type[RayCluster] | type[SparkCluster], str]] = {
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
    return found


def _ours(engine: str, cluster: RayCluster | SparkCluster | None) -> _Contestant:
    def command(folder: Path, num_steps: int, saves: bool) -> list[str]:
        tables: dict[str, Any] = {
            "name": "engines",
            "model": "lenet",
            "data": image_data(),
            "optimizer": {"use": "adam", "lr": LEARNING_RATE},
            "training": {"batch_size": BATCH_SIZE * NUM_WORKERS, "steps": num_steps, "threads": 1},
            "strategy": {"name": "data_parallel", "workers": NUM_WORKERS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": SAVES_EVERY if saves else 0},
            "monitoring": {"every_steps": LINE_EVERY},
            "cluster": {"engine": engine, "connect": cluster.connect if cluster else "", "max_restarts": 100},
        }
        (folder / "job.toml").write_text(Job(**tables).to_toml())
        return [
            sys.executable,
            "-m",
            "cordee",
            "train",
            str(folder / "job.toml"),
            "--run-dir",
            str(folder / "run"),
            "-q",
        ]

    return _Contestant(command, lambda folder: folder / "run" / "events.jsonl", cluster)


def _peer(name: str, cluster: RayCluster | SparkCluster, rival: str) -> _Contestant:
    def command(folder: Path, num_steps: int, saves: bool) -> list[str]:
        arguments = [name, cluster.connect, str(folder), str(num_steps), str(SAVES_EVERY if saves else 0)]
        return [sys.executable, "-m", "cordee.bench.engine_peers", *arguments]

    return _Contestant(command, lambda folder: folder / "events-0.jsonl", cluster, rival)


@contextmanager
def _started(contestant: _Contestant, folder: Path, num_steps: int, *, saves: bool) -> Iterator[Any]:
    folder.mkdir()
    with running(contestant.command(folder, num_steps, saves)) as process:
        yield process


def _steps(contestant: _Contestant, folder: Path) -> list[tuple[float, int]]:
    lines = read_lines(contestant.lines(folder))
    return [(line["time"], line["step"]) for line in lines if line.get("type") == "step"]


def _train(contestant: _Contestant, folder: Path) -> _Figures:
    began_s = time.time()
    with _started(contestant, folder, NUM_STEPS, saves=False) as process:
        wait_for(lambda: process.poll() is not None, process)
    steps = _steps(contestant, folder)
    warm = [(at_s, step) for at_s, step in steps if step >= WARM_STEPS]
    if process.returncode != 0 or len(warm) < 2:
        raise CordeeError(f"{process.args!r} failed with exit code {process.returncode} after {len(steps)} lines")
    (first_s, first), (last_s, last) = warm[0], warm[-1]
    return _Figures(steps[0][0] - began_s, (last - first) * BATCH_SIZE * NUM_WORKERS / (last_s - first_s))


def _lose_node(contestant: _Contestant, folder: Path) -> tuple[float, int] | None:
    """Kill a node that has a worker; return the seconds to the next step and the steps taken again, None if none came.

    The node is replaced afterwards.
    """
    cluster = contestant.cluster
    assert cluster is not None
    with _started(contestant, folder, 10**9, saves=True) as process:
        wait_for(lambda: len(_steps(contestant, folder)) >= 2 * WARM_STEPS // LINE_EVERY, process)
        killed_s = cluster.kill_node(cluster.busy_node())
        try:
            last_s, next_step, next_s = await_gap(lambda: _steps(contestant, folder), killed_s, process)
        except CordeeError:
            return None
        finally:
            cluster.add_node()
        reached = max(step for at_s, step in _steps(contestant, folder) if at_s <= last_s)
        return next_s - killed_s, max(0, reached + 1 - next_step)


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("ray", "pyspark", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
