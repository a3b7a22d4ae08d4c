"""The server of a federation: hears clients, leads rounds, and keeps everything that a round needs on disk.

    a round begins      who is asked is written down, then clients are answered with work
    a result comes      it is written and synced, then acknowledged; it counts once
    the round ends      the new parameters are saved as a checkpoint, then the results are forgotten

A server that is killed between any two of these continues with the very round: from the newest checkpoint, the record
of the round, and the results that it has acknowledged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from cordee.cluster.engines.agent_messages import Versions
from cordee.communication.channel import Peer, Received, ServerChannel
from cordee.communication.messages import Accepted, Message, Refused
from cordee.communication.wire import Buffer, Parcel, outgoing
from cordee.core.errors import CommunicationError, CordeeError, StorageError, TrainingError
from cordee.core.fault_points import reach
from cordee.runs.federation.learning import FederationLearning
from cordee.runs.federation.messages import (
    ANOTHER_MODEL,
    LATE,
    NOT_INVITED,
    NOT_READY,
    REVOKED,
    WRONG_UPDATE,
    Alive,
    Enrol,
    Enrolled,
    Failed,
    Finished,
    Poll,
    Ready,
    Result,
    Taken,
    Task,
    Wait,
    Work,
)
from cordee.runs.federation.rounds import BufferedRound, MaskedRound, Round
from cordee.runs.federation.store import (
    ClientRecord,
    FederationStore,
    ResultRecord,
    RoundRecord,
    pack_buffers,
    unpack_buffers,
)

log = logging.getLogger("cordee.federation")
_IDLE_S = 0.5  # the longest wait between two looks at deadlines and clients
_RETRY_S = 1.0  # before a round that could not be made is tried again
_MOST_FAILURES = 5  # of a round by errors of clients, before the run ends
_GOODBYE_S = 5.0  # that clients have to hear that the run is over
_MOST_AT_ONCE = 256  # messages that are heard before rounds continue


@dataclass
class _Client:
    """A client that this server has heard."""

    record: ClientRecord
    heard_s: float
    peer: Peer | None = None
    is_ready: bool = False
    num_samples: int = 0
    poll: Received | None = None  # that waits for an answer
    poll_s: float = 0.0
    knows_end: bool = False


@dataclass
class _Turn:
    """What was heard in one turn and must be on disk before it is acknowledged."""

    results: list[ResultRecord] = field(default_factory=list)
    replies: list[Received] = field(default_factory=list)


class FederationServer:
    """Leads the rounds of a federation until they are done. One thread."""

    def __init__(
        self,
        channel: ServerChannel,
        store: FederationStore,
        learning: FederationLearning,
        *,
        job_toml: str,
        num_classes: int,
        num_clients: int,
        failure_timeout_s: float,
        should_stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """`num_clients` must be there before the first round begins."""
        self._channel, self._store, self._learning = channel, store, learning
        self._job_toml, self._num_classes = job_toml, num_classes
        self._num_clients = num_clients
        self._failure_timeout_s = failure_timeout_s
        self._heartbeat_s = failure_timeout_s / 5
        self._should_stop, self._say = should_stop, say
        self._version = -1
        self._records: dict[str, ClientRecord] = {}  # by key
        self._clients: dict[str, _Client] = {}  # by name
        self._round: Round | None = None
        self._stage_s = 0.0  # when the stage began
        self._next_try_s = 0.0
        self._num_failures = 0  # of attempts in a row, by errors of clients
        self._requests: dict[str, tuple[int, int]] = {}  # tasks of an asynchronous round before, still under way
        self._said = ""
        self._parcel: Parcel | None = None

    def run(self) -> str | None:
        """Lead rounds to the end; return what stopped the run early, if anything did."""
        self._recover()
        while True:
            reason = self._learning.end_reason()
            if reason is not None or self._should_stop():
                break
            self._turn()
        stopped_by = "interrupt" if reason is None else reason or None
        self._say_goodbye(stopped_by)
        return stopped_by

    # Hearing.

    def _turn(self) -> None:
        turn = _Turn()
        received = self._channel.receive(self._wait_s())
        for _ in range(_MOST_AT_ONCE):
            if received is None:
                break
            self._hear(received, turn)
            received = None if self._round is not None and self._round.is_full else self._channel.receive(0.0)
        self._keep(turn)
        self._continue()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        times = [now_s + _IDLE_S]
        if self._round is None and self._next_try_s > now_s:
            times.append(self._next_try_s)
        if self._round is not None:
            times.append(self._stage_s + self._learning.settings.deadline_s)
        return max(0.0, min(times) - now_s)

    def _hear(self, received: Received, turn: _Turn) -> None:
        key, message = received.envelope.sender, received.message
        self._refresh()
        if isinstance(message, Enrol):
            self._answer(received, self._enrol(message, key))
            return
        record = self._records.get(key)
        if record is None:
            self._answer(received, Refused(NOT_INVITED, "no client of this federation has this key: join with a token"))
            return
        if record.is_revoked:
            self._answer(received, Refused(REVOKED, f"client {record.name} was revoked"))
            return
        client = self._clients.setdefault(record.name, _Client(record, 0.0))
        client.record, client.heard_s, client.peer = record, time.monotonic(), received.peer
        match message:
            case Alive():
                return
            case Ready():
                self._answer(received, self._make_ready(client, message))
            case _ if not client.is_ready:
                self._answer(received, Refused(NOT_READY))
            case Poll():
                client.poll, client.poll_s = received, client.heard_s
            case Failed():
                self._answer(received, Accepted())
                self._fail(client.record.name, message.task, message.error)
            case Result():
                self._hear_result(client, received, message, turn)
            case _:
                self._answer(received, Refused("malformed", "this is not for a server"))

    def _refresh(self) -> None:
        """Read the clients again if somebody invited or revoked."""
        if (version := self._store.version()) != self._version:
            self._version = version
            self._read_clients()

    def _read_clients(self) -> None:
        records = self._store.clients()
        self._records = {record.key: record for record in records if record.key}
        for record in records:
            if record.is_revoked and (gone := self._clients.pop(record.name, None)) is not None:
                self._learning.warn(f"client {record.name} was revoked")
                self._lose(record.name, "it was revoked")
                if gone.poll is not None:
                    self._answer(gone.poll, Refused(REVOKED, f"client {record.name} was revoked"))

    def _enrol(self, message: Enrol, key: str) -> Message:
        if message.versions != (own := Versions.here()):
            detail = f"this host has {message.versions.describe()}, the server {own.describe()}: install the same"
            return Refused(ANOTHER_MODEL, detail)
        known = self._records.get(key)
        if known is not None and known.name == message.name and not known.is_revoked:
            return Enrolled(self._job_toml, self._num_classes, self._heartbeat_s)
        reason = self._learning.refuses_new(len(self._records))
        reason = reason or self._store.enrol(message.name, message.ticket, key)
        if reason:
            return Refused(REVOKED if "revoked" in reason else NOT_INVITED, reason)
        self._read_clients()
        return Enrolled(self._job_toml, self._num_classes, self._heartbeat_s)

    def _make_ready(self, client: _Client, message: Ready) -> Message:
        name = client.record.name
        if message.layout != self._learning.layout:
            return Refused(
                ANOTHER_MODEL,
                f"the model of client {name} has other parameters than the server's: its data has another shape or "
                "other classes, or the job's model is another one there",
            )
        if message.num_samples < 1:
            return Refused(ANOTHER_MODEL, f"client {name} has no samples to train on")
        problem = self._learning.check_state(name, message.state_round)
        if problem:
            return Refused(ANOTHER_MODEL, problem)
        if not client.is_ready:
            self._learning.client_came(client.record, message.num_samples, self._say)
        client.is_ready, client.num_samples, client.poll = True, message.num_samples, None
        return Accepted()

    def _hear_result(self, client: _Client, received: Received, message: Result, turn: _Turn) -> None:
        name, current = client.record.name, self._round
        task = message.task
        if current is None or task.stage != current.stage or not current.is_of(name, task):
            self._answer(received, Refused(LATE, f"the server is beyond round {message.task.round + 1}"))
            return
        stored = ResultRecord(name, message.task.stage, msgspec.msgpack.encode(message), pack_buffers(received.buffers))
        try:
            counts = current.take(name, message, _tensors(received.buffers))
        except CordeeError as error:
            self._answer(received, Refused(WRONG_UPDATE, str(error)))
            self._fail(name, message.task, str(error))
            return
        if counts:
            turn.results.append(stored)
            turn.replies.append(received)
        elif name in current.failed:
            self._answer(received, Refused(WRONG_UPDATE, current.failed[name]))
        else:  # it was taken before: the acknowledgement was lost
            self._answer(received, Taken())

    def _keep(self, turn: _Turn) -> None:
        if turn.results:
            assert self._round is not None
            record = self._round.record
            self._store.add_results(record.round, record.attempt, turn.results)
        for received in turn.replies:
            self._answer(received, Taken())

    # Rounds.

    def _recover(self) -> None:
        """Continue with the round that was under way, if it is not in the checkpoint."""
        self._read_clients()
        record = self._store.round()
        if record is None:
            return
        if record.round != self._learning.num_rounds:  # its sum is in the checkpoint already
            answered = {stored.client for stored in self._store.results(record.round, record.attempt)}
            self._requests = {name: one for name, one in record.requests.items() if name not in answered}
            self._store.end_round()
            return
        self._open(record)
        assert self._round is not None
        by_stage: dict[str, list[ResultRecord]] = {}
        for stored in self._store.results(record.round, record.attempt):
            by_stage.setdefault(stored.stage, []).append(stored)
        for stage in ("train", "keys", "shares", "masked", "revealed"):
            if self._round is None or self._round.stage != stage:
                continue
            closed = record.closed.get(stage)
            for stored in by_stage.get(stage, []):
                if closed is None or stored.client in closed:
                    message = msgspec.msgpack.decode(stored.header, type=Result)
                    self._round.take(stored.client, message, unpack_buffers(stored.buffers))
            if closed is not None:
                self._round.end_stage()
        now_s = time.monotonic()
        for known in self._records.values():  # they have time to come back
            if not known.is_revoked:
                self._clients[known.name] = _Client(known, now_s)
        self._learning.warn(
            f"the server was started again in round {record.round + 1}: {len(record.asked)} clients were asked, and "
            f"{len(by_stage.get(self._round.stage, []))} have answered"
        )

    def _open(self, record: RoundRecord) -> None:
        self._round = self._learning.open_round(record)
        self._stage_s = time.monotonic()
        self._parcel = None

    def _continue(self) -> None:
        """Begin or end what is due, and answer those who wait."""
        while True:
            if self._round is None and not self._begin_round():
                break
            if not self._is_stage_over():
                break
            self._end_stage()
        self._answer_polls()

    def _present(self) -> list[ClientRecord]:
        limit_s = time.monotonic() - self._failure_timeout_s
        here = [c.record for c in self._clients.values() if c.is_ready and c.heard_s >= limit_s]
        return sorted(here, key=lambda record: record.number)

    def _begin_round(self) -> bool:
        if time.monotonic() < self._next_try_s or self._learning.end_reason() is not None:
            return False
        present = [record.name for record in self._present()]
        everybody = [record.name for record in sorted(self._records.values(), key=lambda r: r.number)]
        asked, waits_for = self._learning.draw(present, everybody, self._num_clients)
        if waits_for:
            if waits_for != self._said:
                self._said = waits_for
                self._say(waits_for)
            return False
        number = self._learning.num_rounds
        record = RoundRecord(
            round=number,
            attempt=self._new_attempt(),
            asked=tuple(asked),
            started=time.time(),
            num_wanted=self._learning.num_wanted(len(present)),
            requests=self._requests,
        )
        self._store.write_round(record)
        reach("federation.round_begun")
        self._open(record)
        return True

    def _new_attempt(self) -> int:
        """Return a number that is never used again, so that clients cannot take one attempt for another."""
        attempt = int(self._store.fact("num_attempts") or 0)
        self._store.set_fact("num_attempts", str(attempt + 1))
        return attempt

    def _is_stage_over(self) -> bool:
        assert self._round is not None
        limit_s = time.monotonic() - self._failure_timeout_s
        for name in self._round.missing:
            client = self._clients.get(name)
            if client is None or client.heard_s < limit_s:
                self._lose(name, f"nothing was heard of it for {self._failure_timeout_s:g} s")
        is_late = time.monotonic() - self._stage_s > self._learning.settings.deadline_s
        here = [name for name, client in self._clients.items() if client.heard_s >= limit_s]
        return self._round.is_stage_over(is_late=is_late, present=here)

    def _end_stage(self) -> None:
        """End a stage of the round, and the round with its last. Too few clients end the attempt."""
        current = self._round
        assert current is not None
        stage, late = current.stage, current.late
        if isinstance(current, BufferedRound):
            self._requests = current.outstanding
        heard = tuple(sorted(current.heard)) if isinstance(current, MaskedRound) else ()
        try:
            is_complete = current.end_stage()
            if not is_complete:
                closed = {**current.record.closed, stage: heard}
                current.record = msgspec.structs.replace(current.record, closed=closed)
                self._store.write_round(current.record)
                reach("federation.stage_ended")
                self._stage_s = time.monotonic()
                self._parcel = None
                return
            total, robust = current.result()
        except StorageError:
            raise
        except CordeeError as error:
            self._num_failures += bool(current.refused)
            if self._num_failures >= _MOST_FAILURES:
                reasons = "; ".join(f"{name}: {current.failed[name]}" for name in sorted(current.refused))
                raise TrainingError(
                    f"round {current.record.round + 1} failed {self._num_failures} times: {error} ({reasons})"
                ) from error
            self._learning.warn(f"round {current.record.round + 1} could not be made, and is tried again: {error}")
            self._store.end_round()
            self._round = None
            self._next_try_s = time.monotonic() + _RETRY_S
            return
        self._num_failures = 0
        self._learning.finish(current, total, robust, late)
        reach("federation.saved")
        self._store.end_round()
        reach("federation.round_ended")
        self._round = None

    def _fail(self, name: str, task: Task, reason: str) -> None:
        current = self._round
        if current is not None and current.is_of(name, task) and name in current.missing:
            current.fail(name, reason, is_refused=True)
            self._learning.warn(f"client {name} takes no part in round {current.record.round + 1}: {reason}")

    def _lose(self, name: str, reason: str) -> None:
        if self._round is not None and name in self._round.missing:
            self._round.fail(name, reason)
            self._learning.warn(f"client {name} was lost in round {self._round.record.round + 1}: {reason}")

    # Answering.

    def _answer_polls(self) -> None:
        now_s = time.monotonic()
        for name, client in sorted(self._clients.items(), key=lambda one: one[1].poll_s):
            if client.poll is None:
                continue
            if (task := self._task_for(name)) is not None:
                work, buffers = self._work_for(name, task)
                self._answer(client.poll, work, buffers)
                client.poll = None
            elif now_s - client.poll_s > self._heartbeat_s:
                self._answer(client.poll, Wait(self._said if self._round is None else ""))
                client.poll = None

    def _task_for(self, name: str) -> Task | None:
        """Return what a client that asks has to do; None while there is nothing."""
        current = self._round
        if not isinstance(current, BufferedRound):
            return current.task() if current is not None and name in current.missing else None
        if not current.may_ask(name):
            return None
        task = current.ask(name, self._new_attempt())
        self._store.write_round(current.record)
        reach("federation.asked")
        return task

    def _work_for(self, name: str, task: Task) -> tuple[Work, Sequence[Any]]:
        current = self._round
        assert current is not None
        counted = self._learning.counted(name)
        sent = self._learning.sent()
        own = tuple(sorted(sent.own))
        if isinstance(current, MaskedRound) and task.stage != "masked":
            agreement = current.agreement
            if task.stage == "keys":
                return Work(task, counted, agreement=agreement), ()
            if task.stage == "shares":
                return Work(task, counted, agreement=agreement, directory=current.directory), ()
            survivors = tuple(sorted(current.took_part))
            return Work(task, counted, agreement=agreement, survivors=survivors), ()
        if self._parcel is None:
            self._parcel = outgoing([sent.parameters, sent.buffers, *(sent.own[name] for name in own)])
        if isinstance(current, MaskedRound):
            sealed = current.sealed_for(name)
            return Work(task, counted, own, current.agreement, sealed=sealed), self._parcel
        return Work(task, counted, own), self._parcel

    def _say_goodbye(self, stopped_by: str | None) -> None:
        """Tell clients that the run is over. Asked to stop, the server waits for a moment only.

        All are waited for that were there: a client of which nothing was heard may have been heard by nobody, while
        the server computed; one that trains would look for the server for long. One that asks again was not told.
        """
        reason = "all rounds are done" if stopped_by is None else f"the server stopped ({stopped_by})"
        begun_s = time.monotonic()
        deadline_s = begun_s + (_GOODBYE_S if stopped_by != "interrupt" else _RETRY_S)
        while True:
            for name, client in self._clients.items():
                if client.poll is not None:
                    self._answer(client.poll, Finished(reason, self._learning.counted(name)))
                    client.poll, client.knows_end = None, True
            is_told = all(client.knows_end for client in self._clients.values() if client.is_ready)
            if is_told and time.monotonic() > begun_s + _RETRY_S:
                break
            if time.monotonic() >= deadline_s:
                training = [record.name for record in self._present() if not self._clients[record.name].knows_end]
                if not training or self._should_stop():
                    break
                if (waits := f"{reason}; {', '.join(training)} must be told (Ctrl-C does not wait)") != self._said:
                    self._said = waits
                    self._say(waits)
            if (received := self._channel.receive(0.05)) is not None:
                self._hear(received, turn := _Turn())
                self._keep(turn)

    def _answer(self, received: Received, message: Message, buffers: Sequence[Any] = ()) -> None:
        try:
            self._channel.reply(received, message, buffers)
        except CommunicationError as error:  # it is gone, and asks again when it is back
            log.info("%s", error)


def _tensors(buffers: Sequence[Buffer]) -> list[Tensor]:
    return [buffer.torch() for buffer in buffers]
