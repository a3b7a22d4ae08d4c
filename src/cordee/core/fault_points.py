"""Named places where a test can make a process die, freeze or fail. Each one does nothing unless a test asks.

`reach("name")` stands between two steps of a protocol: where a member sends, receives, publishes, writes or forms
something. A test names a folder in `CORDEE_FAULTS` and describes the faults in its file `faults.json`. A fault is one
point, one process and one visit; it happens once, also if the process that it hit is replaced. The folder records every
visit, so a test can see that its fault happened, and which points a run passes at all.

Two actions bring a run to where something can happen to it, without a clock: `leave` has a process send itself SIGTERM
and continue, `hold` has it wait at the point until the test calls `release`.

Messages between workers and parameter servers can also be lost, at random: `CORDEE_LOSE_MESSAGES` is their share.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cordee.core import env
from cordee.core.errors import CommunicationError

Attack = Literal["kill", "freeze", "error"]
Action = Attack | Literal["leave", "hold"]

LONGEST_HOLD_S, LOOK_EVERY_S = 60.0, 0.005

# Of runs with parameter servers. Requests have a point before they are sent and one where the answer has come; a server
# has one where a request has come, and one where it is carried out. Those of compression are not listed: the runs that
# the walks compare are reproducible, which compression is not.
_ASKED = {
    "join": "worker, server, evaluator",
    "askservers": "worker, evaluator",
    "takework": "worker",
    "askevaluatortask": "evaluator",
    "snapshottaken": "evaluator",
    "evaluatortaskdone": "evaluator",
    "followerlost": "server",
    "handover": "server",
    "event": "worker",
    "bye": "worker, evaluator",
}
_CALLED = {
    "push": "worker",
    "pull": "worker",
    "pushextras": "worker",
    "pullextras": "worker",
    "snapshot": "evaluator",
    "snapshotextras": "evaluator",
}
_SERVER_CALLS = (*_CALLED, "applypending", "fence", "adopt", "load", "loadextras")
_DISPATCHED = {
    **{f"dispatched.ask.{kind}": f"{who}: about to send {kind} to the dispatcher" for kind, who in _ASKED.items()},
    **{f"dispatched.answered.{kind}": f"{who}: has the answer to {kind}" for kind, who in _ASKED.items()},
    **{f"client.call.{kind}": f"{who}: about to send {kind} to a server" for kind, who in _CALLED.items()},
    **{f"client.answered.{kind}": f"{who}: has the answer to {kind}" for kind, who in _CALLED.items()},
    **{f"server.received.{kind}": f"server: {kind} has come, nothing is done" for kind in _SERVER_CALLS},
    **{f"server.answering.{kind}": f"server: {kind} is carried out, not answered" for kind in _SERVER_CALLS},
    "server.pass_on": "server: about to have its follower do what it was asked",
    "server.passed_on": "server: its follower has done what it was asked, the server itself has not",
    "server.adopt.connect": "server: about to connect to the one that is to be its follower",
    "server.adopt.piece": "server: about to give a piece to the one that is to be its follower",
    "server.adopt.extras": "server: has given all pieces, about to give the buffers of the workers' models",
    "server.adopt.done": "server: has given everything, has no follower yet",
    "worker.computed": "worker: the gradient is computed, some of it is pushed",
    "worker.pushed": "worker: the gradient is pushed, the dispatcher does not know",
    "evaluator.read": "evaluator: has read a snapshot, and said so",
    "evaluator.measured": "evaluator: has measured the snapshot, nothing is saved",
    "evaluator.saved": "evaluator: has saved the snapshot where that was asked for, the dispatcher does not know",
    "dispatch.loss": "coordinator: knows of a loss, has done nothing about it",
    "dispatch.fence": "coordinator: about to report to a server a worker that was given up",
    "dispatch.pair": "coordinator: about to have a server give another everything",
    "dispatch.paired": "coordinator: a server has given another everything, that is not written",
    **{
        f"dispatch.answer.{kind}": f"coordinator: about to answer with {kind}"
        for kind in ("joined", "acknowledged", "servers", "work", "evaluatortask", "leave", "accepted", "refused")
    },
    "dispatch.shut_down": "coordinator: the run is over, about to have everybody leave",
    "dispatch.shut_down_done": "coordinator: everybody has left, or had the time",
}

# Every point, with the processes that reach it and what has happened before it. The test that walks them needs an
# entry for each (tests/faults/fault_walk.py).
POINTS: dict[str, str] = {
    # a worker enters a generation (session.py, trainer.py)
    "enter.begun": "worker: its group is formed and it holds what it has; nobody knows yet how far each one is",
    "enter.gathered": "worker: it knows how far every member is",
    "enter.loaded": "worker: nobody has anything, and the first has read the checkpoint",
    "enter.shared": "worker: it holds what the member that is furthest has",
    "enter.agreed": "worker: all hold the same, and it is about to set up",
    "enter.set_up": "worker: its optimizer is new and empty, its weights may be those of another step",
    "compare.begun": "worker: members that should have the same are about to be compared",
    "compare.done": "worker: all have the same, as far as this member knows",
    "enter.resumed": "worker: it has loaded what it held; the others may not have",
    "enter.done": "worker: all have loaded what they held",
    # one member's state to the others (checkpoint/sharing.py)
    "share.begun": "worker: nothing is sent",
    "share.described": "worker: names, shapes and values are sent, tensors are not",
    "share.done": "worker: everything is sent, or received",
    # a data-parallel strategy is set up (strategies/data_parallel)
    "setup.begun": "worker: its optimizer is new, its weights are its own",
    "setup.shared": "worker: its weights are those of the first",
    # a worker trains (trainer.py, session.py)
    "step.begun": "worker: nothing of the step is computed",
    "step.taken": "worker: weights, optimizer and place in the data are those of the next step",
    # members that take steps alone agree (trainer.py, strategies/local_sgd)
    "agree.gathered": "worker: it knows what every member has counted alone, and nothing of what they have learnt",
    "agree.exchanged": "worker: it has what all members have learnt, and has applied nothing",
    "agree.done": "worker: its weights and its place in the data are what all agreed on",
    "evaluate.begun": "worker: nothing is evaluated",
    "evaluate.done": "worker: it knows what was measured, and has not recorded it",
    "save.begun": "worker: no earlier checkpoint is being written",
    "save.consolidated": "worker: all have the buffers that are saved",
    # a loop of one's own (loop/)
    "loop.computed": "worker: its own gradients are computed, nothing is exchanged",
    "loop.exchanged": "worker: it has everybody's gradients; no optimizer has used them",
    "loop.commit": "worker: the optimizer has taken its step, nothing is committed",
    "loop.committed": "worker: it continues from here; others may not have committed",
    "end.reached": "worker: it has taken and saved its last step; others may not have",
    **_DISPATCHED,
    # a worker and its coordinator
    "link.join": "worker: about to say hello, for the first time or because it was given up",
    "link.joined": "worker: is registered, shows no sign of life yet",
    "link.send_ready": "worker: about to say that it waits for a generation",
    "link.ready": "worker: has said that it waits for a generation, has no answer",
    "link.answered": "worker: has its instructions, and has not begun",
    "link.pause": "worker: has heard that the team is formed again after this step",
    "link.generation_ended": "worker: has heard that its generation is over",
    "link.stop": "worker: has heard that the user wants the run to end",
    "link.given_up": "worker: has heard that it was given up, and has not joined again",
    "link.send_leaving": "worker: got SIGTERM, about to ask whether it may leave",
    "link.send_failure": "worker: about to report the error that it ends with",
    "link.send_goodbye": "worker: has done everything, about to say so",
    "link.goodbye": "worker: has said goodbye, has not been heard",
    # the group of a generation
    "rendezvous.begin": "worker: about to form the group of a generation",
    "segment.introduced": "worker: has introduced itself to the members of the group",
    "segment.made": "worker: has made the shared memory of the group, nobody knows where it is",
    "segment.found": "worker: knows where the shared memory is, has not mapped it",
    "segment.mapped": "worker: has published or mapped the shared memory, has not said so",
    "segment.answered": "worker: has said how mapping went, waits for the others",
    "rendezvous.formed": "worker: the group is formed, nothing was exchanged in it",
    "rendezvous.end": "worker: about to give up the group of its generation",
    # checkpoints; for a worker that has no access to the run directory, the coordinator writes
    "checkpoint.staged": "worker: has copied the state, about to have the thread write it",
    "slices.begun": "worker: knows where all write their slices of the checkpoint, has written nothing",
    "slices.written": "worker: has written its slices, beside the next step or before it; others may not have",
    "slices.agreed": "worker: all slices are written, the manifest is not",
    "checkpoint.folder": "worker: has made the temporary folder",
    "checkpoint.file": "worker: has written one file of tensors",
    "checkpoint.values": "worker: has written the plain values",
    "checkpoint.manifest": "worker: has written the manifest, the folder is not synced",
    "checkpoint.set_aside": "worker: has renamed a checkpoint of the same step, the new one is not in its place",
    "checkpoint.rename": "worker: about to give the checkpoint its name",
    "checkpoint.renamed": "worker: the checkpoint has its name, the folder above is not synced",
    "checkpoint.saved": "worker: the checkpoint is on the disk, about to remove old ones",
    "checkpoint.remove": "worker: about to remove an old checkpoint",
    "checkpoint.removing": "worker: has taken an old checkpoint's name away, its files are there",
    "checkpoint.written": "worker: the checkpoint is done, nobody knows yet",
    # checkpoints of a worker that has no access to the run directory
    "remote_save.piece": "worker: about to send a piece of a checkpoint to the coordinator",
    "remote_save.written": "coordinator: has written a piece of a checkpoint, has not said so",
    "remote_save.end": "worker: has sent all pieces of a checkpoint, it has no name yet",
    "remote_save.saved": "coordinator: has saved a checkpoint that it was sent, or could not, and has not said so",
    "remote_save.heard": "worker: has heard what became of a checkpoint",
    "remote_load.ask": "worker: about to ask which checkpoints there are, or for a piece of one",
    # checkpoints in a storage (checkpoint/stored_run.py): the launcher puts and brings them
    "storage.claimed": "launcher: the run has its place in the storage, it is not known to members",
    "storage.put_file": "launcher: about to put a file of a checkpoint into the storage",
    "storage.put_manifest": "launcher: all files of a checkpoint but the manifest are in the storage",
    "storage.put_done": "launcher: a checkpoint is complete in the storage, nobody knows yet",
    "storage.remove": "launcher: about to remove an old checkpoint from the storage",
    "storage.removing": "launcher: has removed the manifest of an old checkpoint, its files are in the storage",
    "storage.fetch": "launcher: about to bring a file of a checkpoint from the storage",
    "storage.fetched": "launcher: has brought a checkpoint into the run directory, nobody knows yet",
    # federated learning between sites (runs/federation)
    "federation.asked": "federation server: the task of a client is written down, the client was not answered",
    "federation.round_begun": "federation server: who is asked is written down, nobody was asked",
    "federation.result": "federation server: about to write results",
    "federation.result_written": "federation server: results are written, not acknowledged",
    "federation.stage_ended": "federation server: a stage of a secure round is over, the next was not asked for",
    "federation.saved": "federation server: the round is saved, its results are not forgotten",
    "federation.round_ended": "federation server: the results are forgotten",
    "federation.client_result": "federation client: about to send a result",
    # the coordinator
    "launcher_link.listen": "coordinator: about to listen",
    "launcher_link.again": "coordinator: has come back, about to send a command of its last journal entry again",
    "coordinator.back": "coordinator: has come back with its state, has sent nothing to the processes",
    "coordinator.listening": "coordinator: has asked for the processes, the control file is not written",
    "coordinator.control_written": "coordinator: the control file is written",
    "coordinator.heard": "coordinator: has taken what came in, has decided nothing",
    "coordinator.decided": "coordinator: has decided, nothing is written",
    "journal.write": "coordinator: about to write a journal entry",
    "journal.written": "coordinator: the journal entry is written, nothing is sent",
    "launcher_link.command": "coordinator: about to send a command to the launcher",
    "coordinator.committed": "coordinator: commands are sent, replies and directives are not",
    "coordinator.reply": "coordinator: about to reply to a worker",
    "coordinator.directive": "coordinator: about to send a directive to a worker",
    "coordinator.directed": "coordinator: has sent a directive to a worker, maybe not to the next",
    "generations.formed": "coordinator: has decided on the members of a generation",
    "generations.pause": "coordinator: has decided to have the team formed again",
    "generations.finish": "coordinator: has decided that the run ends here",
    "generations.leave": "coordinator: has decided to let workers go",
    "losses.found": "coordinator: knows of a loss, has done nothing about it",
    "losses.replaced": "coordinator: has decided on a replacement",
    "workers.scaled": "coordinator: has taken a request for another number of workers",
    "workers.admitted": "coordinator: has taken a worker that somebody else started",
    "coordinator.over": "coordinator: the run is over, processes may still be there",
    "launcher_link.end": "coordinator: about to send the launcher the result",
    "launcher_link.ended": "coordinator: has sent the launcher the result",
    # the launcher
    "supervisor.start": "launcher: about to start a coordinator",
    "supervisor.command": "launcher: has a command of the coordinator, has not carried it out",
    "supervisor.command_done": "launcher: has carried out a command of the coordinator",
    "supervisor.ended": "launcher: has the result of the run",
    "launch.summary": "launcher: about to write the summary",
    "launch.closed": "launcher: has written the summary, processes are not ended",
    # the fork server, and what it forks
    "agent.enrol": "agent: about to show its ticket",
    "agent.enrolled": "agent: its ticket was taken",
    "agent.command": "agent: has a command, has not carried it out",
    "agent.status": "agent: about to report to the launcher",
    "agent.leave": "agent: is about to end its processes",
    "fork_server.asked": "fork-server: has a request, has forked nothing",
    "fork_server.forked": "fork-server: has forked a process, has not said so",
    "fork_server.answered": "fork-server: has forked a process and said so",
    "forked.alive": "forked: a process that was just forked, has not said so",
    "forked.reported": "forked: a process that was just forked and said so, is nobody yet",
    # a worker that somebody starts
    "joining.asks": "joiner: about to ask the run to take it",
    "joining.taken": "joiner: was taken, has not said hello",
}

# What processes call themselves, with numbers for N. A server that took the place of another has a second number.
PROCESSES = (
    "worker-N",
    "server-N",
    "server-N.N",
    "evaluator",
    "coordinator",
    "fork-server",
    "forked",
    "joiner",
    "launcher",
    "agent-N",
    "federation-server",
    "federation-client",
)

FAULTS_FILE = "faults.json"
VISITS_FILE = "visits"


class Fault(msgspec.Struct, frozen=True):
    """What is to happen at one point."""

    point: str
    process: str  # its name as in PROCESSES; "worker-*" is any worker, whichever comes first
    action: Action
    visit: int = 1  # of this process and those that took its place, counted from 1


_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "leave": signal.SIGTERM}
_folder: Path | None = env.faults_folder()
_lost_share, _draws = 0.0, random.Random(0)
_process = ""


def identify(process: str) -> None:
    """Say which process this is: a role, with its index where there are several."""
    assert is_process(process), f"{process} is not in fault_points.PROCESSES"
    global _process, _folder, _lost_share, _draws
    _process, _folder = process, env.faults_folder()  # read again: a fork may have another environment
    _lost_share, _draws = env.lost_messages(), random.Random(process)


def reach(point: str, error: type[Exception] = CommunicationError, *, of: msgspec.Struct | None = None) -> None:
    """Mark a place. Where a test asks for it, this process is killed or stopped here, or `error` is raised.

    The name of the place ends with the kind of the message `of`.
    """
    if _folder is None or not _process:
        return
    if of is not None:  # only here: making a name takes 0.1 µs, and a call of a store passes four such places
        point = f"{point}.{of.__struct_config__.tag}"
    assert point in POINTS, f"{point} is not in fault_points.POINTS"
    due = _due(_folder, point)
    if due is None:
        return
    number, fault = due
    if fault.action == "error":
        raise error(f"fault point {point}")
    if fault.action == "hold":
        _wait_for(_folder / f"released-{number}")
    else:
        os.kill(os.getpid(), _SIGNALS[fault.action])


def loses_message() -> bool:
    """Whether a request that is about to be sent, or an answer that has just come, is to be lost. May delay it."""
    if not _lost_share:
        return False
    draw = _draws.random()
    if draw < _lost_share / 3:  # overtaken by others
        time.sleep(draw / _lost_share * 0.03)
    return draw > 1 - _lost_share * 2 / 3


def ask_to_lose(share: float) -> dict[str, str]:
    """Return the environment in which processes lose this share of their messages, on top of other faults."""
    return {"CORDEE_LOSE_MESSAGES": str(share)}


def release(folder: Path, fault: Fault) -> None:
    """Let a process continue that a fault holds, or is going to hold."""
    faults = msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=list[Fault])
    (folder / f"released-{faults.index(fault)}").touch()


def is_process(asked: str) -> bool:
    """Return whether a process may have the name `asked`, which ends with * where its beginning is enough. Pure."""
    if not asked.endswith("*"):
        return any(re.fullmatch(name.replace(".", r"\.").replace("N", "[0-9]+"), asked, re.ASCII) for name in PROCESSES)
    begun = re.sub("[0-9]+", "N", asked[:-1])
    return any(name.startswith(begun) for name in PROCESSES)


def ask_for(folder: Path, faults: Sequence[Fault]) -> dict[str, str]:
    """Describe faults in `folder`, for processes that are started with the environment that is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAULTS_FILE).write_bytes(msgspec.json.encode(list(faults)))
    return {"CORDEE_FAULTS": str(folder)}


