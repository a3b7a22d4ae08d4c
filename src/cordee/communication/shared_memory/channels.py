"""Messages from one member to another: a ring of two pieces in shared memory, or a connection; and matching by tag.

In shared memory the source writes a piece and moves its counter; the target copies the piece out and moves its own. A
message longer than a piece travels as several. Messages of one source arrive in the order sent; when the next one has a
tag that nobody asked for while another tag is asked for, it is set aside.

Nothing here waits: `advance` does what can be done now. Not thread-safe; the mailbox holds a lock.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from cordee.communication.shared_memory.collectives import as_buffer
from cordee.communication.shared_memory.connections import Connection, Pump
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.segment import LINE_WORDS, PIECES_PER_CHANNEL, Layout, Segment
from cordee.core.errors import CommunicationError

_SENT = 0
_TAKEN = LINE_WORDS
_HEADER = 2 * LINE_WORDS  # one line per piece: tag, bytes of the message, bytes of the piece


@dataclass(eq=False)
class Message:
    """A message on its way out of, or into, flat bytes."""

    data: Tensor
    tag: int
    offset: int = 0
    is_done: bool = False
    error: str | None = None
    source: int = -1  # group rank it came from, once known
    instead_of: Message | None = None  # a request that this message did not fit


class Outbox:
    """What one member sends to another."""

    def __init__(self, segment: Segment, layout: Layout, source: int, target: int) -> None:
        self._words = segment.words()
        self._at = layout.channel_word(source, target)
        self._piece_bytes = layout.piece_bytes
        self._pieces = [
            segment.tensor(layout.piece_at(source, target, parity), layout.piece_bytes, torch.uint8)
            for parity in range(PIECES_PER_CHANNEL)
        ]
        self._sent = 0
        self.queue: deque[Message] = deque()

    def has_room(self) -> bool:
        return bool(self._sent - self._words[self._at + _TAKEN] < PIECES_PER_CHANNEL)

    def advance(self) -> bool:
        """Write what fits; return whether something moved."""
        has_moved = False
        while self.queue and self.has_room():
            has_moved = True
            message = self.queue[0]
            self._write_piece(message)
            if message.offset >= message.data.numel():
                message.is_done = True
                self.queue.popleft()
        return has_moved

    def _write_piece(self, message: Message) -> None:
        parity = self._sent % PIECES_PER_CHANNEL
        part = message.data[message.offset : message.offset + self._piece_bytes]
        length = part.numel()
        if length:
            self._pieces[parity][:length].copy_(part)
        header = self._at + _HEADER + parity * LINE_WORDS
        self._words[header] = message.tag
        self._words[header + 1] = message.data.numel()
        self._words[header + 2] = length
        message.offset += length
        self._sent += 1
        self._words[self._at + _SENT] = self._sent


class _Matching:
    """What was asked for from one source, and what came before it was asked for."""

    def __init__(self, source: int, anybody: list[Message]) -> None:
        """`anybody` are requests that any source may serve."""
        self._source = source
        self._anybody = anybody
        self._current: Message | None = None
        self.requests: list[Message] = []
        self._aside: list[Message] = []  # came before they were asked for; the last may still be coming in

    def ask(self, request: Message) -> None:
        """Ask for a message, which may have been set aside."""
        if not self.serve_aside(request):
            self.requests.append(request)

    def serve_aside(self, request: Message) -> bool:
        """Serve a request from what was set aside, if it is there."""
        for index, kept in enumerate(self._aside):
            if kept.tag == request.tag and kept.is_done:
                del self._aside[index]
                self._deliver(kept, request)
                return True
        return False

    def _match(self, tag: int, total: int) -> Message:
        request = self._take_request(tag)
        if request is not None and self._fits(request, tag, total):
            return request
        kept = Message(torch.empty(total, dtype=torch.uint8), tag, source=self._source, instead_of=request)
        if request is None:
            self._aside.append(kept)  # otherwise it is swallowed, and the request reported as failed
        return kept

    def _take_request(self, tag: int) -> Message | None:
        """Return the first request with this tag, which waits no longer."""
        for waiting in (self.requests, self._anybody):
            for request in waiting:
                if request.tag == tag:
                    waiting.remove(request)
                    return request
        return None

    def _fits(self, request: Message, tag: int, total: int) -> bool:
        """Note where a request's message comes from; return whether it has room for the message."""
        request.source = self._source
        length = request.data.numel()
        if length != total:
            request.error = f"a message of {total} bytes with tag {tag} came for a tensor of {length} bytes"
        return length == total

    def _complete(self, message: Message) -> None:
        self._current = None
        message.is_done = True
        if message.instead_of is not None:
            message.instead_of.is_done = True
        elif message in self._aside and (request := self._take_request(message.tag)) is not None:
            self._aside.remove(message)  # it was set aside, and somebody has asked for it meanwhile
            self._deliver(message, request)

    def _deliver(self, kept: Message, request: Message) -> None:
        if self._fits(request, kept.tag, kept.data.numel()):
            request.data.copy_(kept.data)
        request.is_done = True


