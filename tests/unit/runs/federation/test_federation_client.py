"""What a client keeps, and what it lets a server's job do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from cordee.communication.wire import Limits
from cordee.core import Job
from cordee.core.errors import CheckpointError, CommunicationError, DataError, JobError, RunDirectoryError
from cordee.runs.federation.client import ClientFolder, FederationClient
from cordee.runs.federation.messages import Alive, Invitation
from cordee.runs.resuming import fit_to_run
from cordee.strategies.federated.client import Sent
from cordee.tools.federation import JoinOptions, client_parts, refuse_changes

INVITATION = Invitation(run="r", name="alice", address="127.0.0.1:9", server_key="00" * 32, ticket="t")
JOB = """
[model]
use = "{model}"
[data]
use = "digits"
[strategy]
name = "federated"
"""


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    folder = ClientFolder(tmp_path / "alice")
    _, keys = folder.enter(INVITATION)
    invitation, again = folder.enter(None)
    assert invitation == INVITATION and again.public == keys.public
    for path in (tmp_path / "alice").iterdir():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path  # noqa: PTH116
    with pytest.raises(JobError, match="another federation"):
        folder.enter(Invitation(run="r", name="bob", address="a:1", server_key="00" * 32, ticket="t"))
    with pytest.raises(JobError, match="give --token"):
        ClientFolder(tmp_path / "bob").enter(None)


def test_a_client_says_that_the_server_is_gone_and_looks_for_it_no_longer_than_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordee.runs.federation.client.REPLY_S", 0.05)
    said: list[str] = []
    folder = ClientFolder(tmp_path)
    _, keys = folder.enter(INVITATION)
    client = FederationClient(folder, INVITATION, keys, said.append, patience_s=0.2)
    client._open(Limits())
    try:
        with pytest.raises(CommunicationError, match=r"the server at 127\.0\.0\.1:9 cannot be reached"):
            client._request(Alive(), client._patience_s)
    finally:
        client.close()
    assert said == ["the server does not answer; this client looks for it for 0.2 s (--patience)"]


def test_a_token_survives_the_way_and_a_part_of_it_does_not() -> None:
    text = INVITATION.to_text()
    assert Invitation.from_text(text + "\n") == INVITATION
    with pytest.raises(JobError, match="copy the whole line"):
        Invitation.from_text(text[: len(text) // 2])


def test_the_state_is_that_of_the_round_that_was_counted(tmp_path: Path) -> None:
    folder = ClientFolder(tmp_path)
    assert folder.read_state(-1) == {} and folder.newest_state == -1
    for number in range(4):
        folder.write_state(number, {"control": torch.full((3,), float(number))})
    assert folder.newest_state == 3
    assert torch.equal(folder.read_state(2)["control"], torch.full((3,), 2.0))  # the update of round 3 was late
    assert folder.newest_state == 2
    folder.write_state(3, {"control": torch.full((3,), 9.0)})
    assert torch.equal(folder.read_state(3)["control"], torch.full((3,), 9.0))
    with pytest.raises(CheckpointError):
        ClientFolder(tmp_path / "other").read_state(2)


def test_code_that_a_job_names_is_not_run_unasked(tmp_path: Path) -> None:
    options = JoinOptions(tmp_path)
    with pytest.raises(JobError, match=r"names code: os:system.*--allow-code"):
        client_parts(JOB.format(model="os:system"), options, 10)
    with pytest.raises(JobError, match=r"keys of .data. only"):
        client_parts(JOB.format(model="mlp"), JoinOptions(tmp_path, overrides=("strategy.rounds=1",)), 10)


def test_a_client_has_the_classes_of_the_server(tmp_path: Path) -> None:
    parts = client_parts(JOB.format(model="mlp"), JoinOptions(tmp_path), 12)
    assert parts.splits.num_classes == 12
    assert [m for m in parts.model.modules() if isinstance(m, torch.nn.Linear)][-1].out_features == 12
    with pytest.raises(DataError, match=r"labels up to 9.*4 classes"):
        client_parts(JOB.format(model="mlp"), JoinOptions(tmp_path), 4)


def test_a_client_may_have_fewer_samples_than_a_batch(tmp_path: Path) -> None:
    options = JoinOptions(tmp_path, overrides=("data.train_limit=10",))
    parts = client_parts(JOB.format(model="mlp"), options, 10)
    assert parts.splits.train.num_samples == parts.job.training.batch_size == 10


def test_a_federation_does_not_continue_with_another_job(tmp_path: Path) -> None:
    table = {"model": "mlp", "data": "digits", "strategy": {"name": "federated", "rounds": 3}}
    file = tmp_path / "job.toml"
    file.write_text(Job.from_dict(table).to_toml())
    refuse_changes(file, Job.from_dict({**table, "strategy": {"name": "federated", "rounds": 9}}))
    with pytest.raises(JobError, match=r"strategy.algorithm was 'not set', is 'scaffold'"):
        refuse_changes(file, Job.from_dict({**table, "strategy": {"name": "federated", "algorithm": "scaffold"}}))
    with pytest.raises(JobError, match=r"seed was 0, is 1"):
        refuse_changes(file, Job.from_dict({**table, "seed": 1}))


def test_a_simulation_does_not_continue_a_federation(tmp_path: Path) -> None:
    (tmp_path / "federation.sqlite").touch()
    job = Job.from_dict({"model": "mlp", "data": "digits", "strategy": {"name": "federated"}})
    with pytest.raises(RunDirectoryError, match=r"cordee federation serve"):
        fit_to_run(job, tmp_path, [])


def test_noise_is_drawn_once_for_each_round_of_the_job(tmp_path: Path) -> None:
    folder, nothing = ClientFolder(tmp_path), torch.zeros(0)
    for number, value in ((0, 1.0), (2, 2.0), (2, 2.0)):  # a round may be left out, or asked for again
        folder.spend_round(Sent(number, torch.full((3,), value), nothing, {}), 4)
    again = ClientFolder(tmp_path)  # the client was started again
    for number, value in ((1, 1.0), (2, 3.0), (4, 1.0)):
        with pytest.raises(CommunicationError, match="epsilon does not count that"):
            again.spend_round(Sent(number, torch.full((3,), value), nothing, {}), 4)
    again.spend_round(Sent(3, torch.full((3,), 5.0), nothing, {}), 4)
