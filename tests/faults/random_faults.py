"""Runs with random faults, compared with the same runs undisturbed: a silent difference is the worst that can happen.

    PYTHONPATH=tests:tests/faults python -m random_faults --runs 300 --results results.jsonl

Each run follows from its seed: the strategy (`data_parallel` or `parameter_server` with staleness 0 and two of each
server, reproducible), the number of workers, a model of 10 thousand to 20 million parameters, and up to five faults:
any process killed or frozen, two at once, at start-up, in the final save, at a fault point or at a random moment. A run
that is in the results already is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import msgspec
import psutil
from fault_trials import check_gone, family, last_files, read_summary

from cordee.core import fault_points
from cordee.core.fault_points import Fault
from cordee.tools.audit import audit_run
from warm_launch import WarmProcess, WarmServer

RUN_LIMIT_S = 240.0
MOST_FAULTS = 5
HIDDEN = {"10 k": [64], "100 k": [256, 128], "1 M": [896, 512], "5 M": [2048, 1536], "20 M": [4096, 3584]}
SHARES = {
    "10 k": 6,
    "100 k": 6,
    "1 M": 4,
    "5 M": 2,
    "20 M": 1,
}  # of the runs: large models take minutes on a busy machine
STEPS = {"10 k": 24, "100 k": 24, "1 M": 20, "5 M": 12, "20 M": 8}
JOB = """
[model]
use = "mlp"
hidden = {hidden}
dropout = 0.1
[data]
use = "synthetic"
shape = [128]
num_classes = 10
size = 256
test_size = 64
[optimizer]
use = "adam"
lr = 0.001
[training]
batch_size = 32
steps = {steps}
reproducible = true
shards = 4
threads = 1
[strategy]
name = "{strategy}"
workers = {workers}
{more}
[cluster]
failure_timeout = "3s"
max_restarts = 100
[monitoring]
every_steps = 1
[checkpoint]
every_steps = {save_every}
keep = 2
"""
WITH_SERVERS = "servers = 2\nreplicas = 2\nstaleness = 0"
# Points that every run passes many times, for faults that do not go by the clock.
TEAM_POINTS = (
    "link.ready",
    "rendezvous.formed",
    "enter.set_up",
    "enter.done",
    "step.begun",
    "step.taken",
    "save.begun",
)
TEAM_POINTS += ("checkpoint.rename", "checkpoint.saved", "end.reached", "link.send_goodbye")
COORDINATOR_POINTS = ("coordinator.decided", "journal.written", "coordinator.committed", "coordinator.directed")


class Hit(msgspec.Struct, frozen=True):
    """A fault at a moment: so long after the run has reported `step`, to a process of a role."""

    step: int
    delay_s: float
    action: Literal["kill", "freeze"]
    role: str  # as its event says: worker, server, evaluator, coordinator
    chance: float  # from 0 to 1: which of them
    count: int = 1  # how many at once


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    strategy: str
    workers: int
    model: str
    save_every: int
    hits: list[Hit]
    points: list[Fault]


class Report(msgspec.Struct, frozen=True):
    """What came of a run; `problem` is empty if its weights are those of the undisturbed run."""

    plan: Plan
    problem: str
    is_silent: bool  # it said that all is well, and is wrong
    num_faults: int
    seconds: float
    ended: str


def plan_run(seed: int, strategies: list[str], models: list[str]) -> Plan:
    """Return what run `seed` is. Pure."""
    chance = random.Random(seed)
    strategy = chance.choice(strategies)
    num_faults = chance.randint(1, MOST_FAULTS)
    hits: list[Hit] = []
    points: list[Fault] = []
    workers = chance.randint(2, 3)
    is_team = strategy != "parameter_server"
    model = chance.choices(models, [SHARES[name] for name in models])[0]
    num_steps = STEPS[model]
    roles = ["worker", "worker", "coordinator"] if is_team else ["worker", "server", "server", "coordinator"]
    while len(points) + sum(hit.count for hit in hits) < num_faults:
        action: Literal["kill", "freeze"] = chance.choice(["kill", "kill", "freeze"])
        if is_team and chance.random() < 0.5:
            point = chance.choice(TEAM_POINTS + COORDINATOR_POINTS)
            process = "coordinator" if point in COORDINATOR_POINTS else f"worker-{chance.randrange(workers)}"
            points.append(Fault(point, process, action, chance.randint(1, 3)))
        else:
            step = chance.choice([0, 0, chance.randrange(num_steps), chance.randrange(num_steps), num_steps])
            left = num_faults - len(points) - sum(hit.count for hit in hits)
            count = 2 if is_team and left > 1 and chance.random() < 0.3 else 1
            hits.append(Hit(step, chance.uniform(0.0, 0.3), action, chance.choice(roles), chance.random(), count))
    return Plan(
        seed=seed,
        strategy=strategy,
        workers=workers,
        model=model,
        save_every=chance.choice([5, 8, 1000]),
        hits=sorted(hits, key=lambda hit: (hit.step, hit.delay_s)),
        points=points,
    )


class RandomFaults:
    """Carries plans out, and compares what comes of them."""

    def __init__(self, server: WarmServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._expected: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
        self._lock = Lock()

    def run(self, plan: Plan) -> Report:
        expected = self._expect(plan)
        started_s = time.monotonic()
        folder = self._folder / f"run-{plan.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        process, ended, num_faults, is_silent = self._start(folder, plan, plan.points), "", 0, False
        try:
            num_faults = self._hit(process, folder, plan)
            problem, is_silent, ended = self._judge(process, folder, plan, expected)
            num_faults += len(fault_points.happened(folder / "faults"))
        except (AssertionError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            for left in family(folder):
                with contextlib.suppress(psutil.Error):
                    left.kill()
        if not problem:
            shutil.rmtree(folder, ignore_errors=True)
        return Report(plan, problem, is_silent, num_faults, round(time.monotonic() - started_s, 1), ended)

    def _expect(self, plan: Plan) -> tuple[str, dict[str, str]]:
        """Return the weights of the undisturbed run, and the files of its last checkpoint."""
        key = (plan.strategy, plan.model)
        with self._lock:
            if key not in self._expected:
                folder = self._folder / f"undisturbed-{plan.strategy}-{plan.model}".replace(" ", "")
                process = self._start(folder, msgspec.structs.replace(plan, workers=2, save_every=1000), [])
                _, stderr = process.communicate(RUN_LIMIT_S)
                assert process.returncode == 0, stderr
                weights = read_summary(folder / "run")["weights_sha256"]
                self._expected[key] = (weights, last_files(folder / "run"))
                shutil.rmtree(folder / "run")
            return self._expected[key]

    def _start(self, folder: Path, plan: Plan, faults: list[Fault], *, resume: bool = False) -> WarmProcess:
        (folder / "temporary").mkdir(parents=True, exist_ok=True)
        more = WITH_SERVERS if plan.strategy == "parameter_server" else ""
        job = JOB.format(
            hidden=HIDDEN[plan.model],
            steps=STEPS[plan.model],
            strategy=plan.strategy,
            workers=plan.workers,
            more=more,
            save_every=plan.save_every,
        )
        (folder / "job.toml").write_text(job)
        environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
        if not resume:
            environment |= fault_points.ask_for(folder / "faults", faults)
        arguments = ["train", str(folder / "job.toml"), "--run-dir", str(folder / "run"), "-q"]
        options = ["--resume"] if resume else []
        return self._server.cordee(*arguments, *options, folder=folder, environment=environment)

    def _hit(self, process: WarmProcess, folder: Path, plan: Plan) -> int:
        """Have the faults of the clock happen; return how many did."""
        num_hits = 0
        for hit in plan.hits:
            while process.poll() is None and _last_step(folder) < hit.step:
                time.sleep(0.005)
            time.sleep(hit.delay_s)
            chance = random.Random(hit.chance)
            pids = _processes(folder, hit.role)
            for pid in chance.sample(pids, min(hit.count, len(pids))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if hit.action == "kill" else signal.SIGSTOP)
                    num_hits += 1
        return num_hits

    def _judge(
        self, process: WarmProcess, folder: Path, plan: Plan, expected: tuple[str, dict[str, str]]
    ) -> tuple[str, bool, str]:
        """Return what is wrong, whether the run kept it to itself, and how it ended."""
        try:
            _, stderr = process.communicate(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it hangs: {[(one.pid, one.status()) for one in family(folder)]}", False, "hangs"
        check_gone(folder)
        ended = "completed"
        if process.returncode != 0:  # it said so: what it saved must be right
            ended = f"resumed after: {stderr.strip()[-500:]}"
            process = self._start(folder, plan, [], resume=True)
            _, stderr = process.communicate(RUN_LIMIT_S)
            if process.returncode != 0:
                return f"cannot be resumed: {stderr[-1000:]}", False, ended
        summary, run_dir = read_summary(folder / "run"), folder / "run"
        unsound = {finding.subject: finding.detail for finding in audit_run(run_dir) if finding.state == "problem"}
        if summary["updates_lost"] and unsound.keys() == {"updates"}:  # both processes of a server were hit at once
            return "", False, f"{summary['updates_lost']} updates lost, which the summary and the audit say"
        if summary["weights_sha256"] != expected[0]:
            return "other weights", True, ended
        num_steps = STEPS[plan.model]
        if (summary["steps"], summary["samples"]) != (num_steps, num_steps * 32):
            return f"{summary['steps']} steps, {summary['samples']} samples", True, ended
        if (files := last_files(run_dir)) != expected[1]:
            return f"other contents of the last checkpoint: {files} instead of {expected[1]}", True, ended
        return (f"the audit says: {unsound}" if unsound else ""), False, ended


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line) for line in lines if line.endswith(b"}")]


def _last_step(folder: Path) -> int:
    return max((event["step"] for event in _events(folder) if event["type"] == "step"), default=0)


def _processes(folder: Path, role: str) -> list[int]:
    """Return the living processes of a role, by the events."""
    if role == "coordinator":
        found = [event["pid"] for event in _events(folder) if event["type"] == "coordinator_started"][-1:]
    else:
        found = [e["pid"] for e in _events(folder) if e["type"] == "worker_started" and e.get("role") == role]
    return [pid for pid in dict.fromkeys(found) if psutil.pid_exists(pid)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--strategy", action="append", choices=["data_parallel", "parameter_server"])
    parser.add_argument("--model", action="append", choices=HIDDEN, help="only models of this size")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("random-faults.jsonl"))
    options = parser.parse_args()
    lines = options.results.read_bytes().splitlines() if options.results.exists() else []
    known = [msgspec.json.decode(line, type=Report) for line in lines]
    strategies, models = options.strategy or ["data_parallel", "parameter_server"], options.model or list(HIDDEN)
    seeds = range(options.first_seed, options.first_seed + options.runs)
    plans = [plan_run(seed, strategies, models) for seed in seeds if seed not in {one.plan.seed for one in known}]
    folder = Path(tempfile.mkdtemp(prefix="random-faults-"))
    found = list(known)
    with WarmServer() as server, ThreadPoolExecutor(options.at_once) as pool:
        for report in pool.map(RandomFaults(server, folder).run, plans):
            found.append(report)
            with options.results.open("ab") as file:
                file.write(msgspec.json.encode(report) + b"\n")
            plan, what = report.plan, report.problem or report.ended.splitlines()[0]
            print(f"{plan.seed:4} {plan.strategy} {plan.model} {report.num_faults} faults {report.seconds} s: {what}")
            sys.stdout.flush()
    wrong = [report for report in found if report.problem]
    silent = [report for report in wrong if report.is_silent]
    num_faults = sum(report.num_faults for report in found)
    print(f"{len(found)} runs, {num_faults} faults, {len(wrong)} wrong, {len(silent)} of them silent; {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
