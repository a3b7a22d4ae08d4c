"""The main function of a worker process: join the team, train, say how it went."""

from __future__ import annotations

import logging
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec
import torch.distributed as dist

from cordee.assembly import assemble
from cordee.cluster import Team
from cordee.cluster.link import CoordinatorLink
from cordee.communication.keys import ClientKeys
from cordee.communication.lost_peer import find_lost_peer
from cordee.communication.shared_memory import BackendSettings, register
from cordee.core import Job
from cordee.monitoring import Event, Monitor, setup_logging
from cordee.session import Session

log = logging.getLogger("cordee.worker")

# Collectives end by the loss of a peer long before; this is the limit for one that is only slow.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells a worker when it starts it. Travels through a private socket."""

    run_dir: str
    run_id: str
    worker_index: int
    num_workers: int
    address: str  # of the coordinator
    keys: str
    store: str  # file where the group finds itself
    resume: bool
    failure_timeout_s: float
    join_timeout_s: float


class LinkSink:
    """Passes events of this worker on to the one monitor of the run. The first worker speaks for the team."""

    def __init__(self, link: CoordinatorLink, worker_index: int) -> None:
        self._link = link
        self._worker_index = worker_index

    def emit(self, event: Event) -> None:
        if self._worker_index == 0:
            self._link.emit(event.type, event.fields)
        elif event.type == "warning" and "checkpoint" not in event.fields["message"]:
            self._link.emit("warning", {**event.fields, "worker": self._worker_index})

    def refresh(self, step: int, loss: SupportsFloat | None) -> None:
        self._link.step = step
        if self._worker_index == 0:
            self._link.emit("progress", {"step": step, "loss": None if loss is None else float(loss)})

    def close(self) -> None:
        pass


def main(argument: dict[str, Any]) -> int:
    """Work until the run ends; return the exit code. Called in a fresh fork of the fork server."""
    order = msgspec.convert(argument, WorkerOrder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher asks, when it is time
    keys = ClientKeys.from_text(order.keys)
    run_dir = Path(order.run_dir)
    log_file = run_dir / "logs" / f"worker-{order.worker_index}.log"
    with (
        setup_logging(log_file),
        CoordinatorLink(order.address, order.run_id, order.worker_index, keys) as link,
    ):
        session: Session | None = None
        try:
            link.join(order.join_timeout_s)
            team = _form_group(order)
            parts = assemble(Job.load(run_dir / "job.toml"), team)
            parts.setup()
            with Monitor([LinkSink(link, order.worker_index)]) as monitor:
                session = Session(parts, monitor, run_dir, should_stop=lambda: link.is_stop_asked)
                session.run(resume=order.resume, log_file=log_file)
                summary = msgspec.to_builtins(session.summarise(None))
            link.emit("outcome", {"worker": order.worker_index, "summary": summary})
            link.leave()
            dist.destroy_process_group()
        except Exception as error:
            log.exception("worker %d cannot go on", order.worker_index)
            link.step = session.step if session else 0
            link.fail(find_lost_peer(error) or error, link.step)
            return 1
    return 0


def _form_group(order: WorkerOrder) -> Team:
    register()
    dist.init_process_group(
        "cordee",
        store=dist.FileStore(order.store, order.num_workers),  # type: ignore[attr-defined]
        rank=order.worker_index,
        world_size=order.num_workers,
        timeout=COLLECTIVE_TIMEOUT,
        pg_options=BackendSettings(failure_timeout_s=order.failure_timeout_s),
    )
    return Team(
        worker_index=order.worker_index,
        num_workers=order.num_workers,
        num_local_workers=order.num_workers,
        local_rank=order.worker_index,
        generation=1,
    )
