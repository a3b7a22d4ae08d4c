"""Point-to-point messages between the members of a host, in the order and by the tags that torch expects.

A message that fits the channel is sent, and one that has come is received, before the call returns. The rest is
moved on by whoever waits for it, and by a thread of the group, so that it also gets through while its owner computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from cordee.communication.shared_memory.execution import CordeeWork
from cordee.communication.shared_memory.futex import Futex, yield_core
from cordee.communication.shared_memory.liveness import PeerWatch
from cordee.communication.shared_memory.segment import CHANNEL_FUTEX, LINE_WORDS, PIECES_PER_CHANNEL, Layout, Segment
from cordee.core.errors import CommunicationError

_YIELD_S = 0.0005


class MessageWork(CordeeWork):
    """A message that was posted; waiting for it moves it on."""

    def __init__(self, mailbox: Mailbox, message: Message, result: Any, ranks: tuple[int, ...]) -> None:
        super().__init__(result, done=False)
        self._mailbox = mailbox
        self._message = message
        self._ranks = ranks

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            self._mailbox.wait_for(self, limit_s)
        return super().wait(timeout)

    def _wait_quietly(self) -> None:
        try:
            self.wait()
        except CommunicationError:
            if not self._done:
                raise

    def source_rank(self) -> int:
        """The group rank that the message came from."""
        return self._ranks[self._message.source]

    _source_rank = source_rank


class _Posted:
    def __init__(self, work: MessageWork, message: Message, peers: tuple[int, ...], after: Any) -> None:
        self.work, self.message, self.peers, self.after = work, message, peers, after


class Mailbox:
    """All channels of one member. Safe to use from several threads."""

    def __init__(
        self, segment: Segment, layout: Layout, member: int, watch: PeerWatch, ranks: tuple[int, ...], timeout_s: float
    ) -> None:
        self._watch = watch
        self._member_word = layout.member_word
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._futex = Futex(segment, layout, member, sleepers_at=layout.channel_sleepers_at, futex_word=CHANNEL_FUTEX)
        others = [other for other in range(layout.num_members) if other != member]
        self._anybody: list[Message] = []
        self._outboxes = {other: Outbox(segment, layout, member, other) for other in others}
        self._inboxes = {other: Inbox(segment, layout, other, member, self._anybody) for other in others}
        self._lock = threading.Lock()
        self._posted: dict[Message, _Posted] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, data: Tensor, target: int, tag: int, result: Any) -> MessageWork:
        """Send flat bytes to a member; `data` must not change until the work is done."""
        message = Message(data, tag)
        return self._post(message, (target,), result, None)

    def receive(self, data: Tensor, source: int | None, tag: int, result: Any, after: Any) -> MessageWork:
        """Receive flat bytes from a member, or from whoever sends first; `after` runs when they are all there."""
        peers = tuple(self._inboxes) if source is None else (source,)
        return self._post(Message(data, tag), peers, result, after, receive=True)

    def wait_for(self, work: MessageWork, timeout_s: float | None) -> None:
        """Move messages on until `work` is done; a dead or frozen peer, or the end of time, fails it."""
        started = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        looks = 0
        while not work.is_completed():
            self._advance()
            if work.is_completed():
                return
            waited_s = time.monotonic() - started
            if waited_s < _YIELD_S:
                yield_core()
                continue
            looks += 1
            if looks > 1:
                self._check_peers()
            if waited_s > limit_s:
                raise CommunicationError(f"no message came or went within {limit_s:g} s: is the other rank sending?")
            if not work.is_completed():
                self._futex.sleep(self._can_move)

    def close(self) -> None:
        """Fail what is still on its way and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._lock:
            left = list(self._posted.values())
            self._posted.clear()
        for posted in left:
            posted.work.finish(CommunicationError("the process group was destroyed before the message was through"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _post(
        self, message: Message, peers: tuple[int, ...], result: Any, after: Any, *, receive: bool = False
    ) -> MessageWork:
        work = MessageWork(self, message, result, self._ranks)
        posted = _Posted(work, message, peers, after)
        with self._lock:
            if not receive:
                self._outboxes[peers[0]].queue.append(message)
            elif len(peers) == 1:
                self._inboxes[peers[0]].ask(message)
            elif not any(inbox.serve_aside(message) for inbox in self._inboxes.values()):
                self._anybody.append(message)
            self._posted[message] = posted
        self._advance()
        if not work.is_completed():
            self._call_thread()
        return work

    def _advance(self) -> None:
        finished: list[_Posted] = []
        with self._lock:
            for member, outbox in self._outboxes.items():
                if outbox.advance():
                    self._futex.wake(member)
            for member, inbox in self._inboxes.items():
                if inbox.advance():
                    self._futex.wake(member)
            for message in [message for message in self._posted if message.is_done]:
                finished.append(self._posted.pop(message))
        for posted in finished:
            self._finish(posted)

    def _finish(self, posted: _Posted) -> None:
        if posted.message.error is not None:
            rank = self._ranks[posted.message.source]
            posted.work.finish(
                CommunicationError(f"recv from rank {rank}: {posted.message.error}; send and recv must agree")
            )
            return
        if posted.after is not None:
            posted.after()
        posted.work.finish()

    def _can_move(self) -> bool:
        return any(box.queue and box.has_room() for box in self._outboxes.values()) or any(
            (box.requests or self._anybody) and box.has_mail() for box in self._inboxes.values()
        )

    def _check_peers(self) -> None:
        """Fail the messages whose peers are dead, frozen or gone."""
        with self._lock:
            waited_for = {peer for posted in self._posted.values() for peer in posted.peers}
        failures = {peer: self._watch.find_failure([self._member_word(peer)]) for peer in waited_for}
        if not any(failures.values()):
            return
        self._advance()  # one may have sent everything before it went
        with self._lock:
            lost = [posted for posted in self._posted.values() if all(failures.get(peer) for peer in posted.peers)]
            for posted in lost:
                del self._posted[posted.message]
        for posted in lost:
            failure = failures[posted.peers[0]]
            assert failure is not None
            posted.work.finish(CommunicationError(failure.message))

    def _call_thread(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="cordee-messages", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._posted or self._closed)
                if self._closed:
                    return
            self._advance()
            if self._posted:
                self._check_peers()
                self._futex.sleep(self._can_move)


# Messages from one process of a host to another: a ring of two pieces per direction, and matching by tag.
#
# The source writes a piece and moves its counter; the target copies the piece out and moves its own. A message longer
# than a piece travels as several. Messages of one source arrive in the order sent; when the next one has a tag that
# nobody asked for while another tag is asked for, it is set aside.
#
# Nothing here waits: `advance` does what can be done now. Not thread-safe; the mailbox holds a lock.

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

    def advance(self) -> bool:
        """Take what has come and was asked for; return whether something moved."""
        has_moved = False
        while self.has_mail() and (self._current is not None or self.requests or self._anybody):
            has_moved = True
            if self._current is None:
                self._current = self._match()
            self._take_piece(self._current)
        return has_moved

    def _match(self) -> Message:
        header = self._at + _HEADER + (self._taken % PIECES_PER_CHANNEL) * LINE_WORDS
        tag, total = self._words[header], self._words[header + 1]
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
