"""The main function of a server process: holds slices of the parameters and serves pushes and pulls."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.cluster import Team
from cordee.communication.buffers import Buffer
from cordee.communication.calls import Call, CallServer, Connection, UnavailableError
from cordee.communication.channel import RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.this_host import Listening
from cordee.core import Job
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import identify, reach
from cordee.monitoring import setup_logging
from cordee.runs.dispatched.link import END_SIGNAL, DispatchLink, MemberSpec
from cordee.runs.dispatched.messages import HandOver, Leave, SecondLost
from cordee.strategies.parameter_server.compression import Tracker, make_codec
from cordee.strategies.parameter_server.layout import Layout, Piece, make_layout
from cordee.strategies.parameter_server.messages import (
    LIMITS,
    PARAMETERS,
    Adopt,
    Extras,
    Fence,
    Load,
    LoadExtras,
    Pull,
    Pulled,
    PullExtras,
    Push,
    Pushed,
    PushExtras,
    Settle,
    Snapped,
    Snapshot,
    SnapshotExtras,
)
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import ParameterShard, UnitPush
from cordee.strategies.parameter_server.state import (
    decode_plain,
    dump_piece,
    encode_plain,
    flatten_parameters,
    load_piece,
    piece_state,
    restore_piece,
)
from cordee.strategies.parameter_server.strategy import can_split, fixed_of, settings_of
from cordee.training.components import assemble

log = logging.getLogger("cordee.server")

_LEAVING_S = 0.1  # between two attempts to hand over


class ParameterService:
    """Answers calls with what the shard does. Called by one thread at a time."""

    def __init__(
        self, shard: ParameterShard, layout: Layout, settings: ParameterServerSettings, *, is_fixed: bool
    ) -> None:
        self._shard = shard
        self._is_fixed = is_fixed
        self._codecs = {
            index: make_codec(settings, state.piece.length, layout.dtype) for index, state in shard.pieces.items()
        }
        self._settings = settings
        self._trackers: dict[tuple[str, int], Tracker] = {}
        self._second: Connection | None = None  # does all that this server does, to take its place
        self._has_retired = False  # the second may have taken its place
        self.connect: Callable[[str], Connection]
        self.fence: Callable[[str, int], None] = lambda worker, incarnation: None
        self.report_lost: Callable[[str, str], None] = lambda address, message: None
        self.name = "server"
        self.step = 0  # of the job, that its parameters were of when it started

    def handle(self, call: Call) -> None:
        if self._has_retired:
            raise UnavailableError(f"{self.name} has handed over")
        kind = type(call.message).__name__.lower()
        reach(f"server.received.{kind}", UnavailableError)
        message, buffers = self._handle(call)
        reach(f"server.answering.{kind}", UnavailableError)
        call.reply(message, buffers)

    def retire(self) -> bool:
        """Answer nobody any more, if the second has everything; return whether it has. Called under the server's lock.

        Callers that come are to find out where the server is, and to try again.
        """
        if self._second is not None and not self._has_retired:
            self._pass_on(Settle(-1, -1))  # changes nothing: the second is there
        self._has_retired = self._second is not None
        return self._has_retired

    def resume(self) -> None:
        """Answer again, after all. Called under the server's lock."""
        self._has_retired = False

    def _handle(self, call: Call) -> tuple[Message, Sequence[torch.Tensor]]:
        """Do what a call asks for; return the answer."""
        shard = self._shard
        match call.message:
            case Push() as push:
                return self._push(call, push), ()
            case Pull(piece=index, has=has, settles=settles, scale=scale):
                state = shard.piece(index)
                if state.waits_for(settles) or self._settings.delay_compensation:
                    self._pass_on(Settle(index, settles, scale, call.caller))
                values = state.pull(call.caller, settles, scale)
                tracker = self._trackers.setdefault((call.caller, index), Tracker(self._codecs[index]))
                sent = tracker.compress(values, has)
                return Pulled(state.version, tracker.stamp), sent
            case PushExtras() as pushed:
                self._push_extras(call, pushed)
            case PullExtras(settles=settles):
                self._settle_extras(settles)
                extras = shard.extras()
                return Extras(tuple(extras), ()), list(extras.values())
            case Snapshot(piece=index, settles=settles, scale=scale):
                state = shard.piece(index)
                if state.waits_for(settles):
                    self._pass_on(Settle(index, settles, scale))
                state.settle(settles, scale)
                saved = piece_state(state)
                buffers = [state.values, *saved.tensors.values(), encode_plain(saved.values)]
                return Snapped(state.version, tuple(saved.tensors)), buffers
            case SnapshotExtras(settles=settles):
                self._settle_extras(settles)
                extras = shard.extras()
                return Extras(tuple(extras), tuple(shard.ages)), list(extras.values())
            case Settle(piece=index, settles=settles, scale=scale, seen_by=worker):
                if index < 0:
                    shard.settle_extras(settles)
                elif worker:
                    shard.piece(index).pull(worker, settles, scale)
                else:
                    shard.piece(index).settle(settles, scale)
            case Fence(worker=worker, incarnation=incarnation):
                self._pass_on(call.message)
                self.fence(worker, incarnation)
                shard.forget(worker)
                for key in [key for key in self._trackers if key[0] == worker]:
                    del self._trackers[key]
            case Adopt(address=address):
                self._adopt(address)
            case Load(piece=index, names=names):
                restore_piece(shard.piece(index), names, [buffer.torch() for buffer in call.buffers])
            case LoadExtras():
                *tensors, plain = [buffer.torch() for buffer in call.buffers]
                shard.restore_extras(tensors, decode_plain(plain))
            case other:
                return Refused("unexpected", type(other).__name__), ()
        return Pushed("applied"), ()

    def _push(self, call: Call, push: Push) -> Pushed:
        gradient = self._codecs[push.piece].decode([buffer.torch() for buffer in call.buffers])
        worker = push.worker or call.caller
        unit = UnitPush(
            worker,
            push.unit,
            push.step,
            push.share,
            push.num_shares,
            push.count,
            push.base,
            push.floor,
            frozenset(push.unused),
        )
        seconds = self._pass_on(msgspec.structs.replace(push, worker=worker), call.buffers)
        outcome = self._shard.push(push.piece, unit, gradient)
        answer = Pushed(outcome.kind, outcome.norms, outcome.detail)
        if seconds is not None and seconds != answer:
            self._lose_second(f"it answered {seconds} where this server answers {answer}")
        return answer

    def _push_extras(self, call: Call, pushed: PushExtras) -> None:
        worker = pushed.worker or call.caller
        self._pass_on(msgspec.structs.replace(pushed, worker=worker), call.buffers)
        buffers = {name: buffer.torch() for name, buffer in zip(pushed.names, call.buffers, strict=True)}
        if self._is_fixed:
            self._shard.agree_on_extras(pushed.step, pushed.share, pushed.num_shares, buffers)
        else:
            self._shard.keep_extras(worker, pushed.unit, buffers)

    def _settle_extras(self, settles: int) -> None:
        if self._shard.waits_for_extras(settles):
            self._pass_on(Settle(-1, settles))
            self._shard.settle_extras(settles)

    def _pass_on(self, message: Message, buffers: Sequence[Buffer] = ()) -> Message | None:
        """Have the second do the same, before anybody is told that it is done; return the answer of the second."""
        if self._second is None:
            return None
        try:
            reach("server.pass_on")
            answer: Message = self._second.call(message, [buffer.torch() for buffer in buffers])
            reach("server.passed_on")
        except CommunicationError as error:
            self._lose_second(str(error))
            return None
        return answer

    def _lose_second(self, why: str) -> None:
        """Continue alone. The dispatcher knows it before any caller is answered: that second may not take over.

        Raises UnavailableError where the dispatcher cannot be told, or has given this very server up.
        """
        assert self._second is not None
        self.report_lost(self._second.address, f"{self.name} has lost its second server ({why})")
        self._second.close()
        self._second = None

    def _adopt(self, address: str) -> None:
        """Give another server everything, and have it follow from here."""
        reach("server.adopt.connect", UnavailableError)
        connection = self.connect(address)
        try:
            for index, state in self._shard.pieces.items():
                names, buffers = dump_piece(state)
                reach("server.adopt.piece", UnavailableError)
                connection.call(Load(index, names), buffers)
            tensors, plain = self._shard.dump_extras()
            reach("server.adopt.extras", UnavailableError)
            connection.call(LoadExtras(), [*tensors, encode_plain(plain)])
            reach("server.adopt.done", UnavailableError)
        except BaseException:
            connection.close()
            raise
        if self._second is not None:
            self._second.close()
        self._second = connection


