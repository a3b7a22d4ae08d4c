"""The coordinator of a team's run: leads it from its start, or from where another coordinator was, to its end.

A process of its own. Each turn it hears what has come in, decides, writes down what it knows and what it is about to
do, and does it; killed at any moment, another goes on from there (`cluster/journal.py`).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from cordee.cluster.control import Control, write_control
from cordee.cluster.coordinator import Coordinator
from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S, TICK_S, LauncherLink, lead_run, open_channel
from cordee.cluster.members import Membership
from cordee.cluster.restarts import Restarts
from cordee.cluster.scaling import Scaling
from cordee.cluster.stragglers import Stragglers
from cordee.communication.channel import ServerChannel
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import COORDINATION, JoinRequest
from cordee.communication.this_host import find_listening
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import TrainingError
from cordee.core.fault_points import identify, reach
from cordee.monitoring import Summary
from cordee.runs.team.generations import Generations
from cordee.runs.team.losses import Losses
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.spec import TeamSpec
from cordee.runs.team.state import RecoveryState, TeamState, WorkersState
from cordee.runs.team.workers import Workers
from cordee.training.components import bare_strategy

log = logging.getLogger("cordee.coordinator")


def main(argument: dict[str, Any]) -> int:
    """Lead the run to its end; return the exit code. Called in a fresh fork of the fork server."""
    identify("coordinator")
    order = msgspec.convert(argument, TeamSpec)
    return lead_run(order, lambda launcher: TeamCoordinator(order, launcher).lead())


class TeamCoordinator:
    """One run with local workers. `lead` takes it from where it is to its end."""

    _coordinator: Coordinator
    _workers: Workers
    _losses: Losses
    _generations: Generations

    def __init__(self, order: TeamSpec, launcher: LauncherLink) -> None:
        self._order = order
        self._launcher = launcher
        self._run_dir = Path(order.run_dir)
        job = self._job = Job.load(self._run_dir / "job.toml")
        self._strategy = bare_strategy(job)
        self._is_new = launcher.restored is None
        self._memory = self._begin() if launcher.restored is None else self._restore(launcher.restored)
        self._membership = self._memory.membership
        self._recoveries = Recoveries(self._memory.recoveries)
        self._stragglers = Stragglers()  # not remembered: it is soon known again
        self._scaling = Scaling(job, order.num_slots, self._scale) if job.cluster.autoscale else None

    def _begin(self) -> TeamState:
        job = self._job
        public = find_listening(job.cluster.address).address if job.cluster.address else ""
        return TeamState(
            membership=Membership(
                num_workers=job.strategy.workers,
                failure_timeout_s=job.cluster.failure_timeout_s,
                startup_timeout_s=STARTUP_TIMEOUT_S,
                started_s=time.monotonic(),
                min_workers=job.cluster.min_workers,
                is_elastic=self._strategy.requirements(job).is_elastic,
            ),
            workers=WorkersState(address="tcp://127.0.0.1:*", public=public),
            recoveries=RecoveryState(restarts=Restarts(job.cluster.max_restarts)),
        )

    def _restore(self, state: bytes) -> TeamState:
        memory = msgspec.msgpack.decode(state, type=TeamState)
        for record in memory.membership.records.values():
            record.heard_s = time.monotonic()  # nobody could be heard meanwhile
        return memory

    def lead(self) -> Summary:
        """Return the summary of the worker that spoke for the last team.

        Raises TrainingError that names the worker that failed first, its step and its error.
        """
        workers, order = self._memory.workers, self._order
        keys = ServerKeys.from_text(order.server_keys)
        with open_channel(workers.address, order.run_id, Codec(COORDINATION), keys, workers.public) as channel:
            workers.address, workers.public = channel.address, channel.public
            self._employ(channel)
            if self._is_new:
                for index in range(self._job.strategy.workers):
                    self._workers.start(index)
            else:
                log.warning("taking up at step %d, generation %d", self._membership.step, self._membership.generation)
                reach("coordinator.back")
                self._generations.tell_again()
            self._commit()
            reach("coordinator.listening")
            control = Control.of(channel.address, order.run_id, order.control_keys, channel.public)
            if problem := write_control(self._run_dir, control):
                self._launcher.emit("warning", message=problem)
            reach("coordinator.control_written")
            while not self._membership.is_over:
                self._take_turn()
                self._commit()
            reach("coordinator.over")
        return self._settle()

    def _employ(self, channel: ServerChannel) -> None:
        """Make what the turns are taken with."""
        memory, launcher = self._memory, self._launcher
        coordinator = self._coordinator = Coordinator(
            channel, self._membership, self._take_event, self._scale, self._enlist, memory.registry
        )
        workers = self._workers = Workers(
            self._order, self._job, launcher, coordinator, memory.workers, self._check_size
        )
        losses = self._losses = Losses(
            self._job.cluster, launcher, self._membership, workers, self._recoveries, memory.losses
        )
        self._generations = Generations(launcher, coordinator, workers, losses, self._recoveries, memory.told)

    def _take_turn(self) -> None:
        self._coordinator.serve(TICK_S)
        reach("coordinator.heard")
        self._losses.look_after()
        if self._generations.direct():
            self._stragglers.forget()
            if self._scaling is not None:
                self._scaling.begin(self._membership.step, time.monotonic())
        if self._scaling is not None:
            self._scaling.look(self._membership, self._workers.threads, time.monotonic())

    def _commit(self) -> None:
        """Write down what is known and what follows, then do it."""
        if self._launcher.has_pending or self._coordinator.has_pending:
            reach("coordinator.decided")
            self._launcher.commit(msgspec.msgpack.encode(self._memory))
            reach("coordinator.committed")
            self._coordinator.flush()

    def _scale(self, num_workers: int, threads: int = 0, reason: str = "") -> str:
        return self._workers.scale(num_workers, threads, reason)

    def _enlist(self, wish: JoinRequest) -> str:
        return self._workers.enlist(wish)

    def _check_size(self, num_workers: int) -> None:
        wanted = msgspec.structs.replace(self._job.strategy, workers=num_workers)
        self._strategy.requirements(msgspec.structs.replace(self._job, strategy=wanted))  # raises what it cannot do

    def _take_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("progress", "step"):
            self._membership.told_step = max(self._membership.told_step, fields["step"])
        self._memory.stall_s += fields.get("stall_s", 0.0)
        if kind == "progress":
            self._launcher.progress(step=fields["step"], loss=fields["loss"])
        elif kind == "outcome":
            self._memory.summaries[fields["worker"]] = msgspec.convert(fields["summary"], Summary)
        elif kind == "pace":
            self._note_pace(fields["worker"], fields["step"], fields["seconds"])
        elif kind == "commit" and fields["generation"] < self._membership.generation:
            pass  # of one that was given up, is back, and had not noticed: its generation is over
        elif kind == "run_started":
            if not self._memory.is_announced:
                self._memory.is_announced = True
                self._launcher.emit(kind, **fields)
        elif kind == "data":
            self._workers.note_data(fields["fingerprint"])
        elif kind == "first_step":
            self._complete_recovery(fields["step"])
        else:
            self._launcher.emit(kind, **fields)

    def _note_pace(self, worker: int, step: int, seconds: float) -> None:
        if self._scaling is not None:
            self._scaling.hear(worker, seconds)
        if (slow := self._stragglers.hear(f"worker {worker}", step, seconds)) is not None:
            self._launcher.emit(
                "straggler", worker=worker, step=step, seconds=slow.seconds, median_seconds=slow.median_s
            )
            self._launcher.emit("warning", message=slow.describe())

    def _complete_recovery(self, step: int) -> None:
        recovered = self._recoveries.complete(step, self._membership.members, time.monotonic())
        if recovered is not None:
            self._launcher.emit(
                "recovery",
                generation=self._membership.generation,
                lost=recovered.lost,
                seconds=recovered.seconds,
                step=step,
                steps_redone=recovered.steps_redone,
            )

    def _settle(self) -> Summary:
        """Return the summary, having checked that all workers ended with the same weights."""
        summaries, recoveries = self._memory.summaries, self._memory.recoveries
        hashes = {summary.weights_sha256 for summary in summaries.values()}
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights: {sorted(map(str, hashes))}")
        summary = next(iter(summaries.values()))
        if self._losses.verdict is not None:
            raise TrainingError(f"{self._losses.verdict}. Step {summary.steps} is saved: --resume goes on from it")
        peaks = [summary.peak_memory_bytes or 0 for summary in summaries.values()]
        return msgspec.structs.replace(
            summary,
            peak_memory_bytes=max(peaks) or None,
            recoveries=recoveries.num_complete,
            steps_redone=recoveries.steps_redone,
            checkpoint_stall_seconds=self._memory.stall_s,
        )
