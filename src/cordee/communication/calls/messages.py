"""What the two ends of a connection say to each other before and beside the calls of a service."""

from __future__ import annotations

from cordee.communication.messages import Count, Message, Name


class Greeting(Message, frozen=True):
    """A client wants to make calls. Answered by `HostInfo`."""

    is_generational = False


class HostInfo(Message, frozen=True):
    """Where the server is: clients with the same host id may share memory with it."""

    is_generational = False

    host_id: Name
    board_pid: Count
    board_fd: Count
    board_bytes: Count
    started: Count  # of the process, as /proc has it


class OpenShmChannel(Message, frozen=True):
    """The client has made a segment for calls. Answered by `ShmChannelOpened`."""

    is_generational = False

    pid: Count
    fd: Count
    num_bytes: Count


class ShmChannelOpened(Message, frozen=True):
    """The server listens to the segment, at this place of its request board."""

    is_generational = False

    slot: Count


class Ping(Message, frozen=True):
    """Does the server live? Answered by `Pong`."""

    is_generational = False


class Pong(Message, frozen=True):
    """It does."""

    is_generational = False


UNAVAILABLE = "unavailable"  # why a request is refused that is to be made again, wherever the service then is

CONNECTION: tuple[type[Message], ...] = (Greeting, HostInfo, OpenShmChannel, ShmChannelOpened, Ping, Pong)
