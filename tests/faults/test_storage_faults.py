"""Checkpoints in a real S3 server and in folders, with faults: slow, failing, refusing, killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import warm_launch
from cordee.core import fault_points
from cordee.core.fault_points import Fault
from s3_server import KEYS, Proxy, Seen, environment, make_bucket, request, s3_server

JOB = """
name = "stored"
model = { use = "mlp", hidden = [16], dropout = 0.1 }
data = { use = "synthetic", shape = [8], num_classes = 3, size = 64, test_size = 16 }
optimizer = { use = "adam", lr = 0.01 }
training = { batch_size = 16, steps = 12, threads = 1, reproducible = true }
checkpoint = { every_steps = 4, keep = 2 }
monitoring = { every_steps = 1 }
cluster = { failure_timeout = "3s" }
"""
TIMEOUT_S = 120.0
SECRETS = (KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def proxy(s3: int, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with Proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3: int, tmp_path: Path) -> str:
    name = f"b{abs(hash(str(tmp_path))):x}"
    make_bucket(s3, name)
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "shared").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run ends with that has no storage and is not interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.toml").write_text(JOB)
    train(folder, "run")
    return summary(folder / "run")


class Ended:
    """How a command ended. Nothing that it printed or wrote may have a secret in it."""

    def __init__(self, folder: Path, process: warm_launch.WarmProcess) -> None:
        stdout, stderr = process.communicate(TIMEOUT_S)
        self.code, self.output = process.returncode, stdout + stderr
        texts = [self.output, *(path.read_text(errors="replace") for path in folder.rglob("*") if is_text(path))]
        assert not any(secret in text for secret in SECRETS for text in texts), "a secret was written down"


def is_text(path: Path) -> bool:
    return path.is_file() and path.suffix in (".log", ".jsonl", ".toml", ".json")


def start(
    folder: Path, run: str | None, *options: str, env: Mapping[str, str] | None = None, quiet: bool = False
) -> warm_launch.WarmProcess:
    arguments = ["train", "job.toml", *(["--run-dir", run] if run else []), *options, *(["-q"] if quiet else [])]
    return warm_launch.start(*arguments, folder=folder, environment={**os.environ, **(env or {})})


def train(folder: Path, run: str | None, *options: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    ended = Ended(folder, start(folder, run, *options, env=env))
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output, ended.output
    return ended.output


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def storing(url: str) -> tuple[str, str]:
    return "--set", f"checkpoint.storage='{url}'"


def objects(port: int, bucket: str) -> set[str]:
    """Return the keys in a bucket."""
    listing = request(port, "GET", f"/{bucket}?list-type=2&max-keys=1000").decode()
    return {part.partition("</Key>")[0] for part in listing.split("<Key>")[1:]}


def steps_of(keys: set[str], run: str) -> list[int]:
    """Return the steps whose checkpoints are complete by their manifests."""
    ends = [key.removeprefix(f"{run}/checkpoints/step-") for key in keys if key.startswith(f"{run}/checkpoints/")]
    return sorted(int(end.removesuffix("/manifest.json")) for end in ends if end.endswith("/manifest.json"))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("status", "steps", "samples", "weights_sha256"):
        assert found[key] == expected[key], key


def wait_for(condition: Any, process: warm_launch.WarmProcess) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def lose_directory(folder: Path, run: str = "run") -> None:
    """What another machine has: the job, and no run directory."""
    shutil.rmtree(folder / run)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kind", ["s3", "folder", pytest.param("file", marks=pytest.mark.long)])
def test_resumed_from_the_storage_it_ends_with_the_same_weights(
    folder: Path, s3: int, bucket: str, expected: dict[str, Any], kind: str, workers: int
) -> None:
    url = {"s3": f"s3://{bucket}/models", "folder": str(folder / "shared"), "file": f"file://{folder}/shared"}[kind]
    env = environment(s3)
    options = ("--workers", str(workers), *storing(url))
    train(folder, "run", *options, "--set", "stop.steps=8", env=env)
    first = summary(folder / "run")
    assert first["not_in_storage"] == [] and first["steps"] == 8
    assert [event["step"] for event in events(folder / "run", "stored")][-1] == 8
    lose_directory(folder)
    train(folder, "run", *options, "--resume", env=env)
    found = summary(folder / "run")
    same(found, expected)
    assert found["not_in_storage"] == []
    assert [event["step"] for event in events(folder / "run", "fetched")] == [8]
    assert [event["start_step"] for event in events(folder / "run", "run_started")] == [8]
    if kind == "s3":
        keys = {key.removeprefix("models/") for key in objects(s3, bucket)}
        assert steps_of(keys, "run") == [8, 12], "keep = 2 holds there as well"
        assert {"run/run.json", "run/job.toml"} < keys
    else:
        assert sorted(path.name for path in (folder / "shared/run/checkpoints").iterdir()) == ["step-12", "step-8"]


def test_resumed_from_the_storage_with_parameter_servers(folder: Path, expected: dict[str, Any]) -> None:
    options = (*storing("shared"), "--strategy", "parameter_server", "--workers", "2")
    train(folder, "run", *options, "--set", "stop.steps=8")
    lose_directory(folder)
    train(folder, "run", *options, "--resume")
    same(summary(folder / "run"), expected)


def test_without_a_name_the_newest_run_of_the_job_is_found(folder: Path, expected: dict[str, Any]) -> None:
    for number in range(2):
        train(folder, None, *storing("shared"), "--set", f"stop.steps={4 + 4 * number}")
        time.sleep(1.1)
    names = sorted(path.name for path in (folder / "shared").iterdir())
    shutil.rmtree(folder / "runs")
    output = train(folder, None, *storing("shared"), "--resume")
    assert [path.name for path in (folder / "runs").iterdir()] == [names[-1]]
    assert f"step-8 was brought from {folder}/shared/{names[-1]}/checkpoints/step-8" in output
    same(summary(folder / "runs" / names[-1]), expected)


def test_a_local_directory_that_is_behind_continues_from_the_storage(folder: Path, expected: dict[str, Any]) -> None:
    train(folder, "run", *storing("shared"), "--set", "stop.steps=4")
    shutil.copytree(folder / "run", folder / "earlier")
    train(folder, "run", *storing("shared"), "--set", "stop.steps=8", "--resume")
    lose_directory(folder)
    (folder / "earlier").rename(folder / "run")
    train(folder, "run", *storing("shared"), "--resume")
    same(summary(folder / "run"), expected)
    assert [event["start_step"] for event in events(folder / "run", "run_started")][-1] == 8


def test_the_best_one_comes_along(folder: Path) -> None:
    options = (*storing("shared"), "--set", "checkpoint.keep_best=true", "--set", "checkpoint.keep=1")
    options = (*options, "--set", "evaluation.every_steps=1", "--set", "optimizer.lr=0.0")  # the first is the best
    train(folder, "run", *options, "--set", "stop.steps=8")
    lose_directory(folder)
    train(folder, "run", *options, "--resume")
    assert summary(folder / "run")["best_step"] == 1
    for place in (folder / "run/checkpoints", folder / "shared/run/checkpoints"):
        assert sorted(path.name for path in place.iterdir()) == ["step-1", "step-12"]


# What is wrong with what is there


def test_where_nothing_is_complete_the_run_does_not_begin_again(folder: Path) -> None:
    train(folder, "run", *storing("shared"))
    for step, name in ((12, "model.safetensors"), (8, "optimizer.safetensors")):
        file = folder / f"shared/run/checkpoints/step-{step}/{name}"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    lose_directory(folder)
    output = train(folder, "run", *storing("shared"), "--resume", code=1)
    assert f"no checkpoint in {folder}/shared/run is complete: " in " ".join(output.split())
    assert "step-12/model.safetensors does not match its SHA-256" in output
    assert "step-8/optimizer.safetensors does not match its SHA-256" in output


def test_an_incomplete_and_a_changed_one_fall_back_loudly(
    folder: Path, s3: int, bucket: str, expected: dict[str, Any]
) -> None:
    options, env = (*storing(f"s3://{bucket}"), "--set", "checkpoint.keep=3"), environment(s3)
    train(folder, "run", *options, env=env)
    assert steps_of(objects(s3, bucket), "run") == [4, 8, 12]
    place = f"/{bucket}/run/checkpoints"
    request(s3, "DELETE", f"{place}/step-12/manifest.json")
    content = request(s3, "GET", f"{place}/step-8/model.safetensors")
    request(s3, "PUT", f"{place}/step-8/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    lose_directory(folder)
    output = " ".join(train(folder, "run", *options, "--resume", env=env).split())
    assert "checkpoint step-12 of the storage cannot be used" in output and "has no manifest.json" in output
    assert "checkpoint step-8 of the storage cannot be used" in output and "does not match its SHA-256" in output
    assert "using step-4" in output
    same(summary(folder / "run"), expected)
    assert steps_of(objects(s3, bucket), "run") == [4, 8, 12]
    lose_directory(folder)
    train(folder, "run", *options, "--resume", env=env)
    assert not events(folder / "run", "warning"), "both were put again"
    same(summary(folder / "run"), expected)


# Bad input


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://there-is-no-such-bucket/x", "is not there: make it first"),
        ("nowhere", "is not there: make it (mkdir -p"),
        ("hdf://x", "'hdf' is no protocol that fsspec knows; did you mean 'hdfs'?"),
        ("gs://x", "needs a package that is not installed"),
        ("http://127.0.0.1:9/x", "checkpoint.storage"),
        ("s3://key:hunter2@bucket", "has credentials in the URL"),
    ],
)
def test_bad_storages_are_refused_before_anything_begins(folder: Path, s3: int, url: str, words: str) -> None:
    output = train(
        folder, "run", *storing(url), code=1 if "is not there" in words or "http" in url else 2, env=environment(s3)
    )
    assert words in " ".join(output.split()), output
    assert output.count("cordee:") == 1 and "hunter2" not in output
    assert not (folder / "run").exists()


def test_a_folder_that_may_not_be_written(folder: Path, s3: int, bucket: str, proxy: Proxy) -> None:
    proxy.decide = lambda seen: 403 if seen.method in ("PUT", "POST") else None
    output = train(folder, "run", *storing(f"s3://{bucket}"), code=1, env=environment(proxy.port))
    assert "permission denied" in output and f"s3://{bucket}/run/run.json" in output
    assert not (folder / "run").exists()


def test_credentials_that_are_missing(folder: Path, s3: int, bucket: str) -> None:
    env = {**environment(s3), "HOME": str(folder)}
    env = {**os.environ, **env}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del env[name]
    process = warm_launch.start(
        "train", "job.toml", "--run-dir", "run", *storing(f"s3://{bucket}"), folder=folder, environment=env
    )
    ended = Ended(folder, process)
    assert ended.code == 1 and "credentials" in ended.output and "Traceback" not in ended.output, ended.output


def test_nobody_listens(folder: Path) -> None:
    output = train(folder, "run", *storing("s3://bucket/x"), code=1, env=environment(9))
    assert "s3://bucket/x" in output and not (folder / "run").exists()


def test_a_run_that_is_there_already_and_none_to_resume(folder: Path) -> None:
    train(folder, "run", *storing("shared"))
    lose_directory(folder)
    output = train(folder, "run", *storing("shared"), code=2)
    assert "holds a run already" in output and "--resume" in output
    assert not (folder / "run").exists()
    output = train(folder, "other", *storing("shared"), "--resume", code=2)
    assert "no run 'other'" in output and "it has: run" in output
    output = train(folder, None, *storing("shared"), "--resume", "--set", "name=another", code=2)
    assert f"no run of 'another' in runs or in {folder}/shared to resume" in " ".join(output.split())
    output = train(folder, "run", *storing("shared"), "--resume", "--set", "optimizer.lr=0.5", code=2)
    assert "optimizer.lr was 0.01, is 0.5" in output


def test_two_live_runs_do_not_write_to_one_place(folder: Path) -> None:
    faults = folder / "faults"
    hold = Fault("step.begun", "launcher", "hold", 6)
    env = fault_points.ask_for(faults, [hold])
    first = start(folder, "run", *storing("shared"), env=env)
    try:
        wait_for(lambda: hold in fault_points.happened(faults), first)
        (folder / "elsewhere").mkdir()
        output = train(folder, "elsewhere/run", *storing("shared"), code=2)
        assert "holds a run already, of process" in output
        output = train(folder, "elsewhere/run", *storing("shared"), "--resume", code=2)
        assert f"is written by process {first.pid} on host" in output and "which is alive" in output
    finally:
        fault_points.release(faults, hold)
        assert Ended(folder, first).code == 0


# Members


def test_a_storage_that_only_one_of_two_members_sees(folder: Path, bucket: str, proxy: Proxy) -> None:
    allowed: list[int | None] = []

    def decide(seen: Seen) -> int | None:
        """The launcher, which is the first, and the first of the others may read the mark."""
        if seen.method != "GET" or not seen.path.partition("?")[0].endswith("/run.json"):
            return None
        pid = seen.pid
        if pid not in allowed and len(allowed) < 2:
            allowed.append(pid)
        return None if pid in allowed else 403

    proxy.decide = decide
    options = (*storing(f"s3://{bucket}"), "--workers", "2")
    output = train(folder, "run", *options, code=1, env=environment(proxy.port))
    flat = " ".join(output.split())
    assert "must be readable for every member of the run, and 1 of 2 cannot read it: worker-" in flat
    assert f" on host {os.uname().nodename}: cannot read s3://{bucket}/run/run.json: permission denied" in flat
    assert not events(folder / "run", "step"), "no step was taken"
    train(folder, "run", *options, "--resume", env=environment(proxy.port), code=1)


def test_a_worker_that_joins_late_and_sees_nothing_is_named(folder: Path, bucket: str, proxy: Proxy) -> None:
    refused: list[int] = []
    faults = folder / "faults"
    hold = Fault("step.begun", "worker-0", "hold", 5)
    env = {**environment(proxy.port), **fault_points.ask_for(faults, [hold])}
    process = start(folder, "run", *storing(f"s3://{bucket}"), "--workers", "2", env=env)
    wait_for(lambda: hold in fault_points.happened(faults), process)
    joiner = warm_launch.start("join", "run", folder=folder, environment={**os.environ, **env})
    proxy.decide = lambda seen: 403 if seen.path.endswith("/run.json") and seen.pid == joiner.pid else None
    try:
        wait_for(
            lambda: any("cannot read the storage" in e["message"] for e in events(folder / "run", "warning")), process
        )
    finally:
        fault_points.release(faults, hold)
    assert Ended(folder, process).code == 0 and not refused
    joiner.communicate(TIMEOUT_S)


# Faults under way


def test_failing_and_slow_requests_cost_time_and_nothing_else(
    folder: Path, s3: int, bucket: str, proxy: Proxy, expected: dict[str, Any]
) -> None:
    proxy.decide = lambda seen: (503, 0, 500)[seen.number // 4 % 3] if seen.number % 4 == 0 else None
    proxy.delay_s = 0.02
    options, env = storing(f"s3://{bucket}"), environment(proxy.port)
    train(folder, "run", *options, "--set", "stop.steps=8", env=env)
    assert proxy.num_failed > 5 and summary(folder / "run")["not_in_storage"] == []
    lose_directory(folder)
    train(folder, "run", *options, "--resume", env=env)
    same(summary(folder / "run"), expected)
    assert steps_of(objects(s3, bucket), "run") == [8, 12]


def test_a_storage_that_refuses_later_is_a_warning(
    folder: Path, s3: int, bucket: str, proxy: Proxy, expected: dict[str, Any]
) -> None:
    proxy.decide = lambda seen: 403 if "/step-12/" in seen.path and seen.method in ("PUT", "POST") else None
    options = storing(f"s3://{bucket}")
    output = " ".join(train(folder, "run", *options, env=environment(proxy.port)).split())
    assert "warning: checkpoint step-12 is not in the storage: cannot write" in output
    assert f"not in s3://{bucket}/run: step-12. The run directory has it" in output
    found = summary(folder / "run")
    same(found, expected)
    assert found["not_in_storage"] == [12] and 12 not in steps_of(objects(s3, bucket), "run")
    train(folder, "run", *options, "--resume", env=environment(s3))
    assert summary(folder / "run")["not_in_storage"] == [] and 12 in steps_of(objects(s3, bucket), "run")


@pytest.mark.long  # writing is tried again for half a minute
def test_a_storage_that_becomes_full_is_a_warning(folder: Path, expected: dict[str, Any]) -> None:
    """A file system of 12 KB: there is room for the entry of the run with its job and data, and for no checkpoint."""
    shared = str(folder / "shared")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "none", shared], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        output = " ".join(train(folder, "run", *storing("shared")).split())
        assert f"cannot write {shared}/run/checkpoints/step-12/model.safetensors: No space left on device" in output
        assert "step-8, step-12. The run directory has them; --resume there puts what is missing" in output
        found = summary(folder / "run")
        same(found, expected)
        assert found["not_in_storage"] == [8, 12]
    finally:
        subprocess.run(["umount", shared], check=True)


def test_ctrl_c_leaves_while_the_storage_is_waited_for(folder: Path, bucket: str, proxy: Proxy) -> None:
    proxy.decide = lambda seen: time.sleep(60) if "/step-12/" in seen.path and seen.method == "PUT" else None  # type: ignore[func-returns-value]
    process = start(folder, "run", *storing(f"s3://{bucket}"), env=environment(proxy.port))
    wait_for(lambda: events(folder / "run", "uploading"), process)
    left_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = Ended(folder, process)
    assert time.monotonic() - left_s < 15
    flat = " ".join(ended.output.split())
    assert ended.code == 0 and "training is over; waiting for s3://" in flat
    assert "; Ctrl-C leaves without" in flat and "step-12. The run directory has " in flat
    assert 12 in summary(folder / "run")["not_in_storage"]


@pytest.mark.parametrize("point", ["storage.claimed", "storage.put_file", "storage.put_manifest", "storage.put_done"])
def test_killed_in_the_middle_of_an_upload(
    folder: Path, s3: int, bucket: str, expected: dict[str, Any], point: str
) -> None:
    """On another machine it continues from what is complete, on the same one from what the directory has."""
    hold = Fault("step.begun", "launcher", "hold", 7)  # so that the first checkpoint is put before the next
    kill = Fault(point, "launcher", "kill", {"storage.put_file": 5, "storage.claimed": 1}.get(point, 2))
    faults = folder / "faults"
    env = {**environment(s3), **fault_points.ask_for(faults, [hold, kill])}
    process = start(folder, "run", *storing(f"s3://{bucket}"), env=env)
    if point != "storage.claimed":
        wait_for(lambda: events(folder / "run", "stored"), process)
        fault_points.release(faults, hold)
    process.communicate(TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL
    complete = steps_of(objects(s3, bucket), "run")
    assert complete == {"storage.claimed": [], "storage.put_done": [4, 8]}.get(point, [4]), complete
    if point == "storage.claimed":
        train(folder, "run", *storing(f"s3://{bucket}"), "--resume", env=environment(s3))
        same(summary(folder / "run"), expected)
        return
    shutil.copytree(folder / "run", folder / "kept" / "run")
    lose_directory(folder)
    train(folder, "run", *storing(f"s3://{bucket}"), "--resume", env=environment(s3))
    same(summary(folder / "run"), expected)
    assert [event["start_step"] for event in events(folder / "run", "run_started")] == [complete[-1]]
    train(folder, "kept/run", *storing(f"s3://{bucket}"), "--resume", env=environment(s3))
    same(summary(folder / "kept" / "run"), expected)
