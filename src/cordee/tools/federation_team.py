"""A client of a federation that is a team of workers on one host: `cordee federation join --workers N`.

This file is also the script that the workers execute, as `cordee run --elastic` does (`cordee.tools.script_run`). The
first worker talks with the server. What a round begins with it gives to the others; all take the same steps, each with
a share of every batch, and the first one sends the update. If a worker is lost, the others form a team again and train
the round from its beginning: nothing of it was sent, or the server has it and counts it once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from cordee.checkpoint import State, share_state
from cordee.cluster import Team
from cordee.compute.devices import share_threads
from cordee.core.errors import CommunicationError, JobError
from cordee.monitoring import Summary
from cordee.monitoring.wording import plural
from cordee.runs.federation.client import ClientFolder, FederationClient
from cordee.runs.federation.messages import Enrolled, Invitation
from cordee.runs.script.member import ElasticLoop, present_member
from cordee.strategies.federated.client import Sent
from cordee.strategies.federated.client_team import ClientTeam, naming_lost
from cordee.tools.federation import JoinOptions, client_parts
from cordee.tools.script_run import run_elastic
from cordee.training.commits import Commits
from cordee.training.loop_state import LoopContents


class TeamPlace(msgspec.Struct, frozen=True):
    """What the workers of a team are told: the argument of the script, as JSON. The token is in the client's folder."""

    enrolled: Enrolled
    num_workers: int
    folder: str
    data: str
    overrides: tuple[str, ...]
    allows_code: bool
    patience_s: float

    @property
    def options(self) -> JoinOptions:
        return JoinOptions(Path(self.folder), self.data, self.overrides, self.allows_code, self.patience_s)


def join_as_team(
    invitation: Invitation | None, options: JoinOptions, num_workers: int, *, say: Callable[[str], None]
) -> Summary:
    """Take part in a federation with workers of this host, until it ends; return the summary of their run."""
    folder = ClientFolder(options.folder)
    invited, keys = folder.enter(invitation)
    client = FederationClient(folder, invited, keys, say)
    try:
        enrolled = client.enrol()
    finally:
        client.close()
    folder.noise_seed()  # is made once, and not by all workers at once
    place = TeamPlace(
        enrolled,
        num_workers,
        str(options.folder.absolute()),
        options.data,
        options.overrides,
        options.allows_code,
        options.patience_s,
    )
    runs = options.folder / "runs"
    runs.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in runs.iterdir())
    script = Path(__file__)
    return run_elastic(script, [msgspec.json.encode(place).decode()], num_workers, run_dir=runs / f"team-{number}")


# What each worker does.


def take_part(place: TeamPlace) -> None:
    """Take part as a worker of a team until the federation ends."""
    member = present_member()
    assert member is not None, "`join_as_team` starts this script"
    folder = ClientFolder(Path(place.folder))
    invited, keys = folder.enter(None)
    client = FederationClient(folder, invited, keys, _say, patience_s=place.patience_s)
    client.know(place.enrolled)
    alone = Team(num_local_workers=place.num_workers)
    parts = client_parts(place.enrolled.job, place.options, place.enrolled.num_classes, alone)
    client.prepare(parts)
    contents = LoopContents({"answers": 0})
    place_in_data = {"samples": 0, "epoch": 0, "batch": 0}  # none: a round is trained as a whole
    commits = Commits(contents, lambda: place_in_data.copy)

    def enter(team: Team, progress: dict[str, Any]) -> None:
        share_threads(parts.job.training.num_threads or team.threads, team.num_local_workers)
        leads = team.is_first and team.num_workers > 1
        client.train_in(ClientTeam(team.worker_index, team.num_workers), _lead if leads else None)

    loop = ElasticLoop(member, contents, commits, enter)
    member.at_end(loop.close)

    def commit() -> None:
        contents.assign("answers", contents.values["answers"] + 1)
        loop.check_generation()
        commits.commit()
        loop.committed()
        if loop.team.any(loop.wants_halt):
            loop.halt()
        loop.begin_step()

    def train() -> None:
        loop.begin_step()
        if loop.team.is_first:
            size = f"{parts.splits.train.num_samples:,} samples, {parts.num_parameters:,} parameters"
            _say(f"client {invited.name}: {size}, {plural(loop.team.num_workers, 'worker')}")
            _say(f"ended: {_talk(client, loop.team, commit)}")
        else:
            _follow(client, commit)

    loop.run(train)


def _talk(client: FederationClient, team: Team, commit: Callable[[], None]) -> str:
    """Do what the server asks for, with the others; return why it is over."""

    def commit_together() -> None:
        _tell(team, "commit")
        with naming_lost():
            commit()

    gone = ""
    try:
        reason = client.run(lambda: False, commit_together)
    except CommunicationError as error:  # of the server: those of the team have another name
        gone = str(error)
    if gone:  # not where the error is handled: it would look like that of a lost worker
        raise JobError(gone)
    _tell(team, "end")
    return reason


def _follow(client: FederationClient, commit: Callable[[], None]) -> None:
    """Train what the first worker gives out, until it says that it is over."""
    while True:
        told = share_state(None)
        match told.values["next"]:
            case "train":
                sent = Sent.of(told.values["round"], told.part("sent").tensors)
                client.follow(sent, told.part("kept").tensors)
            case "commit":
                commit()
            case _:
                return


def _lead(sent: Sent, kept: dict[str, Tensor]) -> None:
    told = State.join(sent=State(sent.vectors, {}), kept=State(kept, {}))
    with naming_lost():
        share_state(State(told.tensors, {"next": "train", "round": sent.round}))


def _tell(team: Team, what: str) -> None:
    if team.num_workers > 1:
        with naming_lost():
            share_state(State({}, {"next": what}))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    take_part(msgspec.json.decode(sys.argv[1], type=TeamPlace))
