"""Answers the calls of a store: those for the directory, those for a shard, or both in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from cordee.checkpoint import State
from cordee.communication.calls import Call, UnavailableError
from cordee.communication.messages import Message, Refused
from cordee.core.errors import StoreError
from cordee.parameters.directory import Directory, Participant, join
from cordee.parameters.messages import (
    Alive,
    Bye,
    Create,
    Done,
    EnterBarrier,
    Fill,
    FollowerLost,
    Following,
    JoinRequest,
    Load,
    Locate,
    Located,
    Place,
    Placed,
    Pull,
    PullRows,
    Push,
    PushRows,
    Ready,
    Registered,
    SetUpdater,
    StoreStatus,
    Value,
)
from cordee.parameters.replication import Answer, ReplicatedService, encode_state
from cordee.parameters.shard import Part, Shard


@dataclass
class _Waiting:
    call: Call
    deadline_s: float
    problem: Callable[[], str]


class Loss(NamedTuple):
    """A participant that was given up, in words, and whether another has its part."""

    line: str
    has_successor: bool


class StoreService(ReplicatedService):
    """Called by one thread at a time. `tick` must be called a few times a second, under the same lock."""

    def __init__(self, directory: Directory | None, shard: Shard | None) -> None:
        super().__init__()
        self.directory, self.shard = directory, shard
        self.name = "a server of a store" if shard is not None else "the directory of a store"
        self.is_over = False
        self.lost: frozenset[str] = frozenset()  # workers that were given up: what they say is too late
        self.may_serve: Callable[[], bool] | None = None
        """With replicas: whether nobody can have taken this server's place yet."""
        self.leader = ""  # name of the server that this one follows
        self._has_taken_over = False
        self._pulls: dict[int, list[_Waiting]] = {}  # part -> pulls that want a later version
        self._at_barrier: dict[str, _Waiting] = {}
        self._places: dict[str, list[tuple[Call, Place]]] = {}
        if shard is None:
            self.handlers.clear()
        else:
            self.handlers |= {
                Push: self._push,
                Pull: self._pull,
                PushRows: self._push_rows,
                PullRows: self._pull_rows,
                Create: self._create,
                Fill: self._fill,
                SetUpdater: self._set_updater,
            }
        if directory is not None:
            self.handlers |= {
                JoinRequest: self._register,
                Alive: self._alive,
                Following: self._following,
                FollowerLost: self._follower_lost,
                Place: self._place,
                Ready: self._ready,
                Locate: self._locate,
                EnterBarrier: self._enter_barrier,
            }
        self.handlers[Bye] = self._bye

    def carry_out(self, call: Call) -> Answer | None:
        if self.may_serve is not None:
            self._check_place(call.caller, self.may_serve)
        if call.caller in self.lost and type(call.message) is not Bye:
            return Refused("failed", "this worker was given up: it was silent for longer than the failure timeout"), ()
        handler = self.handlers.get(type(call.message))
        return super().carry_out(call) if handler is None else handler(call, call.message)

    def _check_place(self, caller: str, may_serve: Callable[[], bool]) -> None:
        """Raise UnavailableError if another may serve, or for the server that this one has taken the place of."""
        if not may_serve():
            raise UnavailableError(f"{self.name} has not heard of the directory: another may have taken its place")
        if self.leader and caller != self.leader:
            self._has_taken_over = True
        elif self._has_taken_over:  # it was given up, and what it passes on now may be older than what is here
            raise UnavailableError(f"{self.name} does not follow any more: it serves")

    def dump(self) -> Iterator[tuple[Message, Sequence[Any]]]:
        shard = self._shard()
        yield SetUpdater(*shard.chosen), ()
        for number in shard.parts:
            names, buffers = encode_state(shard.dump_part(number))
            yield Load(number, names), buffers

    def load_part(self, number: int, state: State) -> None:
        self._shard().restore_part(number, state)

    def tick(self, now_s: float, is_dead: Callable[[Participant], bool]) -> list[Loss]:
        """End waits that are late, give up participants that are silent or dead; return those."""
        self._expire(now_s)
        directory = self.directory
        if directory is None:
            return []
        dead, silent = directory.lose_dead(is_dead), directory.lose_silent(now_s)
        if dead or silent:
            self.lost = frozenset(directory.lost_workers)
            for name in list(self._at_barrier):
                self._try_meet(name)
        losses = [(one, "it died") for one in dead]
        losses += [(one, f"it was silent for {directory.failure_timeout_s:g} s") for one in silent]
        return [
            Loss(f"{one} is lost: {why}{'; another process serves its values' * has_successor}", has_successor)
            for one, why in losses
            for has_successor in [directory.has_successor(one)]
        ]

    # Of a shard.

    def _push(self, call: Call, push: Push) -> Answer:
        shard, number = self.shard, push.number
        assert shard is not None
        client, incarnation = (push.client, push.incarnation) if push.client else (call.caller, call.incarnation)
        if push.encoding is None:
            (pushed,) = call.buffers
            values = pushed.torch()
        else:
            values = shard.decode(number, push.start, push.encoding, [buffer.torch() for buffer in call.buffers])
        if self._follower is None:
            part = shard.push(number, client, incarnation, push.sequence, push.start, values)
        else:

            def act() -> Done:
                own = shard.push(number, client, incarnation, push.sequence, push.start, values)
                return Done(own.version)

            relayed = msgspec.structs.replace(push, pulls=False, client=client, incarnation=incarnation)
            self.mirrored(relayed, call.buffers, act)
            part = shard.part(number)
        if self._pulls:
            self._serve_waiting(number)
        if not push.pulls:
            return Done(part.version), ()
        if not shard.is_whole(part, client):
            return Value(part.version), ()
        start, stop = push.start, push.start + values.numel()
        value = part.locate(push.memory, start, stop)
        return value, part.parcel(start, stop) if value.stamp < 0 else ()

    def _push_rows(self, call: Call, push: PushRows) -> Answer:
        rows, values = call.buffers
        client, incarnation = (push.client, push.incarnation) if push.client else (call.caller, call.incarnation)

        def act() -> Done:
            shard = self._shard()
            part = shard.push_rows(push.number, client, incarnation, push.sequence, rows.torch(), values.torch())
            return Done(part.version)

        done = self.mirrored(PushRows(push.number, push.sequence, client, incarnation), call.buffers, act)
        self._serve_waiting(push.number)
        return done, ()

    def _pull_rows(self, call: Call, pull: PullRows) -> Answer:
        (rows,) = call.buffers
        part, values = self._shard().pull_rows(pull.number, rows.torch())
        return Value(part.version), [values]

    def _pull(self, call: Call, pull: Pull) -> Answer | None:
        part = self._shard().part(pull.number)
        if part.version >= pull.min_version:
            return _value(part, pull.start, pull.stop, pull.memory)

        def problem() -> str:
            return (
                f"key '{part.key}' is at version {part.version} and did not reach version {pull.min_version} within "
                f"{pull.timeout_s:g} s"
            )

        waiting = _Waiting(call, time.monotonic() + pull.timeout_s, problem)
        self._pulls.setdefault(pull.number, []).append(waiting)
        return None

    def _serve_waiting(self, number: int) -> None:
        part = self._shard().part(number)
        for waiting in self._pulls.pop(number, []):
            pull = waiting.call.message
            assert isinstance(pull, Pull)
            if part.version >= pull.min_version:
                waiting.call.reply(*_value(part, pull.start, pull.stop, pull.memory))
            else:
                self._pulls.setdefault(number, []).append(waiting)

    def _create(self, call: Call, create: Create) -> Answer:
        def act() -> Done:
            self._shard().create(create.number, create.key, create.dtype, create.shape, create.is_cut)
            return Done()

        return self.mirrored(create, (), act), ()

    def _fill(self, call: Call, fill: Fill) -> Answer:
        (values,) = call.buffers

        def act() -> Done:
            self._shard().fill(fill.number, fill.start, values.torch())
            return Done()

        return self.mirrored(fill, call.buffers, act), ()

    def _set_updater(self, call: Call, chosen: SetUpdater) -> Answer:
        def act() -> Done:
            self._shard().set_updater(chosen.name, chosen.settings, chosen.numbers)
            return Done()

        return self.mirrored(chosen, (), act), ()

    def _bye(self, call: Call, bye: Bye) -> Answer:
        if self.shard is not None:
            client = bye.client or call.caller
            self.pass_on(Bye(client))
            self.shard.forget(client)
        if self.directory is not None:
            self.directory.leave(call.caller)
            for name in list(self._at_barrier):
                self._try_meet(name)
        return Done(), ()

    def _shard(self) -> Shard:
        assert self.shard is not None
        return self.shard

    # Of the directory.

    def _register(self, call: Call, request: JoinRequest) -> Answer:
        directory = self._directory()
        participant = directory.register(
            call.caller,
            request.role,
            pid=request.pid,
            host=request.host,
            host_id=request.host_id,
            address=request.address,
            now_s=time.monotonic(),
        )
        leader, follows = directory.leader_of(call.caller) if participant.role == "server" else ("", "")
        joined = Registered(
            index=participant.index,
            num_workers=directory.num_workers,
            num_servers=directory.num_servers,
            workers_present=len(directory.present("worker")),
            servers_missing=directory.num_missing_servers,
            addresses=directory.addresses,
            replicas=directory.replicas,
            failure_timeout_s=directory.failure_timeout_s,
            follows=follows,
            leader=leader,
        )
        return joined, ()

    def _following(self, call: Call, following: Following) -> Answer:
        self._directory().record_heartbeat(call.caller, time.monotonic())
        self._directory().follow(call.caller, following.address)
        return Done(), ()

    def _follower_lost(self, call: Call, lost: FollowerLost) -> Answer:
        self._directory().drop_follower(call.caller, lost.address, time.monotonic())
        return Done(), ()

    def _alive(self, call: Call, alive: Alive) -> Answer:
        participant = self._directory().record_heartbeat(call.caller, time.monotonic())
        if self.is_over and participant.role == "server":
            participant.has_left = True
        return StoreStatus(self.is_over, tuple(self.lost) if participant.role == "server" else ()), ()

    def _place(self, call: Call, place: Place) -> Answer | None:
        record, is_owner = self._directory().declare(
            call.caller, place.key, place.dtype, place.shape, place.sequence, time.monotonic()
        )
        if is_owner or record.is_ready:
            return Placed(is_owner, record.number, record.cuts), ()
        self._places.setdefault(place.key, []).append((call, place))
        return None

    def _ready(self, call: Call, ready: Ready) -> Answer:
        record = self._directory().keys[ready.key]
        self._directory().finish(ready.key)
        for waiting, _ in self._places.pop(ready.key, []):
            waiting.reply(Placed(False, record.number, record.cuts))
        return Done(), ()

    def _locate(self, call: Call, locate: Locate) -> Answer:
        record = self._directory().locate(locate.key)
        return Located(record.number, record.kind, record.shape, record.cuts), ()  # type: ignore[arg-type]

    def _enter_barrier(self, call: Call, entered: EnterBarrier) -> Answer | None:
        directory = self._directory()
        directory.record_heartbeat(call.caller, time.monotonic())

        def problem() -> str:
            return f"barrier: {join(directory.missing_at_barrier())} did not come within {entered.timeout_s:g} s"

        self._at_barrier[call.caller] = _Waiting(call, time.monotonic() + entered.timeout_s, problem)
        self._try_meet(call.caller)
        return None

    def _try_meet(self, name: str) -> None:
        waiting = self._at_barrier.get(name)
        if waiting is None:
            return
        entered = waiting.call.message
        assert isinstance(entered, EnterBarrier)
        directory = self._directory()
        try:
            if not directory.enter_barrier(name, entered.number):
                return
        except StoreError as error:
            del self._at_barrier[name]
            directory.leave_barrier(name)
            waiting.call.refuse("failed", str(error))
            return
        for other in [other for other in self._at_barrier if directory.has_passed_barrier(other, self._number(other))]:
            self._at_barrier.pop(other).call.reply(Done())

    def _number(self, name: str) -> int:
        entered = self._at_barrier[name].call.message
        assert isinstance(entered, EnterBarrier)
        return entered.number

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
        for name, waiting in list(self._at_barrier.items()):
            if waiting.deadline_s <= now_s:
                waiting.call.refuse("failed", waiting.problem())
                del self._at_barrier[name]
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


def _value(part: Part, start: int, stop: int, memory: int) -> Answer:
    """Return elements of a part, or the stamp at which a client that has mapped this memory finds them there."""
    part.check_range(start, stop)
    value = part.locate(memory, start, stop)
    return value, part.parcel(start, stop) if value.stamp < 0 else ()
