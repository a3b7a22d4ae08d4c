"""Answers the calls of a store: those for the directory, those for a shard, or both in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.communication.calls import Call
from cordee.communication.messages import Message
from cordee.core.errors import StoreError
from cordee.parameters.directory import Directory, join
from cordee.parameters.messages import (
    Alive,
    AskMemory,
    Bye,
    Create,
    Done,
    Enlisted,
    Exchange,
    Fill,
    JoinRequest,
    Locate,
    Located,
    Meet,
    Memory,
    Place,
    Placed,
    Pull,
    PullRows,
    Push,
    PushRows,
    Ready,
    SetUpdater,
    Standing,
    Value,
)
from cordee.parameters.shard import Part, Shard


@dataclass
class _Waiting:
    call: Call
    deadline_s: float
    problem: Callable[[], str]


class StoreService:
    """Called by one thread at a time. `tick` must be called a few times a second, under the same lock."""

    def __init__(self, directory: Directory | None, shard: Shard | None) -> None:
        self.directory, self.shard = directory, shard
        self.is_over = False
        self.lost: frozenset[str] = frozenset()  # workers that were given up: what they say is too late
        self._pulls: dict[int, list[_Waiting]] = {}  # part -> pulls that want a later version
        self._meets: dict[str, _Waiting] = {}
        self._places: dict[str, list[tuple[Call, Place]]] = {}
        self._handlers: dict[type[Message], Callable[[Call, Any], None]] = {}
        if shard is not None:
            self._handlers |= {
                Push: self._push,
                Exchange: self._exchange,
                Pull: self._pull,
                PushRows: self._push_rows,
                PullRows: self._pull_rows,
                Create: self._create,
                Fill: self._fill,
                SetUpdater: self._set_updater,
                AskMemory: self._memory,
            }
        if directory is not None:
            self._handlers |= {
                JoinRequest: self._enlist,
                Alive: self._alive,
                Place: self._place,
                Ready: self._ready,
                Locate: self._locate,
                Meet: self._meet,
            }
        self._handlers[Bye] = self._bye

    def handle(self, call: Call) -> None:
        if call.caller in self.lost and type(call.message) is not Bye:
            call.refuse("failed", "this worker was given up: it was silent for longer than the failure timeout")
            return
        handler = self._handlers.get(type(call.message))
        if handler is None:
            what = "the directory" if self.shard is None else "a server"
            call.refuse("unexpected", f"{type(call.message).__name__} is nothing for {what} of a store")
            return
        handler(call, call.message)

    def tick(self, now_s: float) -> list[str]:
        """End waits that are late, give up silent participants; return what there is to say."""
        self._expire(now_s)
        if self.directory is None:
            return []
        lost = self.directory.lose_silent(now_s)
        if lost:
            self.lost = frozenset(self.directory.lost_workers)
            for name in list(self._meets):
                self._try_meet(name)
        return [
            f"{participant} is lost: it was silent for {self.directory.failure_timeout_s:g} s" for participant in lost
        ]

    # Of a shard.

    def _push(self, call: Call, push: Push) -> None:
        call.reply(Done(self._apply(call, push).version))

    def _exchange(self, call: Call, push: Exchange) -> None:
        part = self._apply(call, push)
        assert self.shard is not None
        if self.shard.is_whole(part, call.caller, push.sequence):
            count = call.buffers[0].spec.shape[0]
            _send(call, part, push.start, push.start + count, push.reads_memory)
        else:
            call.reply(Value(part.version))

    def _apply(self, call: Call, push: Push | Exchange) -> Part:
        assert self.shard is not None
        (pushed,) = call.buffers
        part = self.shard.push(push.number, call.caller, call.incarnation, push.sequence, push.start, pushed.torch())
        if self._pulls:
            self._serve_waiting(push.number, part)
        return part

    def _push_rows(self, call: Call, push: PushRows) -> None:
        assert self.shard is not None
        rows, values = call.buffers
        part = self.shard.push_rows(
            push.number, call.caller, call.incarnation, push.sequence, rows.torch(), values.torch()
        )
        self._serve_waiting(push.number, part)
        call.reply(Done(part.version))

    def _pull_rows(self, call: Call, pull: PullRows) -> None:
        assert self.shard is not None
        (rows,) = call.buffers
        part, values = self.shard.pull_rows(pull.number, rows.torch())
        call.reply(Value(part.version), [values])

    def _pull(self, call: Call, pull: Pull) -> None:
        assert self.shard is not None
        part = self.shard.part(pull.number)
        if part.version >= pull.min_version:
            _send(call, part, pull.start, pull.stop, pull.reads_memory)
            return

        def problem() -> str:
            return (
                f"key '{part.key}' is at version {part.version} and did not reach version {pull.min_version} within "
                f"{pull.timeout_s:g} s"
            )

        waiting = _Waiting(call, time.monotonic() + pull.timeout_s, problem)
        self._pulls.setdefault(pull.number, []).append(waiting)

    def _serve_waiting(self, number: int, part: Part) -> None:
        for waiting in self._pulls.pop(number, []):
            pull = waiting.call.message
            assert isinstance(pull, Pull)
            if part.version >= pull.min_version:
                _send(waiting.call, part, pull.start, pull.stop, pull.reads_memory)
            else:
                self._pulls.setdefault(number, []).append(waiting)

    def _create(self, call: Call, create: Create) -> None:
        assert self.shard is not None
        self.shard.create(create.number, create.key, create.dtype, create.shape, create.is_cut)
        call.reply(Done())

    def _fill(self, call: Call, fill: Fill) -> None:
        assert self.shard is not None
        (values,) = call.buffers
        self.shard.fill(fill.number, fill.start, values.torch())
        call.reply(Done())

    def _set_updater(self, call: Call, chosen: SetUpdater) -> None:
        assert self.shard is not None
        self.shard.set_updater(chosen.name, chosen.settings, chosen.numbers)
        call.reply(Done())

    def _memory(self, call: Call, asked: AskMemory) -> None:
        assert self.shard is not None
        memory = self.shard.part(asked.number).memory
        fd, num_bytes = (0, 0) if memory is None else memory.address
        call.reply(Memory(os.getpid(), fd, num_bytes))

    def _bye(self, call: Call, bye: Bye) -> None:
        if self.shard is not None:
            self.shard.forget(call.caller)
        if self.directory is not None:
            self.directory.leave(call.caller)
            for name in list(self._meets):
                self._try_meet(name)
        call.reply(Done())

    # Of the directory.

    def _enlist(self, call: Call, enlist: JoinRequest) -> None:
        directory = self._directory()
        participant = directory.enlist(
            call.caller,
            enlist.role,
            pid=enlist.pid,
            host=enlist.host,
            address=enlist.address,
            now_s=time.monotonic(),
        )
        call.reply(
            Enlisted(
                index=participant.index,
                num_workers=directory.num_workers,
                num_servers=directory.num_servers,
                workers_present=len(directory.present("worker")),
                addresses=tuple(server.address for server in directory.present("server")),
            )
        )

    def _alive(self, call: Call, alive: Alive) -> None:
        participant = self._directory().hear(call.caller, time.monotonic())
        if self.is_over and participant.role == "server":
            participant.has_left = True
        call.reply(Standing(self.is_over, tuple(self.lost) if participant.role == "server" else ()))

    def _place(self, call: Call, place: Place) -> None:
        record, is_owner = self._directory().declare(
            call.caller, place.key, place.dtype, place.shape, place.sequence, time.monotonic()
        )
        if is_owner or record.is_ready:
            call.reply(Placed(is_owner, record.number, record.cuts))
        else:
            self._places.setdefault(place.key, []).append((call, place))

    def _ready(self, call: Call, ready: Ready) -> None:
        record = self._directory().keys[ready.key]
        self._directory().finish(ready.key)
        call.reply(Done())
        for waiting, _ in self._places.pop(ready.key, []):
            waiting.reply(Placed(False, record.number, record.cuts))

    def _locate(self, call: Call, locate: Locate) -> None:
        record = self._directory().locate(locate.key)
        call.reply(Located(record.number, record.kind, record.shape, record.cuts))  # type: ignore[arg-type]

    def _meet(self, call: Call, meet: Meet) -> None:
        directory = self._directory()
        directory.hear(call.caller, time.monotonic())

        def problem() -> str:
            return f"barrier: {join(directory.missing_at_barrier())} did not come within {meet.timeout_s:g} s"

        self._meets[call.caller] = _Waiting(call, time.monotonic() + meet.timeout_s, problem)
        self._try_meet(call.caller)

    def _try_meet(self, name: str) -> None:
        waiting = self._meets.get(name)
        if waiting is None:
            return
        meet = waiting.call.message
        assert isinstance(meet, Meet)
        directory = self._directory()
        try:
            if not directory.meet(name, meet.number):
                return
        except StoreError as error:
            del self._meets[name]
            directory.leave_barrier(name)
            waiting.call.refuse("failed", str(error))
            return
        for other in [other for other in self._meets if directory.has_met(other, self._number(other))]:
            self._meets.pop(other).call.reply(Done())

    def _number(self, name: str) -> int:
        meet = self._meets[name].call.message
        assert isinstance(meet, Meet)
        return meet.number

    def _expire(self, now_s: float) -> None:
        for number, waits in list(self._pulls.items()):
            kept = [waiting for waiting in waits if waiting.deadline_s > now_s]
            for waiting in waits:
                if waiting.deadline_s <= now_s:
                    waiting.call.refuse("failed", waiting.problem())
            if kept:
                self._pulls[number] = kept
            else:
                del self._pulls[number]
        for name, waiting in list(self._meets.items()):
            if waiting.deadline_s <= now_s:
                waiting.call.refuse("failed", waiting.problem())
                del self._meets[name]
                self._directory().leave_barrier(name)
        for key, places in list(self._places.items()):
            self._expire_places(key, places, now_s)

    def _expire_places(self, key: str, places: list[tuple[Call, Place]], now_s: float) -> None:
        directory = self._directory()
        record = directory.keys[key]
        if now_s - record.placed_s <= directory.failure_timeout_s:
            return
        del self._places[key]
        for call, _ in places:
            record.declared_by.pop(call.caller, None)
            call.refuse(
                "failed",
                f"key '{key}' has no value after {directory.failure_timeout_s:g} s: "
                f"{directory.describe(record.owner)} should have brought it",
            )

    def _directory(self) -> Directory:
        assert self.directory is not None
        return self.directory


def _send(call: Call, part: Part, start: int, stop: int, reads_memory: bool) -> None:
    """Answer with elements of a part, or with the stamp at which the client finds them in shared memory."""
    if reads_memory and (stamp := part.stamp(start, stop)) >= 0:
        call.reply(Value(part.version, stamp))
    else:
        call.reply(Value(part.version), part.piece(start, stop))
