"""The engine `env` under torchrun, Open MPI and Slurm, as users start it. Run by `make test-env`.

`make test` runs one of them, under torchrun. Those of mpirun and Slurm are skipped where these are missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import engine_runs as runs
import psutil
import pytest

pytestmark = pytest.mark.timeout(600)

BIN = Path(sys.executable).parent
CORDEE = str(BIN / "cordee")
SLURM = Path(__file__).parents[2] / "examples" / "cluster" / "slurm.sh"
SECRET = "the secret of the tests, of enough characters"

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
needs_slurm = pytest.mark.skipif(shutil.which("slurmctld") is None, reason="apt-get install slurm-wlm munge")


def torchrun(num_tasks: int, *options: str) -> tuple[str, ...]:
    return (str(BIN / "torchrun"), *options, "--nproc-per-node", str(num_tasks), "--no-python", CORDEE)


def mpirun(num_tasks: int) -> tuple[str, ...]:
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return ("mpirun", *root, "--oversubscribe", "-n", str(num_tasks), CORDEE)


def srun(*options: str) -> tuple[str, ...]:
    return (str(SLURM), "srun", *options, CORDEE)


LAUNCHERS = {
    "torchrun": (torchrun(2), "torchrun, 1 host × 2 tasks, this is host "),
    "mpirun": (mpirun(2), "Open MPI, 1 host × 2 tasks, this is host "),
    "srun": (srun("-N2", "--ntasks-per-node=1"), "Slurm, 2 hosts × 1 task, this is host node1"),
}
MARKS = {"mpirun": needs_mpirun, "srun": needs_slurm}
each_launcher = pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=MARKS.get(name, ())) for name in LAUNCHERS]
)


def train(
    folder: Path, command: Sequence[str], *settings: str, job: str = runs.JOB, **environment: str
) -> runs.Outcome:
    settings = ("cluster.engine=env", "cluster.failure_timeout=30s", *settings)
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", **environment}
    with runs.training(folder, *settings, job=job, command=tuple(command), **environment) as (process, run):
        output, _ = process.communicate(timeout=runs.TIMEOUT_S)
        return runs.Outcome(process.returncode, output, run)


def leftovers(folder: Path) -> list[str]:
    """Return the processes that still run for a run in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    outcome = runs.train(tmp_path_factory.mktemp("reference"), "training.reproducible=true")
    assert outcome.code == 0, outcome.output
    sha: str = outcome.summary["weights_sha256"]
    return sha


@each_launcher
def test_a_launch_trains_and_says_what_it_is(launcher: str, reference: str, tmp_path: Path) -> None:
    command, said = LAUNCHERS[launcher]
    outcome = train(tmp_path, command, *runs.settings_of("data_parallel"))
    assert outcome.code == 0, outcome.output
    assert f"engine: {said}" in outcome.output
    assert outcome.output.count("engine: ") == 1, "only rank 0 prints"
    assert outcome.summary["weights_sha256"] == reference
    runs.wait_until(lambda: not leftovers(tmp_path), 10.0)


@pytest.mark.parametrize("run", runs.EVERY_RUN)
def test_every_strategy_gives_the_weights_that_it_gives_elsewhere(run: str, tmp_path: Path) -> None:
    job = runs.job_of(run)
    own = ("training.reproducible=true",) if runs.entry_of(run).can_reproduce else runs.settings_of(run)
    alone = runs.train(tmp_path / "alone", *own, job=job)
    outcome = train(tmp_path / "env", torchrun(2), *runs.settings_of(run), job=job)
    assert alone.code == outcome.code == 0, alone.output + outcome.output
    assert outcome.summary["samples"] == alone.summary["samples"]
    assert outcome.summary["weights_sha256"] == alone.summary["weights_sha256"]


@each_launcher
def test_everybody_exits_with_the_code_of_rank_0(launcher: str, tmp_path: Path) -> None:
    """A mistake that only rank 0 finds is reported once, and nobody waits for rank 0."""
    began_s = time.monotonic()
    outcome = train(tmp_path, LAUNCHERS[launcher][0], "strategy.workers=3", "strategy.name=data_parallel")
    assert outcome.code not in (0, None), outcome.output
    assert outcome.output.count("cordee: the job has 3 workers") == 1, outcome.output
    assert time.monotonic() - began_s < 120.0
    runs.wait_until(lambda: not leftovers(tmp_path), 10.0)


