"""Messages from one process of a host to another: a ring of two pieces per direction, and matching by tag.

The source writes a piece and moves its counter; the target copies the piece out and moves its own. A message longer
than a piece travels as several. Messages of one source arrive in the order sent; when the next one has a tag that
nobody asked for while another tag is asked for, it is set aside.

Nothing here waits: `advance` does what can be done now. Not thread-safe; the mailbox holds a lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from cordee.communication.shared_memory.layout import LINE_WORDS, PIECES_PER_CHANNEL, Layout
from cordee.communication.shared_memory.segment import Segment

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
    source: int = -1  # member it came from, once known
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

    def advance(self) -> list[Message] | None:
        """Write what fits; return the messages that are now sent whole, or None if nothing moved."""
        if not self.queue or not self.has_room():
            return None
        done: list[Message] = []
        while self.queue and self.has_room():
            message = self.queue[0]
            self._write_piece(message)
            if message.offset >= message.data.numel():
                message.is_done = True
                done.append(self.queue.popleft())
        return done

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


class Inbox:
    """What one member receives from another. `anybody` are requests that any source may serve."""

    def __init__(self, segment: Segment, layout: Layout, source: int, target: int, anybody: list[Message]) -> None:
        self._words = segment.words()
        self._at = layout.channel_word(source, target)
        self._source = source
        self._pieces = [
            segment.tensor(layout.piece_at(source, target, parity), layout.piece_bytes, torch.uint8)
            for parity in range(PIECES_PER_CHANNEL)
        ]
        self._taken = 0
        self._current: Message | None = None
        self._anybody = anybody
        self.requests: list[Message] = []
        self._aside: list[Message] = []  # came before they were asked for; the last may still be coming in

    def has_mail(self) -> bool:
        return bool(self._words[self._at + _SENT] > self._taken)

    def ask(self, request: Message) -> bool:
        """Ask for a message; True if one that was set aside serves it at once."""
        if self.serve_aside(request):
            return True
        self.requests.append(request)
        return False

    def serve_aside(self, request: Message) -> bool:
        """Serve a request from what was set aside, if it is there."""
        for index, kept in enumerate(self._aside):
            if kept.tag == request.tag and kept.is_done:
                del self._aside[index]
                self._deliver(kept, request)
                return True
        return False

    def advance(self) -> list[Message] | None:
        """Take what has come and was asked for; return the requests now served, or None if nothing moved."""
        done: list[Message] = []
        moved = False
        while self.has_mail() and (self._current is not None or self.requests or self._anybody):
            if self._current is None:
                self._current = self._match()
            moved = True
            message = self._take_piece(self._current)
            if message is not None:
                done.append(message)
        return done if moved else None

    def _match(self) -> Message:
        header = self._at + _HEADER + (self._taken % PIECES_PER_CHANNEL) * LINE_WORDS
        tag, total = self._words[header], self._words[header + 1]
        for waiting in (self.requests, self._anybody):
            for request in waiting:
                if request.tag == tag:
                    waiting.remove(request)
                    request.source = self._source
                    if request.data.numel() == total:
                        return request
                    request.error = (
                        f"a message of {total} bytes with tag {tag} came for a tensor of {request.data.numel()} bytes"
                    )
                    return self._set_aside(tag, total, request)
        return self._set_aside(tag, total, None)

    def _set_aside(self, tag: int, total: int, misfit: Message | None) -> Message:
        kept = Message(torch.empty(total, dtype=torch.uint8), tag, source=self._source, instead_of=misfit)
        if misfit is None:
            self._aside.append(kept)  # otherwise it is swallowed, and the request reported as failed
        return kept

    def _take_piece(self, message: Message) -> Message | None:
        parity = self._taken % PIECES_PER_CHANNEL
        header = self._at + _HEADER + parity * LINE_WORDS
        length = self._words[header + 2]
        if length:
            message.data[message.offset : message.offset + length].copy_(self._pieces[parity][:length])
        message.offset += length
        self._taken += 1
        self._words[self._at + _TAKEN] = self._taken
        if message.offset < message.data.numel():
            return None
        self._current = None
        message.is_done = True
        if message.instead_of is not None:
            message.instead_of.is_done = True
            return message.instead_of
        if any(message is kept for kept in self._aside):
            return self._serve_late(message)
        return message

    def _serve_late(self, kept: Message) -> Message | None:
        """A message set aside is complete: somebody may have asked for it meanwhile."""
        for waiting in (self.requests, self._anybody):
            for request in waiting:
                if request.tag == kept.tag:
                    waiting.remove(request)
                    self._aside = [other for other in self._aside if other is not kept]
                    self._deliver(kept, request)
                    return request
        return None

    def _deliver(self, kept: Message, request: Message) -> None:
        request.source = self._source
        if kept.data.numel() == request.data.numel():
            request.data.copy_(kept.data)
        else:
            request.error = (
                f"a message of {kept.data.numel()} bytes with tag {kept.tag} came for a tensor of "
                f"{request.data.numel()} bytes"
            )
        request.is_done = True