def visits(folder: Path) -> list[tuple[str, str]]:
    """Return every visit so far as (point, process), in order."""
    try:
        lines = (folder / VISITS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(point, process) for point, _, process in (line.partition(" ") for line in lines)]


def happened(folder: Path) -> list[Fault]:
    """Return the faults that have happened."""
    return [fault for fault, _ in happened_at(folder)]


def happened_at(folder: Path) -> list[tuple[Fault, float]]:
    """Return the faults that have happened, and when, in seconds since 1970."""
    faults = msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=list[Fault])
    marks = [(fault, folder / f"happened-{number}") for number, fault in enumerate(faults)]
    return [(fault, mark.stat().st_mtime) for fault, mark in marks if mark.exists()]


def _due(folder: Path, point: str) -> tuple[int, Fault] | None:
    """Record the visit; return the fault that it is the turn of, with its number, if there is one."""
    with (folder / VISITS_FILE).open("ab", buffering=0) as file:  # one write: lines of several processes do not mix
        file.write(f"{point} {_process}\n".encode())
    faults = msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=list[Fault])
    meant = [
        (n, fault) for n, fault in enumerate(faults) if fault.point == point and _is_meant(fault.process, _process)
    ]
    waiting = [(n, fault) for n, fault in meant if not (folder / f"happened-{n}").exists()]
    past = visits(folder) if waiting else []
    for number, fault in waiting:
        visit = sum(1 for at, process in past if at == point and _is_meant(fault.process, process))
        if visit < fault.visit:
            continue
        try:
            (folder / f"happened-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number, fault
    return None


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + LONGEST_HOLD_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)


def _is_meant(asked: str, process: str) -> bool:
    return asked == process or (asked.endswith("*") and process.startswith(asked[:-1]))
