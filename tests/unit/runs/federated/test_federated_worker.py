"""What a checkpoint of rounds keeps fits the job that continues from it, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cordee.checkpoint import Folder, load_newest
from cordee.checkpoint.layout import encode_values
from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import CheckpointError
from cordee.runs.federated.messages import Task
from cordee.runs.federated.round_files import FolderFiles
from cordee.runs.federated.worker import FederatedWorker
from cordee.training.components import assemble


def make_worker(folder: Path, seed: int = 0, **strategy: Any) -> FederatedWorker:
    table = {
        "seed": seed,
        "model": {"use": "mlp", "hidden": [4, 4]},
        "data": {"use": "synthetic", "shape": [4], "size": 40, "num_classes": 4, "test_size": 4},
        "optimizer": {"use": "sgd", "lr": 0.1},
        "training": {"batch_size": 8, "threads": 1},
        "strategy": {"name": "federated", "rounds": 4, "partition": {"clients": 4}, **strategy},
    }
    return FederatedWorker(assemble(Job.from_dict(table), Team()), FolderFiles(folder), Folder(folder / "checkpoints"))


def train_a_round(worker: FederatedWorker) -> None:
    worker.do(Task(what="prepare", round=0))
    for client in range(4):
        worker.do(Task(what="client", round=0, index=client, client=client, num_places=4))
    places = (0, 1, 2, 3)
    worker.do(Task(what="merge", round=0, num_places=4, places=places))
    progress = encode_values({}).decode()
    worker.do(Task(what="finish", round=0, num_places=4, places=places, save=True, oldest=1, progress=progress))


KEEPS: dict[str, Any] = {"personal": ["*.bias"]}


@pytest.mark.parametrize(
    ("before", "after", "seed", "words"),
    [
        (KEEPS, {"personal": ["*.weight"]}, 0, "of other parameters"),
        ({"algorithm": "fedavgm"}, {"algorithm": "fedavgm", **KEEPS}, 0, "of other parameters"),
        (KEEPS, {**KEEPS, "partition": {"clients": 5}}, 0, "of other clients"),
        ({"compress": "int8"}, {"compress": "int8"}, 7, "of other clients"),
        (KEEPS, KEEPS, 0, None),
        ({}, {"partition": {"clients": 5}}, 7, None),  # nothing is kept of anybody
    ],
)
def test_what_was_kept_of_others_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], seed: int, words: str | None
) -> None:
    train_a_round(make_worker(tmp_path, **before))
    worker = make_worker(tmp_path, seed, **after)
    if words is None:
        worker.do(Task(what="prepare", round=1))
        return
    with pytest.raises(CheckpointError, match=words):
        worker.do(Task(what="prepare", round=1))


def test_a_client_under_way_whose_parameters_are_not_kept_is_refused(tmp_path: Path) -> None:
    train_a_round(make_worker(tmp_path))
    worker = make_worker(tmp_path)
    worker.do(Task(what="prepare", round=1))
    with pytest.raises(CheckpointError, match="clients_per_round and clock must be as they were"):
        worker.do(Task(what="client", round=1, index=0, client=0, base=0, num_places=4))


def test_the_progress_in_a_checkpoint_is_that_of_its_round(tmp_path: Path) -> None:
    train_a_round(make_worker(tmp_path))
    loaded = load_newest(tmp_path / "checkpoints")
    assert loaded is not None
    progress = loaded.state.values["progress"]
    assert (progress["step"], progress["epoch"], progress["samples"], progress["loss_count"]) == (1, 1, 40, 40)
    assert progress["loss_sum"] > 0
