"""What `parameter_server` adds to a server of parameters: answers to the calls of a run's workers and evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from torch import Tensor

from cordee.checkpoint import State
from cordee.communication.calls import Call, UnavailableError
from cordee.communication.compression import DeltaSender, make_codec
from cordee.communication.messages import Message
from cordee.core.fault_points import reach
from cordee.parameters.messages import Done, Load
from cordee.parameters.placement import Layout
from cordee.parameters.replication import Answer, ReplicatedService, decode_state, encode_state
from cordee.strategies.parameter_server.messages import (
    ApplyPending,
    Extras,
    Fence,
    KeepResidual,
    LoadExtras,
    Pull,
    Pulled,
    PullExtras,
    PullResiduals,
    Push,
    PushExtras,
    Residuals,
    Snapped,
    Snapshot,
    SnapshotExtras,
)
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import ParameterShard


class ParameterService(ReplicatedService):
    """Called by one thread at a time."""

    def __init__(
        self, shard: ParameterShard, layout: Layout, settings: ParameterServerSettings, *, is_fixed: bool
    ) -> None:
        super().__init__()
        self._shard = shard
        self.take_ages = shard.take_ages
        self._is_fixed = is_fixed
        self._codecs = {
            index: make_codec(settings.compression, settings.topk, state.piece.length, layout.dtype)
            for index, state in shard.pieces.items()
        }
        self._settings = settings
        self._senders: dict[tuple[str, int], DeltaSender] = {}
        self.fence: Callable[[str, int], None] = lambda worker, incarnation: None
        self.step = 0  # of the job, that its parameters were of when it started
        self.handlers |= {
            Push: self._push,
            Pull: self._pull,
            PushExtras: self._push_extras,
            PullExtras: self._extras,
            Snapshot: self._snapshot,
            SnapshotExtras: self._extras,
            ApplyPending: self._apply_pending,
            Fence: self._fence,
            KeepResidual: self._keep_residual,
            PullResiduals: self._residuals,
            LoadExtras: self._load_extras,
        }

    def dump(self) -> Iterator[tuple[Message, Sequence[Tensor]]]:
        for index, state in self._shard.pieces.items():
            names, buffers = encode_state(state.dump())
            reach("server.adopt.piece", UnavailableError)
            yield Load(index, names), buffers
        names, buffers = encode_state(self._shard.dump_extras())
        reach("server.adopt.extras", UnavailableError)
        yield LoadExtras(names), buffers

    def load_part(self, number: int, state: State) -> None:
        self._shard.piece(number).restore(state)

    def _push(self, call: Call, push: Push) -> Answer:
        gradient = self._codecs[push.piece].decode([buffer.torch() for buffer in call.buffers])
        push = msgspec.structs.replace(push, worker=push.worker or call.caller)
        return self.mirrored(push, call.buffers, lambda: self._shard.push(push, gradient)), ()

    def _pull(self, call: Call, pull: Pull) -> Answer:
        state = self._shard.piece(pull.piece)
        if state.waits_for(pull.apply_step) or self._settings.delay_compensation:
            self.pass_on(ApplyPending(pull.piece, pull.apply_step, pull.scale, call.caller))
        values = state.pull(call.caller, pull.apply_step, pull.scale)
        where = state.locate(pull.memory, 0, state.length)
        if where.stamp >= 0:
            return Pulled(where.version, where.stamp), ()
        sender = self._senders.setdefault((call.caller, pull.piece), DeltaSender(self._codecs[pull.piece]))
        sent = sender.compress(values, pull.has)
        return Pulled(where.version, memory=where.memory, sent=sender.stamp), sent

    def _snapshot(self, call: Call, snapshot: Snapshot) -> Answer:
        state = self._shard.piece(snapshot.piece)
        if state.waits_for(snapshot.apply_step):
            self.pass_on(ApplyPending(snapshot.piece, snapshot.apply_step, snapshot.scale))
        state.apply_pending(snapshot.apply_step, snapshot.scale)
        names, buffers = encode_state(state.optimizer.dump())
        return Snapped(state.version, names), [state.values, *buffers]

    def _apply_pending(self, call: Call, pending: ApplyPending) -> Answer:
        if pending.piece < 0:
            self._shard.apply_pending_extras(pending.apply_step)
        elif pending.seen_by:
            self._shard.piece(pending.piece).pull(pending.seen_by, pending.apply_step, pending.scale)
        else:
            self._shard.piece(pending.piece).apply_pending(pending.apply_step, pending.scale)
        return Done(), ()

    def _fence(self, call: Call, fence: Fence) -> Answer:
        self.pass_on(fence)
        self.fence(fence.worker, fence.incarnation)
        self._shard.forget(fence.worker)
        for key in [key for key in self._senders if key[0] == fence.worker]:
            del self._senders[key]
        return Done(), ()

    def _push_extras(self, call: Call, pushed: PushExtras) -> Answer:
        worker = pushed.worker or call.caller
        self.pass_on(msgspec.structs.replace(pushed, worker=worker), call.buffers)
        buffers = {name: buffer.torch() for name, buffer in zip(pushed.names, call.buffers, strict=True)}
        if self._is_fixed:
            self._shard.agree_on_extras(pushed.step, pushed.share, pushed.num_shares, buffers)
        else:
            self._shard.keep_extras(worker, pushed.unit, buffers)
        return Done(), ()

    def _keep_residual(self, call: Call, kept: KeepResidual) -> Answer:
        worker = kept.worker or call.caller
        self.pass_on(msgspec.structs.replace(kept, worker=worker), call.buffers)
        self._shard.keep_residual(worker, kept.step, kept.piece, call.buffers[0].torch())
        # A worker of the resumed run has nothing that differences could be from, and this one is to have the same.
        self._senders.pop((worker, kept.piece), None)
        return Done(), ()

    def _residuals(self, call: Call, asked: PullResiduals) -> Answer:
        found = self._shard.residuals_of(asked.piece, asked.step, asked.worker)
        return Residuals(tuple(found)), list(found.values())

    def _extras(self, call: Call, asked: PullExtras | SnapshotExtras) -> Answer:
        if self._shard.waits_for_extras(asked.apply_step):
            self.pass_on(ApplyPending(-1, asked.apply_step))
            self._shard.apply_pending_extras(asked.apply_step)
        extras = self._shard.extras()
        return Extras(tuple(extras), tuple(self._shard.ages)), list(extras.values())

    def _load_extras(self, call: Call, load: LoadExtras) -> Answer:
        self._shard.restore_extras(decode_state(load.names, [buffer.torch() for buffer in call.buffers]))
        return Done(), ()
