"""Where the processes of a run come from: the `Engine` protocol, the order to start one, and what is reported of it."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from cordee.cluster.processes import describe_status
from cordee.core.errors import CordeeError

GRACE_S = 2.0  # between asking a process to end and killing it

# leave: hand over what it has, and end. interrupt: the user's Ctrl-C. end: the run is over. freeze: for fault tests.
Action = Literal["leave", "interrupt", "end", "kill", "freeze"]
# What a process receives for each action.
SIGNALS: Mapping[Action, signals.Signals] = {
    "leave": signals.SIGTERM,
    "interrupt": signals.SIGINT,
    "end": signals.SIGUSR1,
    "kill": signals.SIGKILL,
    "freeze": signals.SIGSTOP,
}


# Where a process runs. launcher: on the launcher's host, beside the run directory. slot: where there is room.
# beside: on a host that has slots, without one of its own.
Place = Literal["launcher", "slot", "beside"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to start a process that calls `target` ("module:function") with `argument`."""

    index: int  # its number at the engine; a later process may have the same one
    incarnation: int  # tells processes of one number apart
    target: str
    argument: dict[str, Any]
    environment: dict[str, str] = {}  # beside the one that the engine was opened in
    log: str | None = None  # file for its output; None keeps the launcher's terminal
    place: Place = "slot"
    apart: str = ""  # processes with the same text are kept on different hosts, if there are several; for `beside`

    @classmethod
    def new(cls, index: int, target: str, argument: dict[str, Any], **more: Any) -> ProcessSpec:
        """Return the order for a process that was not asked for before."""
        return cls(index=index, incarnation=time.time_ns(), target=target, argument=argument, **more)


class Started(msgspec.Struct, frozen=True, tag=True):
    """A process runs."""

    index: int
    incarnation: int
    pid: int
    host: str = ""  # id of its host; empty is the launcher's


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has ended."""

    index: int
    incarnation: int
    pid: int
    status: int  # as a shell shows it: the exit code, or minus the signal
    reason: str = ""  # where the engine knows more
    lost_with: str = ""  # what it was lost with: the same text for all processes of one loss

    def describe(self) -> str:
        """Return how it ended, in words."""
        return self.reason or describe_status(self.status)


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """A process that was asked for will not be there."""

    index: int
    incarnation: int
    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """A process that was asked for has no slot yet. Said again and again, until it has."""

    index: int
    incarnation: int


class Working(msgspec.Struct, frozen=True, tag=True):
    """What a process of another host did since this was last said. Of processes of this host anybody can find out."""

    index: int
    incarnation: int
    has_worked: bool  # it has had processor time
    is_stopped: bool


class AgentLost(msgspec.Struct, frozen=True, tag=True):
    """A process of the engine's own was lost, and another takes its place. What it was for others: `how`."""

    pid: int
    how: str
    keeps_processes: bool = True  # those that it started continue; else their ends are reported as well


class EngineWaits(msgspec.Struct, frozen=True, tag=True):
    """Processes have waited long for slots. For people: once, until there are slots again."""

    how: str


Report = Started | Exited | CannotStart | Waiting | Working | AgentLost | EngineWaits
ProcessReport = Started | Exited | Waiting | Working  # what a coordinator hears


class Capacity(msgspec.Struct, frozen=True):
    """How many processes have a core of their own, and where others reach the launcher's host."""

    slots: dict[str, int]  # by host
    may_grow: bool = False
    is_limit: bool = False  # no more workers than slots can be started, unless it may grow
    address: str = ""  # HOST or HOST:PORT at which processes of other hosts reach this one; empty if there are none

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())


class Engine(Protocol):
    """Starts processes, and reports what becomes of them. All methods return without waiting for processes."""

    def capacity(self) -> Capacity: ...

    def describe(self) -> str:
        """Return what the engine has recognised, for the first lines of a run; empty if there is nothing to say."""

    def start(self, spec: ProcessSpec) -> None:
        """Ask for a process; an order that was given before, by index and incarnation, is not carried out again."""

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        """Return what happened since the last call, waiting at most `timeout_s` for the first news.

        Raises CordeeError if no process can be started any more.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when `reports` has news."""

    def signal(self, index: int, action: Action) -> None:
        """Send a signal to the newest process of this index, which may have ended."""

    def members(self) -> Sequence[Started]:
        """Return the processes that run, the newest of each index."""

    def close(self) -> None:
        """Kill whatever runs, and release the engine."""


def stop_processes(engine: Engine, grace_s: float = GRACE_S) -> None:
    """End all processes: they are asked to leave, and killed if they are still there after `grace_s`."""
    try:
        for action in ("leave", "kill"):
            for started in engine.members():
                engine.signal(started.index, action)
            deadline = time.monotonic() + grace_s
            while engine.members() and time.monotonic() < deadline:
                list(engine.reports(timeout_s=0.05))
    except CordeeError:
        return  # closing the engine ends them
