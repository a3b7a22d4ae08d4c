"""Point-to-point messages between the members of a group, in the order and by the tags that torch expects.

Members of one host have channels in shared memory, members of different hosts a connection. A message that fits the
channel is sent, and one that has come is received, before the call returns. The rest is moved on by whoever waits for
it, and by a thread of the group, so that it also gets through while its owner computes.
"""

from __future__ import annotations

import select
import threading
import time
from datetime import timedelta
from typing import Any

from torch import Tensor

from cordee.communication.shared_memory.channels import Inbox, Message, Outbox, RemoteInbox, RemoteOutbox
from cordee.communication.shared_memory.execution import CordeeWork
from cordee.communication.shared_memory.futex import SLEEP_S, Futex, yield_core
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.liveness import PeerWatch
from cordee.communication.shared_memory.segment import CHANNEL_FUTEX, Layout, Segment
from cordee.core.blocked_time import BLOCKED, WAITED
from cordee.core.errors import CommunicationError

_YIELD_S = 0.0005
_BOTH_S = 0.001  # between two looks at shared memory while a connection is waited for


class MessageWork(CordeeWork):
    """A message that was posted; waiting for it moves it on."""

    def __init__(self, mailbox: Mailbox, message: Message, result: Any) -> None:
        super().__init__(result, done=False)
        self._mailbox = mailbox
        self._message = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            with BLOCKED:
                started = time.monotonic()
                try:
                    self._mailbox.wait_for(self, limit_s)
                finally:
                    WAITED.add(time.monotonic() - started)  # the way through shared memory is short
        return super().wait(timeout)

    def _wait_quietly(self) -> None:
        try:
            self.wait()
        except CommunicationError:
            if not self._done:
                raise

    def source_rank(self) -> int:
        """The group rank that the message came from."""
        return self._message.source

    _source_rank = source_rank


class _Posted:
    def __init__(self, work: MessageWork, message: Message, peers: tuple[int, ...], after: Any) -> None:
        self.work, self.message, self.peers, self.after = work, message, peers, after


class Mailbox:
    """All channels of one member, by group rank. Safe to use from several threads."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        member: int,
        watch: PeerWatch,
        ranks: tuple[int, ...],
        timeout_s: float,
        links: Links | None = None,
    ) -> None:
        """`ranks` are the group ranks of the members of this host, `links` lead to those on other hosts."""
        self._watch = watch
        self._links = links
        self._member_word = layout.member_word
        self._timeout_s = timeout_s
        self._futex = Futex(segment, layout, member, sleepers_at=layout.channel_sleepers_at, futex_word=CHANNEL_FUTEX)
        self._members = {rank: other for other, rank in enumerate(ranks) if other != member}
        self._anybody: list[Message] = []
        self._outboxes: dict[int, Outbox | RemoteOutbox] = {
            rank: Outbox(segment, layout, member, other) for rank, other in self._members.items()
        }
        self._inboxes: dict[int, Inbox | RemoteInbox] = {
            rank: Inbox(segment, layout, other, member, rank, self._anybody) for rank, other in self._members.items()
        }
        for rank, connection in links.messages.items() if links is not None else ():
            assert links is not None
            self._outboxes[rank] = RemoteOutbox(connection, links)
            self._inboxes[rank] = RemoteInbox(connection, links, self._anybody)
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
                self._sleep()

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
        work = MessageWork(self, message, result)
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
            for boxes in (self._outboxes, self._inboxes):
                for rank, box in boxes.items():
                    if box.advance() and rank in self._members:
                        self._futex.wake(self._members[rank])
            for message in [message for message in self._posted if message.is_done]:
                finished.append(self._posted.pop(message))
        for posted in finished:
            self._finish(posted)

    def _finish(self, posted: _Posted) -> None:
        if posted.message.error is not None:
            source = posted.message.source
            posted.work.finish(
                CommunicationError(f"recv from rank {source}: {posted.message.error}; send and recv must agree")
            )
            return
        if posted.after is not None:
            posted.after()
        posted.work.finish()

    def _can_move(self) -> bool:
        return any(box.queue and box.has_room() for box in self._outboxes.values()) or any(
            (box.requests or self._anybody) and box.has_mail() for box in self._inboxes.values()
        )

    def _sleep(self) -> None:
        """Wait until a peer may have moved something, a few milliseconds at most."""
        with self._lock:
            masks: dict[int, int] = {}
            for box in [*self._outboxes.values(), *self._inboxes.values()]:
                if isinstance(box, RemoteOutbox | RemoteInbox) and box.is_wanted:
                    masks[box.connection.descriptor] = masks.get(box.connection.descriptor, 0) | box.event
            waits_inside = any(peer in self._members for posted in self._posted.values() for peer in posted.peers)
        if not masks:
            self._futex.sleep(self._can_move)
            return
        # There is no waiting for both at once: whoever waits for shared memory as well looks there more often.
        poll = select.poll()
        for descriptor, mask in masks.items():
            poll.register(descriptor, mask)
        poll.poll(_BOTH_S * 1000 if waits_inside else SLEEP_S * 1000)

    def _find_failure(self, rank: int) -> str | None:
        if rank not in self._members:
            assert self._links is not None
            return self._links.find_failure(rank)
        failure = self._watch.find_failure([self._member_word(self._members[rank])])
        return None if failure is None else failure.message

    def _check_peers(self) -> None:
        """Fail the messages whose peers are dead, frozen or gone."""
        with self._lock:
            waited_for = {peer for posted in self._posted.values() for peer in posted.peers}
        failures = {peer: self._find_failure(peer) for peer in waited_for}
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
            posted.work.finish(CommunicationError(failure))

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
                self._sleep()
