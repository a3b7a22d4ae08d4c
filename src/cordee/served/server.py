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
from cordee.assembly import assemble
from cordee.cluster import Team
from cordee.communication.buffers import Buffer
from cordee.communication.calls import Call, CallServer, Connection
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import Message
from cordee.communication.this_host import Listening
from cordee.core import Job
from cordee.core.errors import CommunicationError
from cordee.monitoring import setup_logging
from cordee.served.link import DispatchLink, ProcessOrder
from cordee.strategies.parameter_server.compression import Tracker, make_codec
from cordee.strategies.parameter_server.layout import Layout, Piece, make_layout
from cordee.strategies.parameter_server.messages import (
    LIMITS,
    PARAMETERS,
    Adopt,
    Extras,
    Fence,
    Load,
    Pull,
    Pulled,
    PullExtras,
    Push,
    Pushed,
    PushExtras,
    Snapped,
    Snapshot,
    SnapshotExtras,
)
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import ParameterShard, UnitPush
from cordee.strategies.parameter_server.state import (
    dump_piece,
    encode_plain,
    flatten_parameters,
    load_piece,
    piece_state,
    restore_piece,
)
from cordee.strategies.parameter_server.strategy import can_split, fixed_of, settings_of

log = logging.getLogger("cordee.server")


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
        self._reply_bytes = max(8 * state.piece.length * layout.dtype.itemsize for state in shard.pieces.values())
        self.connect: Callable[[str], Connection]
        self.fence: Callable[[str, int], None] = lambda worker, incarnation: None
        self.warn: Callable[[str], None] = lambda message: None
        self.name = "server"
        self.step = 0  # of the job, that its parameters were of when it started

    def handle(self, call: Call) -> None:
        match call.message:
            case Push() as push:
                self._push(call, push)
            case Pull(piece=index, has=has, settles=settles, scale=scale):
                state = self._shard.piece(index)
                if state.waits_for(settles) or self._settings.delay_compensation:
                    self._pass_on(call.message, (), call.caller)
                values = state.pull(call.caller, settles, scale)
                tracker = self._trackers.setdefault((call.caller, index), Tracker(self._codecs[index]))
                sent = tracker.compress(values, has)
                call.reply(Pulled(state.version, tracker.stamp), sent)
            case PushExtras(unit=unit, names=names, worker=worker):
                self._pass_on(call.message, call.buffers, call.caller)
                buffers = {name: buffer.torch() for name, buffer in zip(names, call.buffers, strict=True)}
                if self._is_fixed:
                    asked = call.message
                    self._shard.agree_on_extras(asked.step, asked.share, asked.num_shares, buffers)
                else:
                    self._shard.keep_extras(worker or call.caller, unit, buffers)
                call.reply(Pushed("applied"))
            case PullExtras(settles=settles):
                self._settle_extras(call, settles)
                call.reply(Extras(tuple(self._shard.agreed), ()), list(self._shard.agreed.values()))
            case Snapshot(piece=index, settles=settles, scale=scale):
                state = self._shard.piece(index)
                self._pass_on(call.message, (), call.caller)
                state.settle(settles, scale)
                saved = piece_state(state)
                buffers_out = [state.values, *saved.tensors.values(), encode_plain(saved.values)]
                call.reply(Snapped(state.version, tuple(saved.tensors)), buffers_out)
            case SnapshotExtras(settles=settles):
                self._settle_extras(call, settles)
                extras = self._shard.extras()
                call.reply(Extras(tuple(extras), tuple(self._shard.ages)), list(extras.values()))
            case Fence(worker=worker, incarnation=incarnation):
                self._pass_on(call.message, (), call.caller)
                self.fence(worker, incarnation)
                self._shard.forget(worker)
                for key in [key for key in self._trackers if key[0] == worker]:
                    del self._trackers[key]
                call.reply(Pushed("applied"))
            case Adopt(address=address):
                self._adopt(address)
                call.reply(Pushed("applied"))
            case Load(piece=index, names=names):
                restore_piece(self._shard.piece(index), names, [buffer.torch() for buffer in call.buffers])
                call.reply(Pushed("applied"))
            case other:
                call.refuse("unexpected", type(other).__name__)

    def _settle_extras(self, call: Call, settles: int) -> None:
        if self._shard.waits_for_extras(settles):
            self._pass_on(call.message, (), call.caller)
            self._shard.settle_extras(settles)

    def _push(self, call: Call, push: Push) -> None:
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
        self._pass_on(push, call.buffers, call.caller)
        outcome = self._shard.push(push.piece, unit, gradient)
        call.reply(Pushed(outcome.kind, outcome.norms, outcome.detail))

    def _pass_on(self, message: Message, buffers: Sequence[Buffer], worker: str) -> None:
        """Have the second do the same, before anybody is told that it is done."""
        if self._second is None:
            return
        if isinstance(message, (Push, PushExtras)):
            message = msgspec.structs.replace(message, worker=worker)
        try:
            self._second.call(message, [buffer.torch() for buffer in buffers], reply_bytes=self._reply_bytes)
        except CommunicationError as error:
            self.warn(f"{self.name} has lost its second server ({error}): going on alone until there is another")
            self._second.close()
            self._second = None

    def _adopt(self, address: str) -> None:
        """Give another server everything, and have it follow from here."""
        connection = self.connect(address)
        for index, state in self._shard.pieces.items():
            names, buffers = dump_piece(state)
            connection.call(Load(index, names), buffers)
        for number, (step, share, num_shares, pushed) in enumerate(self._shard.pushed_extras()):
            extras = PushExtras(0, tuple(pushed), "", step, share, num_shares)
            connection.call(extras, list(pushed.values()))
            if number == 0:  # what steps start from now
                connection.call(PullExtras(step), reply_bytes=self._reply_bytes + (1 << 20))
        for worker, (unit, buffers_of) in self._shard.kept_extras.items():
            connection.call(PushExtras(unit, tuple(buffers_of), worker), list(buffers_of.values()))
        self._second = connection


def main(argument: dict[str, Any]) -> int:
    """Serve until told to end; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, ProcessOrder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.set())
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
                service.warn = lambda message: link.emit("warning", {"message": message})
                link.join(server.address, server.public, service.step)
                log.info("server %d listens at %s (process %d)", order.index, server.address, os.getpid())
                server.run(is_over.is_set)
        except Exception as error:
            log.exception("%s cannot go on", order.name)
            link.fail(error)
            return 1
    return 0


def _make_service(order: ProcessOrder, run_dir: Path) -> ParameterService:
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
    if fixed is not None:
        shard.agreed = {name: value.clone() for name, value in parts.model.named_buffers()}
    if saved is not None:
        for state in shard.pieces.values():
            load_piece(state, saved.state.part("optimizer"))
            state.version = saved.state.values["progress"]["step"]
    service = ParameterService(shard, layout, settings, is_fixed=fixed is not None)
    service.step = saved.state.values["progress"]["step"] if saved is not None else 0
    return service
