"""Which GPU a worker takes, what it draws there, and where a model is while it is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cordee.cluster import Team
from cordee.compute import devices, gpus
from cordee.compute.computation import read_numbers
from cordee.compute.gpus import choose_gpu, generator_of, lock_gpu, random_state, release_gpus, set_random_state
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.training.components import assemble, require_one_kind


def test_each_worker_takes_the_gpu_of_its_place() -> None:
    assert [choose_gpu(place, ["a", "b", "c"], lambda gpu: True) for place in range(4)] == [0, 1, 2, 0]


def test_a_worker_takes_a_free_gpu_where_its_own_is_taken() -> None:
    taken = {"b"}
    assert choose_gpu(1, ["a", "b", "c"], lambda gpu: gpu not in taken) == 2
    assert choose_gpu(5, ["a", "b", "c"], lambda gpu: gpu == "b") == 1  # the sixth of a run, the third of its host


def test_where_all_are_taken_a_gpu_is_shared() -> None:
    assert choose_gpu(4, ["a", "b", "c"], lambda gpu: False) == 1


def test_without_gpus_the_place_is_kept() -> None:
    assert choose_gpu(3, [], lambda gpu: False) == 3


def test_a_gpu_is_one_process_of_this_user_until_it_ends(tmp_path: Path) -> None:
    other = (
        "import sys; from pathlib import Path; from cordee.compute.gpus import lock_gpu\n"
        "print(lock_gpu('GPU-1', Path(sys.argv[1])), flush=True)"
    )

    def ask() -> str:
        run = subprocess.run([sys.executable, "-c", other, str(tmp_path)], capture_output=True, text=True, timeout=60)
        return run.stdout.strip()

    try:
        assert lock_gpu("GPU-1", tmp_path) and lock_gpu("GPU-1", tmp_path)
        assert ask() == "False"
    finally:
        release_gpus()
    assert ask() == "True"
    assert lock_gpu("GPU-1", tmp_path)  # that process has ended
    release_gpus()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / f"cordee-{os.getuid()}-gpu-x").symlink_to(tmp_path / "elsewhere")
    assert not lock_gpu("x", tmp_path)


def test_device_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    assert devices.choose_device("auto", 1) == torch.device("cuda", 1)
    assert devices.choose_device("cuda", 2) == torch.device("cuda", 0)
    assert devices.choose_device("cpu", 1) == torch.device("cpu")
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    assert devices.choose_device("auto", 1) == torch.device("cpu")
    with pytest.raises(JobError, match="sees no GPU"):
        devices.choose_device("cuda", 0)


def test_random_numbers_of_gpus_are_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", own)
    assert generator_of(torch.device("cuda")) is own[1] and generator_of(torch.device("cuda", 0)) is own[0]
    kept = random_state()
    drawn = torch.rand(2), torch.rand(2, generator=own[1])
    set_random_state(kept)
    assert torch.equal(drawn[0], torch.rand(2)) and torch.equal(drawn[1], torch.rand(2, generator=own[1]))


def test_workers_on_gpus_and_on_cpus_are_told() -> None:
    require_one_kind([1, 1], [0, 1])
    require_one_kind([0, 0], [0, 1])
    with pytest.raises(JobError, match=r"worker 7 found no GPU.*training\.device = 'cpu'"):
        require_one_kind([1, 0], [3, 7])


def test_numbers_are_read_the_same_at_once_and_one_by_one() -> None:
    rows = [[torch.tensor(0.1), torch.tensor(1e-30)], [], [torch.tensor(3)]]
    at_once = read_numbers(rows, torch.device("cuda"))  # which kind of device decides, not where the numbers are
    assert at_once == read_numbers(rows, torch.device("cpu")) == [[rows[0][0].item(), rows[0][1].item()], [], [3]]
    assert read_numbers([[], []], torch.device("cuda")) == [[], []]


def test_a_job_for_a_gpu_is_tried_where_its_model_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is built on the CPU and moved later; a batch that is on the GPU already would not go with it."""
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    job = Job.from_dict(
        {"model": {"use": "mlp"}, "data": {"use": "synthetic"}, "training": {"device": "cuda", "steps": 1}}
    )
    parts = assemble(job, Team())
    assert parts.computation.device == torch.device("cuda", 0)
    assert {p.device.type for p in parts.model.parameters()} == {"cpu"}


def test_a_gpu_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: said.append("init"))
    gpus.use_device(torch.device("cpu"))
    assert not said
    gpus.use_device(torch.device("cuda", 3))
    assert said == [torch.device("cuda", 3), "init"]
