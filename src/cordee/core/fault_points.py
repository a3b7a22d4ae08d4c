"""Named places where a test can make a process die, freeze or fail. Each one does nothing unless a test asks.

`reach("name")` stands between two steps of a protocol: where a member sends, receives, publishes, writes or forms
something. A test names a folder in `CORDEE_FAULTS` and describes the faults in its file `faults.json`. A fault is one
point, one process and one visit; it happens once, also if the process that it hit is replaced. The folder records every
visit, so a test can tell that its fault happened, and which points a run passes at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cordee.core import env
from cordee.core.errors import CommunicationError

Action = Literal["kill", "freeze", "error"]

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
    "evaluate.begun": "worker: nothing is evaluated",
    "evaluate.done": "worker: it knows what was measured, and has not taken note of it",
    "save.begun": "worker: no earlier checkpoint is being written",
    "save.consolidated": "worker: all have the buffers that are saved",
    "end.reached": "worker: it has taken and saved its last step; others may not have",
}

FAULTS_FILE = "faults.json"
VISITS_FILE = "visits"


class Fault(msgspec.Struct, frozen=True):
    """What is to happen at one point."""

    point: str
    process: str  # its name, "worker-1" or "coordinator"; "worker-*" is any worker, whichever comes first
    action: Action
    visit: int = 1  # of this process and those that took its place, counted from 1


_folder: Path | None = env.faults_folder()
_process = ""


def identify(process: str) -> None:
    """Say which process this is: a role, with its index where there are several."""
    global _process
    _process = process


def reach(point: str, error: type[Exception] = CommunicationError) -> None:
    """Mark a place. Where a test asks for it, this process is killed or stopped here, or `error` is raised."""
    if _folder is None or not _process:
        return
    assert point in POINTS, f"{point} is not in fault_points.POINTS"
    fault = _due(_folder, point)
    if fault is None:
        return
    if fault.action == "error":
        raise error(f"fault point {point}")
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)


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
    faults = msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=list[Fault])
    return [fault for number, fault in enumerate(faults) if (folder / f"happened-{number}").exists()]


def _due(folder: Path, point: str) -> Fault | None:
    """Record the visit; return the fault that it is the turn of, if there is one."""
    with (folder / VISITS_FILE).open("ab", buffering=0) as file:  # one write: lines of several processes do not mix
        file.write(f"{point} {_process}\n".encode())
    past = visits(folder)
    faults = msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=list[Fault])
    for number, fault in enumerate(faults):
        if fault.point != point or not _is_meant(fault.process):
            continue
        visit = sum(1 for at, process in past if at == point and (process == _process or fault.process.endswith("*")))
        if visit < fault.visit:
            continue
        try:
            (folder / f"happened-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return fault
    return None


def _is_meant(process: str) -> bool:
    return process == _process or (process.endswith("*") and _process.startswith(process[:-1]))