def main(argument: dict[str, Any]) -> int:
    """Serve until told to end; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, MemberSpec)
    identify(order.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_over, leave_asked = threading.Event(), threading.Event()
    signal.signal(END_SIGNAL, lambda number, frame: is_over.set())
    signal.signal(signal.SIGTERM, lambda number, frame: leave_asked.set())  # a spot instance, Slurm, Kubernetes
    run_dir = Path(order.run_dir)
    with setup_logging(run_dir / "logs" / f"{order.name}.log"), DispatchLink(order) as link:
        try:
            service = _make_service(order, run_dir)
            speaker = Speaker(run=order.run_id, name=order.name, incarnation=time.time_ns())
            keys = ServerKeys.from_text(order.server_keys)
            public = Listening(order.host_address, 0).address if order.host_address else ""
            with CallServer(
                "tcp://127.0.0.1:*", speaker, PARAMETERS, keys, service.handle, limits=LIMITS, public=public
            ) as server:
                service.name = order.name
                service.fence = server.fence
                service.connect = link.connect_to
                service.report_lost = lambda address, message: _report_lost(link, is_over, address, message)
                link.join(server.address, server.public, service.step)
                log.info("server %d listens at %s (process %d)", order.index, server.address, os.getpid())
                leaving = threading.Thread(
                    target=_leave_when_asked, args=(leave_asked, is_over, link, server, service), daemon=True
                )
                leaving.start()
                server.run(is_over.is_set)
        except Exception as error:
            log.exception("%s cannot go on", order.name)
            link.fail(error)
            return 1
    return 0


def _leave_when_asked(
    leave_asked: threading.Event,
    is_over: threading.Event,
    link: DispatchLink,
    server: CallServer,
    service: ParameterService,
) -> None:
    """When asked to leave, hand over to the second as soon as there is one, and end."""
    leave_asked.wait()
    log.info("told to leave")
    while not is_over.is_set():
        try:
            with server.lock:
                has_retired = service.retire()
            if isinstance(link.ask(HandOver(has_retired)), Leave):
                is_over.set()
            else:
                with server.lock:
                    service.resume()
        except RefusedError:  # this server was given up, and its second may serve by now
            is_over.set()
        except CommunicationError as error:  # it stays retired, if it is: the second may serve by now
            log.info("cannot leave yet: %s", error)
        is_over.wait(_LEAVING_S)


def _report_lost(link: DispatchLink, is_over: threading.Event, address: str, message: str) -> None:
    """Have the dispatcher write down that the second at `address` does not follow any more."""
    try:
        link.ask(SecondLost(address, message))
    except RefusedError as error:  # this server was given up, and its second may serve by now
        is_over.set()
        raise UnavailableError(f"{message}, and was given up itself: {error}") from error
    except CommunicationError as error:
        raise UnavailableError(f"{message}, and the dispatcher could not be told: {error}") from error


def _make_service(order: MemberSpec, run_dir: Path) -> ParameterService:
    job = Job.load(run_dir / "job.toml")
    parts = assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=order.num_local))
    if not job.training.reproducible:  # there it is what the job says: sums must be those of `single`
        torch.set_num_threads(1)
    settings = settings_of(job)
    layout = make_layout(parts.model, settings.servers, can_split=can_split(job))
    saved = checkpoint.load_newest(run_dir / "checkpoints") if order.resume else None
    if saved is not None:
        checkpoint.load_model_state(parts.model, saved.state.part("model").tensors)
    flat = flatten_parameters(parts.model, layout)

    def values(piece: Piece) -> torch.Tensor:
        return flat[piece.start : piece.stop].clone()

    fixed = fixed_of(job)
    shard = ParameterShard(layout.of_server(order.index), values, parts.recipe, settings, fixed)
    shard.agreed = {name: value.clone() for name, value in parts.model.named_buffers()}
    if saved is not None:
        for state in shard.pieces.values():
            load_piece(state, saved.state.part("optimizer"))
            state.version = saved.state.values["progress"]["step"]
    service = ParameterService(shard, layout, settings, is_fixed=fixed is not None)
    service.step = saved.state.values["progress"]["step"] if saved is not None else 0
    return service
