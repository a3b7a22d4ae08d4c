"""What starts an agent, and what agents and the launcher say to each other.

Both directions are numbered: what was not acknowledged is sent again, and counts once. An agent that cannot be heard
for a while, or the connection of which breaks, loses nothing.
"""

from __future__ import annotations

import base64
import binascii
import platform
from importlib.metadata import version
from typing import Annotated

import msgspec
from msgspec import Meta

from cordee.cluster.engine import Action, CannotStart, Exited, ProcessSpec, Started
from cordee.communication.messages import Count, Message, Name, Refused
from cordee.communication.wire import Limits
from cordee.core.errors import JobError
from cordee.version import __version__

LIMITS = Limits(max_header_bytes=4 << 20)
LOG_BYTES = 64 << 10  # of a log that are sent at once
GIVEN_UP = "given-up"  # why an agent is refused that was taken for lost: its processes were replaced

_Item = Annotated[bytes, Meta(max_length=3 << 20)]  # JSON of a command or a report
_Items = Annotated[tuple[_Item, ...], Meta(max_length=1024)]


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What starts an agent. Holds no private key: the agent makes its own pair."""

    number: int  # of the agent; one that takes its place has another
    run: str
    address: str  # tcp://HOST:PORT of the launcher
    server_key: str  # the launcher's public key, in hexadecimal
    ticket: str  # one use
    failure_timeout_s: float
    preload: tuple[str, ...] = ()  # modules that processes will use

    def to_text(self) -> str:
        """Return one line of letters, digits, '-', '_' and '='."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> AgentOrder:
        """Raises JobError if this is not what `to_text` wrote. The text is a secret until it was used."""
        try:
            content = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
            return msgspec.json.decode(content, type=cls)
        except (binascii.Error, ValueError):
            raise JobError("the ticket is damaged: it was cut or changed; copy the whole line") from None


class Versions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What must be the same at both ends."""

    cordee: Name
    torch: Name
    python: Name

    @classmethod
    def here(cls) -> Versions:
        major, minor, _ = platform.python_version_tuple()
        return cls(__version__, version("torch"), f"{major}.{minor}")

    def describe(self) -> str:
        return f"cordee {self.cordee}, torch {self.torch} and Python {self.python}"


class Enrol(Message, frozen=True):
    """The sender is the agent that the ticket is for. Answered by `Enrolled` or `Refused`."""

    is_generational = False

    number: Count
    ticket: Annotated[str, Meta(max_length=256)]
    pid: Count
    host: Name
    host_id: Name
    versions: Versions


class Enrolled(Message, frozen=True):
    """The agent may work."""

    is_generational = False

    heartbeat_s: Annotated[float, Meta(gt=0)]
    command_line: Annotated[tuple[Annotated[bytes, Meta(max_length=1 << 17)], ...], Meta(max_length=4096)]
    host_id: Name  # of the launcher


class Commands(Message, frozen=True):
    """What the agent is to do, in this order; the first has the number `first`."""

    is_generational = False

    first: Count
    commands: _Items


class Activity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one process of an agent did."""

    index: int
    incarnation: Count
    processor_s: float  # that it has used
    is_stopped: bool


class AgentStatus(Message, frozen=True):
    """The agent lives. Answered by `StatusHeard`, or `Refused` if the agent was given up."""

    is_generational = False

    num_done: Count  # commands that were carried out
    first: Count  # number of the first report
    reports: _Items = ()
    activity: Annotated[tuple[Activity, ...], Meta(max_length=4096)] = ()


class StatusHeard(Message, frozen=True):
    """Reports up to this number were taken."""

    is_generational = False

    num_heard: Count


AGENT: tuple[type[Message], ...] = (Enrol, Enrolled, Commands, AgentStatus, StatusHeard, Refused)


# Commands of the launcher and reports of the agent, as JSON inside of the messages.


class SignalProcess(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to the process of this index, which may have ended."""

    index: int
    action: Action


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End all processes, and this agent."""


class LogText(msgspec.Struct, frozen=True, tag=True):
    """What a process has printed. For processes whose log file is not on the agent's host."""

    index: int
    incarnation: int
    content: bytes


Command = ProcessSpec | SignalProcess | Leave
AgentReport = Started | Exited | CannotStart | LogText
