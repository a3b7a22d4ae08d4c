"""The main function of a server process: holds slices of the parameters and serves pushes and pulls."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from cordee import checkpoint
from cordee.checkpoint import Store
from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec, open_timeline
from cordee.communication.calls import CallServer
from cordee.communication.channel import RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.this_host import Listening
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import identify
from cordee.monitoring import setup_logging
from cordee.parameters.placement import Piece, make_layout
from cordee.runs.checkpoints import open_store
from cordee.runs.dispatched.link import END_SIGNAL, DispatchLink
from cordee.runs.dispatched.messages import HandOver, Leave
from cordee.strategies.parameter_server.messages import LIMITS, PARAMETERS, ApplyPending
from cordee.strategies.parameter_server.service import ParameterService
from cordee.strategies.parameter_server.shard import ParameterShard
from cordee.strategies.parameter_server.state import flatten_parameters, load_piece, split_residuals
from cordee.strategies.parameter_server.strategy import can_split, fixed_of, settings_of
from cordee.training.components import assemble

log = logging.getLogger("cordee.server")

_LEAVING_S = 0.1  # between two attempts to hand over


def main(argument: dict[str, Any]) -> int:
    """Serve until told to end; return the exit code. Called in a fresh fork of the fork server."""
    spec = msgspec.convert(argument, MemberSpec)
    identify(spec.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_over, leave_asked = threading.Event(), threading.Event()
    signal.signal(END_SIGNAL, lambda number, frame: is_over.set())
    signal.signal(signal.SIGTERM, lambda number, frame: leave_asked.set())  # a spot instance, Slurm, Kubernetes
    with setup_logging(spec.log_file), DispatchLink(spec) as link:
        try:
            with open_store(spec, link) as store:
                service = _make_service(spec, store)
            speaker = Speaker(run=spec.run_id, name=spec.name, incarnation=time.time_ns())
            keys = ServerKeys.from_text(spec.server_keys)
            public = Listening(spec.host_address, 0).address if spec.host_address else ""
            with CallServer(
                "tcp://127.0.0.1:*", speaker, PARAMETERS, keys, service.handle, limits=LIMITS, public=public
            ) as server:
                service.name = spec.name
                service.fence = server.fence
                service.connect = link.connect_to
                service.report_to(link.ask, lambda problem: is_over.set(), "the dispatcher")
                link.join(server.address, server.public, service.step)
                log.info("server %d listens at %s (process %d)", spec.index, server.address, os.getpid())
                leaving = threading.Thread(
                    target=_leave_when_asked, args=(leave_asked, is_over, link, server, service), daemon=True
                )
                leaving.start()
                with _recording(spec, link, service):
                    server.run(is_over.is_set)
        except Exception as error:
            log.exception("%s cannot continue", spec.name)
            link.fail(error)
            return 1
    return 0


@contextlib.contextmanager
def _recording(spec: MemberSpec, link: DispatchLink, service: ParameterService) -> Iterator[None]:
    """Inside, what this process uses and how old gradients are is recorded."""
    timeline = open_timeline(spec, link, service.take_ages)
    has_ended = threading.Event()

    def record() -> None:
        timeline.enter("training")
        while not has_ended.wait(1.0):
            timeline.note()
        timeline.close()

    thread = threading.Thread(target=record, name="timeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _leave_when_asked(
    leave_asked: threading.Event,
    is_over: threading.Event,
    link: DispatchLink,
    server: CallServer,
    service: ParameterService,
) -> None:
    """When asked to leave, hand over to the follower as soon as there is one, and end."""
    leave_asked.wait()
    log.info("told to leave")
    while not is_over.is_set():
        try:
            with server.lock:
                has_retired = service.retire(ApplyPending(-1, -1))
            if isinstance(link.ask(HandOver(has_retired)), Leave):
                is_over.set()
            else:
                with server.lock:
                    service.resume()
        except RefusedError:  # this server was given up, and its follower may serve by now
            is_over.set()
        except CommunicationError as error:  # it stays retired, if it is: the follower may serve by now
            log.info("cannot leave yet: %s", error)
        is_over.wait(_LEAVING_S)


def _make_service(spec: MemberSpec, store: Store) -> ParameterService:
    job = spec.load_job()
    parts = assemble(job, Team(num_workers=job.strategy.workers, num_local_workers=spec.num_local))
    if not job.training.reproducible:  # there it is what the job says: sums must be those of `single`
        torch.set_num_threads(1)
    settings = settings_of(job)
    layout = make_layout(parts.model, settings.servers, can_split=can_split(job))
    saved = store.load_newest() if spec.resume else None
    if saved is not None:
        checkpoint.load_model_state(parts.model, saved.state.part("model").tensors)
    flat = flatten_parameters(parts.model, layout)

    def values(piece: Piece) -> torch.Tensor:
        return flat[piece.start : piece.stop].clone()

    fixed = fixed_of(job)
    shard = ParameterShard(
        layout.of_server(spec.index), values, parts.recipe.for_parts_of(parts.model), settings, fixed
    )
    shard.agreed = {name: value.clone() for name, value in parts.model.named_buffers()}
    if saved is not None:
        for state in shard.pieces.values():
            load_piece(state, saved.state.part("optimizer"))
            state.version = saved.state.values["progress"]["step"]
            workers = job.strategy.workers
            weight = settings.gradient_weight(workers)
            left = split_residuals(saved.state.part("residual"), state.piece, workers, weight)
            for worker, own in left.items():
                shard.keep_residual(worker, state.version, state.piece.index, own)
    service = ParameterService(shard, layout, settings, is_fixed=fixed is not None)
    service.step = saved.state.values["progress"]["step"] if saved is not None else 0
    return service
