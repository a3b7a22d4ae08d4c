"""What the engines refuse before they look for a cluster; that there is none of their packages here is part of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cordee.checkpoint.storage import Storage
from cordee.cluster.engines import ENGINES, check_settings, environment, find_engine, ray, spark
from cordee.cluster.engines.agents import EngineRequest
from cordee.core import Job, env
from cordee.core.errors import JobError, MissingExtraError
from cordee.core.launchers import LaunchedTask


def job(**cluster: Any) -> Job:
    tables: dict[str, Any] = {"model": "mlp", "data": "digits", "cluster": cluster}
    return Job(**tables)


def request(**cluster: Any) -> EngineRequest:
    return EngineRequest(job=job(**cluster), num_slots=2)


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_a_missing_package_is_named_with_its_extra(engine: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    make_source = {"ray": ray, "spark": spark}[engine].make_source
    with pytest.raises(MissingExtraError, match=rf"pip install 'cordee\[{engine}\]'"):
        make_source(request(engine=engine))


def test_addresses_of_proxies_are_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"Ray Client.*ray job submit"):
        ray.make_source(request(engine="ray", connect="ray://head:10001"))
    with pytest.raises(JobError, match=r"Spark Connect.*spark://HOST:7077"):
        spark.make_source(request(engine="spark", connect="sc://head"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.setenv("SPARK_REMOTE", "sc://head")
    with pytest.raises(JobError, match="Ray Client"):
        ray.make_source(request(engine="ray"))
    with pytest.raises(JobError, match="Spark Connect"):
        spark.make_source(request(engine="spark"))


def test_connect_is_for_engines_that_connect() -> None:
    check_settings(job(engine="ray", connect="head:6379"))
    with pytest.raises(JobError, match=r"cluster.connect = 'head:6379'.*'ray' or 'spark'.*'local'"):
        check_settings(job(connect="head:6379"))


def test_spares_are_for_engines_that_ask_for_agents() -> None:
    for engine in ("agents", "ray", "spark"):
        check_settings(job(engine=engine, spares=1))
    for engine in ("local", "env"):
        with pytest.raises(JobError, match=r"cluster.spares = 1 .*'agents', 'ray', 'spark'.*reserves"):
            check_settings(job(engine=engine, spares=1))


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError, match="did you mean 'spark'"):
        find_engine("sparc")
    assert {"local", "ray", "spark"} <= ENGINES.keys()


def test_a_job_that_is_started_again_on_another_host_continues_from_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    stored = Job.from_dict({"model": "mlp", "data": "iris", "checkpoint": {"storage": str(tmp_path / "shared")}})
    task = LaunchedTask(
        launcher="Slurm", rank=0, world_size=1, local_rank=0, num_hosts=1, tasks_per_host=1, host="b", restart_count=1
    )
    monkeypatch.setattr(env, "launched_task", lambda: task)
    assert environment.place_run(stored, tmp_path / "run", False) == (tmp_path / "run", False), "it never got that far"
    owner = {"run": "r", "attempt": "a", "job": "x", "host": "a", "host_id": "h", "pid": 1, "started": 1.0}
    Storage(stored.checkpoint.storage).write("run/run.json", msgspec.json.encode(owner))
    assert environment.place_run(stored, tmp_path / "run", False) == (tmp_path / "run", True)
    monkeypatch.setattr(env, "launched_task", lambda: msgspec.structs.replace(task, restart_count=0))
    assert environment.place_run(stored, tmp_path / "run", False) == (tmp_path / "run", False), "a first start is none"


def test_how_an_agent_of_spark_ended_is_said_in_words() -> None:
    assert spark._describe(0) == ""
    assert spark._describe(None) == "its Spark executor was lost"
    assert "OSError: no memory" in spark._describe("OSError: no memory")
    assert "killed" in spark._describe(-9) or "SIGKILL" in spark._describe(-9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "x\nExecutorLostFailure (executor 0 exited caused by one of the running tasks)",
            "its Spark executor was lost",
        ),
        ("Traceback\nModuleNotFoundError: No module named 'cordee'", "cordee is not installed for the Python"),
        (
            "An error occurred\n: org.apache.spark.SparkException: Could not parse Master URL: 'x'",
            "Could not parse Master",
        ),
        ("", "ValueError"),
    ],
)
def test_what_spark_says_is_cut_to_one_line(text: str, reason: str) -> None:
    said = spark.reason_of(ValueError(text))
    assert reason in said
    assert "\n" not in said
