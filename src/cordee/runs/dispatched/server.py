"""The main function of a server process: holds slices of the parameters and serves pushes and pulls."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.communication.calls import Call, CallServer, UnavailableError
from cordee.communication.channel import RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.this_host import Listening
from cordee.core import Job
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import identify, reach
from cordee.monitoring import setup_logging
from cordee.parameters.compression import Tracker, make_codec
from cordee.parameters.messages import Adopt, Load, Memory
from cordee.parameters.placement import Layout, Piece, make_layout
from cordee.parameters.replication import Answer, ReplicatedService, decode_plain, encode_plain
from cordee.runs.dispatched.link import END_SIGNAL, DispatchLink
from cordee.runs.dispatched.messages import HandOver, Leave, SecondLost
from cordee.strategies.parameter_server.messages import (
    LIMITS,
    PARAMETERS,
    Extras,
    Fence,
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
    dump_piece,
    flatten_parameters,
    load_piece,
    piece_state,
    restore_piece,
)
from cordee.strategies.parameter_server.strategy import can_split, fixed_of, settings_of
from cordee.training.components import assemble

log = logging.getLogger("cordee.server")

_LEAVING_S = 0.1  # between two attempts to hand over


class ParameterService(ReplicatedService):
    """Answers calls with what the shard does. Called by one thread at a time."""

    def __init__(
        self, shard: ParameterShard, layout: Layout, settings: ParameterServerSettings, *, is_fixed: bool
    ) -> None:
        super().__init__()
        self._shard = shard
        self._is_fixed = is_fixed
        self._codecs = {
            index: make_codec(settings.compression, settings.topk, state.piece.length, layout.dtype)
            for index, state in shard.pieces.items()
        }
        self._settings = settings
        self._trackers: dict[tuple[str, int], Tracker] = {}
        self.fence: Callable[[str, int], None] = lambda worker, incarnation: None
        self.step = 0  # of the job, that its parameters were of when it started

    def carry_out(self, call: Call) -> Answer:
        shard = self._shard
        match call.message:
            case Push() as push:
                return self._push(call, push), ()
            case Pull(piece=index, has=has, settles=settles, scale=scale, memory=memory):
                state = shard.piece(index)
                if state.waits_for(settles) or self._settings.delay_compensation:
                    self.pass_on(Settle(index, settles, scale, call.caller))
                values = state.pull(call.caller, settles, scale)
                own = state.memory
                if own is not None and memory == own.number:
                    return Pulled(state.version, read_at=own.stamp(0, values.nbytes)), ()
                tracker = self._trackers.setdefault((call.caller, index), Tracker(self._codecs[index]))
                sent = tracker.compress(values, has)
                place = None if own is None or memory < 0 else Memory(os.getpid(), *own.address, own.number)
                return Pulled(state.version, tracker.stamp, memory=place), sent
            case PushExtras() as pushed:
                self._push_extras(call, pushed)
            case PullExtras(settles=settles):
                self._settle_extras(settles)
                extras = shard.extras()
                return Extras(tuple(extras), ()), list(extras.values())
            case Snapshot(piece=index, settles=settles, scale=scale):
                state = shard.piece(index)
                if state.waits_for(settles):
                    self.pass_on(Settle(index, settles, scale))
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
                self.pass_on(call.message)
                self.fence(worker, incarnation)
                shard.forget(worker)
                for key in [key for key in self._trackers if key[0] == worker]:
                    del self._trackers[key]
            case Adopt(address=address):
                self.adopt(address)
            case Load(number=index, names=names):
                restore_piece(shard.piece(index), names, [buffer.torch() for buffer in call.buffers])
            case LoadExtras():
                *tensors, plain = [buffer.torch() for buffer in call.buffers]
                shard.restore_extras(tensors, decode_plain(plain))
            case other:
                return Refused("unexpected", type(other).__name__), ()
        return Pushed("applied"), ()

    def _push(self, call: Call, push: Push) -> Message:
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

        def act() -> Pushed:
            outcome = self._shard.push(push.piece, unit, gradient)
            return Pushed(outcome.kind, outcome.norms, outcome.detail)

        return self.mirrored(msgspec.structs.replace(push, worker=worker), call.buffers, act)

    def _push_extras(self, call: Call, pushed: PushExtras) -> None:
        worker = pushed.worker or call.caller
        self.pass_on(msgspec.structs.replace(pushed, worker=worker), call.buffers)
        buffers = {name: buffer.torch() for name, buffer in zip(pushed.names, call.buffers, strict=True)}
        if self._is_fixed:
            self._shard.agree_on_extras(pushed.step, pushed.share, pushed.num_shares, buffers)
        else:
            self._shard.keep_extras(worker, pushed.unit, buffers)

    def _settle_extras(self, settles: int) -> None:
        if self._shard.waits_for_extras(settles):
            self.pass_on(Settle(-1, settles))
            self._shard.settle_extras(settles)

    def dump(self) -> Iterator[tuple[Message, Sequence[torch.Tensor]]]:
        for index, state in self._shard.pieces.items():
            names, buffers = dump_piece(state)
            reach("server.adopt.piece", UnavailableError)
            yield Load(index, names), buffers
        tensors, plain = self._shard.dump_extras()
        reach("server.adopt.extras", UnavailableError)
        yield LoadExtras(), [*tensors, encode_plain(plain)]


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
                has_retired = service.retire(Settle(-1, -1))
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
