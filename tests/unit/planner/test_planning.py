"""What a plan says of strategies that would refuse the job, and of questions that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cordee
from cordee.core.errors import JobError
from cordee.planner.plan import refuse_without_choice, render_plan
from cordee.strategies.table import STRATEGIES

CLUSTER = """
[devices.gpu]
speed = 1.0
memory = "16 GB"
[[hosts]]
name = "node"
device = "gpu"
devices = 4
[links]
inside = { bandwidth = "100 GB/s" }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))


def job(**sections: Any) -> dict[str, Any]:
    tokens = {"use": "synthetic", "kind": "tokens", "shape": [8], "num_classes": 32, "size": 64, "test_size": 8}
    gpt = {"use": "gpt", "num_layers": 2, "num_heads": 2, "embedding_width": 16}
    return {"model": gpt, "data": tokens, "training": {"batch_size": 16, "threads": 1}, **sections}


def plan(tmp_path: Path, table: dict[str, Any], **options: Any) -> cordee.Plan:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return cordee.plan(table, cluster=file, budget_s=0.05, **options)


def test_a_number_of_workers_that_is_refused_leaves_the_others(tmp_path: Path) -> None:
    found = plan(tmp_path, job())
    meshes = [p.settings["mesh"] for p in found.predictions if p.strategy == "hybrid"]
    assert meshes and all(mesh.get("tensor", 2) == 2 for mesh in meshes)
    assert "2 heads of" in found.refusals["tensor on 4 workers"]
    assert "tensor" not in found.refusals
    two, four = found.find("tensor", 2), found.find("tensor", 4)
    assert two is not None and not found.is_refused(two) and four is not None and found.is_refused(four)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render_plan(found))
    assert {p.strategy for p in found.predictions} <= STRATEGIES.keys()  # nothing is predicted that does not exist
    assert "✗ does not fit into memory, or would refuse the job" in captured.get()


def test_a_reason_that_does_not_depend_on_the_number_is_said_once(tmp_path: Path) -> None:
    found = plan(tmp_path, job(optimizer={"use": "adafactor", "lr": 0.01}))
    assert "may look at whole parameters" in found.refusals["sharded"]
    # The best mesh, which times decide, may have a sharded axis, and is then refused under its own name.
    assert sum(line.startswith("sharded ") for line in found.explain()) == 1


def test_a_model_that_is_no_chain_has_no_pipelines_predicted(tmp_path: Path) -> None:
    digits = {"use": "synthetic", "shape": [6], "num_classes": 3, "size": 64, "test_size": 8}
    found = plan(tmp_path, job(model={"use": "small_jobs:Net"}, data=digits))
    assert found.find("pipeline", 2) is None
    assert any(line.startswith("pipeline is not predicted: the model is no nn.Sequential") for line in found.explain())


def test_whatever_fits_refuses_the_job() -> None:
    with pytest.raises(JobError, match=r"no strategy that fits .* would run this job\. sharded: another optimizer; t"):
        refuse_without_choice([], {"sharded": "another optimizer", "tensor on 2 workers": "odd widths"})


@pytest.mark.parametrize("budget_s", [0, -1, float("nan"), "soon"])
def test_times_to_measure_for_that_are_none(budget_s: Any) -> None:
    with pytest.raises(JobError, match="is no time to measure for: give seconds, more than 0"):
        cordee.plan(job(), budget_s=budget_s)


@pytest.mark.parametrize("workers", [0, -1, 2.5, True])
def test_numbers_of_workers_that_are_none(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(JobError, match="is not a number of workers to look at: give 1 or more"):
        plan(tmp_path, job(), workers=workers)