def slot_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Return the process that the launcher started as this rank."""
    for child in runs.family_of(process.pid):
        if "train" in child.cmdline() and child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"there is no rank {rank}")


def test_a_killed_agent_is_replaced_by_its_slot(tmp_path: Path) -> None:
    """The scheduler sees nothing of it, and the weights are the same."""
    long = ("training.epochs=1000", "stop.steps=400", "training.reproducible=true", "cluster.wait_for_workers=60s")
    alone = runs.train(tmp_path / "alone", *long)
    settings = (*runs.settings_of("data_parallel"), *long, "cluster.engine=env")
    with runs.training(tmp_path / "env", *settings, command=torchrun(2)) as (process, run):
        runs.wait_until(lambda: len(runs.read_events(run, "step")) >= 20 or process.poll() is not None, 180.0)
        assert process.poll() is None, process.communicate()[0]
        (agent,) = [
            child for child in slot_of(process, 1).children() if "cordee.cluster.engines.agent" in child.cmdline()
        ]
        agent.kill()
        output, _ = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 0, output
    outcome = runs.Outcome(0, output, run)
    assert outcome.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert outcome.summary["recoveries"] >= 1 and outcome.summary["steps_redone"] <= 1
    assert [event["worker"] for event in outcome.events("worker_lost")]


def terminate(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM as the scheduler does. srun itself would kill its tasks for it."""
    srun_process = next((child for child in runs.family_of(process.pid) if child.name() == "srun"), None)
    if srun_process is None:
        process.terminate()
        return
    environment = {**os.environ, "SLURM_CONF": srun_process.environ()["SLURM_CONF"]}
    user = psutil.Process().username()
    subprocess.run(["scancel", "--signal=TERM", f"--user={user}"], env=environment, check=True, timeout=60)


@each_launcher
def test_sigterm_saves_the_run_and_ends_it(launcher: str, tmp_path: Path) -> None:
    """As a scheduler sends it at a time limit: to all processes."""
    long = ("training.epochs=1000", "stop.steps=3000", "training.reproducible=true", "cluster.engine=env")
    settings = (*runs.settings_of("data_parallel"), *long)
    command = LAUNCHERS[launcher][0]
    path = f"{BIN}:{os.environ['PATH']}"
    with runs.training(tmp_path / "env", *settings, command=command, PATH=path) as (process, run):
        runs.wait_until(lambda: len(runs.read_events(run, "step")) >= 20 or process.poll() is not None, 180.0)
        assert process.poll() is None, process.communicate()[0]
        terminate(process)
        output, _ = process.communicate(timeout=60.0)
    assert process.returncode != 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted", output
    assert list((run / "checkpoints").glob("step-*")), output
    runs.wait_until(lambda: not leftovers(tmp_path / "env"), 15.0)


def test_torchrun_that_starts_a_failed_job_again_resumes_it(tmp_path: Path) -> None:
    long = ("training.epochs=1000", "stop.steps=400", "training.reproducible=true", "checkpoint.every_steps=10")
    alone = runs.train(tmp_path / "alone", *long)
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "job.toml").write_text(runs.JOB)
    words = [w for s in (*runs.settings_of("data_parallel"), *long, "cluster.engine=env") for w in ("--set", s)]
    process = subprocess.Popen(
        [*torchrun(2, "--max-restarts=1"), "train", "job.toml", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        runs.wait_until(lambda: list(folder.glob("runs/*/checkpoints/step-*")) or process.poll() is not None, 180.0)
        assert process.poll() is None, process.communicate()[0]
        slot_of(process, 0).kill()
        output, _ = process.communicate(timeout=runs.TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    (run,) = folder.glob("runs/*")
    assert run.name.startswith("small-torchrun-")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] in ("completed", "stopped")
    assert summary["weights_sha256"] == alone.summary["weights_sha256"]


def test_elastic_torchrun_of_two_agents(tmp_path: Path) -> None:
    """Two torchruns find each other by c10d. They count as two hosts, so they need a secret."""
    (tmp_path / "job.toml").write_text(runs.JOB)
    port = 20_000 + os.getpid() % 10_000
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=e", "--local-addr=127.0.0.1")
    words = [w for s in (*runs.settings_of("data_parallel"), "cluster.engine=env") for w in ("--set", s)]
    command = [*torchrun(1, "--nnodes=2:2", *rendezvous), "train", "job.toml", "--run-dir", "run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CORDEE_SECRET": SECRET}
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=runs.TIMEOUT_S)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "engine: torchrun, 2 hosts × 1 task" in "".join(outputs)


def test_several_hosts_without_a_secret_are_refused(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    outcome = train(tmp_path, (CORDEE,), *runs.settings_of("data_parallel"), **variables)
    assert outcome.code == 2
    assert "there is no secret that they share" in outcome.output


def test_no_launcher_says_what_to_use(tmp_path: Path) -> None:
    outcome = train(tmp_path, (CORDEE,), *runs.settings_of("data_parallel"))
    assert outcome.code == 2
    assert "cordee: --engine env: no launcher is recognised" in outcome.output


@each_launcher
def test_doctor_says_whether_all_processes_meet(launcher: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher][0], "doctor", "--engine", "env"]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "CORDEE_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ok    rank 1 ")]
    assert line.endswith("sees the folder of runs")
    assert sum("reached" in line for line in done.stdout.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