class Inbox(_Matching):
    """What one member receives from another of its host, whose group rank is `rank`."""

    def __init__(
        self, segment: Segment, layout: Layout, source: int, target: int, rank: int, anybody: list[Message]
    ) -> None:
        super().__init__(rank, anybody)
        self._words = segment.words()
        self._at = layout.channel_word(source, target)
        self._pieces = [
            segment.tensor(layout.piece_at(source, target, parity), layout.piece_bytes, torch.uint8)
            for parity in range(PIECES_PER_CHANNEL)
        ]
        self._taken = 0

    def has_mail(self) -> bool:
        return bool(self._words[self._at + _SENT] > self._taken)

    def advance(self) -> bool:
        """Take what has come and was asked for; return whether something moved."""
        has_moved = False
        while self.has_mail() and (self._current is not None or self.requests or self._anybody):
            has_moved = True
            if self._current is None:
                header = self._at + _HEADER + (self._taken % PIECES_PER_CHANNEL) * LINE_WORDS
                self._current = self._match(self._words[header], self._words[header + 1])
            self._take_piece(self._current)
        return has_moved

    def _take_piece(self, message: Message) -> None:
        parity = self._taken % PIECES_PER_CHANNEL
        header = self._at + _HEADER + parity * LINE_WORDS
        length = self._words[header + 2]
        if length:
            message.data[message.offset : message.offset + length].copy_(self._pieces[parity][:length])
        message.offset += length
        self._taken += 1
        self._words[self._at + _TAKEN] = self._taken
        if message.offset < message.data.numel():
            return
        self._complete(message)


# The same over a connection to another host.

_LEAD = struct.Struct("!qq")  # tag and bytes of the message that follows


class _Remote:
    """One direction of a connection to a member on another host."""

    def __init__(self, connection: Connection, links: Links) -> None:
        self.connection = connection
        self._links = links
        self._pump: Pump | None = None
        self._is_lost = False

    def _resume(self, pump: Pump) -> bool:
        """Let a pump do what it can now; return whether it has ended well. A failure is found by who waits."""
        try:
            next(pump)
        except StopIteration:
            return True
        except (OSError, CommunicationError) as error:
            self._is_lost = True
            self._links.explain(self.connection.rank, error)
        return False


class RemoteOutbox(_Remote):
    """What one member sends to another on another host."""

    event = select.POLLOUT

    def __init__(self, connection: Connection, links: Links) -> None:
        super().__init__(connection, links)
        self.queue: deque[Message] = deque()

    @property
    def is_wanted(self) -> bool:
        return bool(self.queue) and not self._is_lost

    def has_room(self) -> bool:
        return False  # whoever waits looks at the connection itself

    def advance(self) -> bool:
        """Send what can be sent now; return whether a message is through."""
        has_moved = False
        while self.is_wanted:
            message = self.queue[0]
            if self._pump is None:
                data = as_buffer(message.data)
                self._pump = self.connection.send(_LEAD.pack(message.tag, len(data)), data)
            if not self._resume(self._pump):
                break
            self._pump, has_moved, message.is_done = None, True, True
            self.queue.popleft()
        return has_moved


class RemoteInbox(_Remote, _Matching):
    """What one member receives from another on another host."""

    event = select.POLLIN

    def __init__(self, connection: Connection, links: Links, anybody: list[Message]) -> None:
        _Remote.__init__(self, connection, links)
        _Matching.__init__(self, connection.rank, anybody)

    @property
    def is_wanted(self) -> bool:
        return bool(self._current is not None or self.requests or self._anybody) and not self._is_lost

    def has_mail(self) -> bool:
        return False

    def advance(self) -> bool:
        """Take what has come and was asked for; return whether a message is through."""
        has_moved = False
        while self.is_wanted:
            if self._pump is None:
                self._pump = self._take()
            if not self._resume(self._pump):
                break
            self._pump, has_moved = None, True
        return has_moved

    def _take(self) -> Pump:
        lead = bytearray(_LEAD.size)
        yield from self.connection.receive(lead)
        message = self._current = self._match(*_LEAD.unpack(lead))
        yield from self.connection.receive(as_buffer(message.data))
        self._complete(message)
