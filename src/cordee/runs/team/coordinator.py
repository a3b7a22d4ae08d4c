"""Leads the run of a team: what each event, request and loss leads to. Turns: `cluster/coordinator.py`."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cordee.cluster.autoscaling import Scaling
from cordee.cluster.coordinator import Addresses, CoordinatorSpec, MemberStarter
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.messages import TEAM, FirstStep, StepReached, StepTime, TeamReport, WorkerSummary
from cordee.cluster.policies import Restarts, Stragglers
from cordee.communication.channel import ServerChannel
from cordee.communication.messages import JoinRequest, Scale
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import TrainingError
from cordee.monitoring import AnyEvent, Summary, events
from cordee.monitoring.timeline import TimelineFolder
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.team.generations import Generations
from cordee.runs.team.losses import Losses
from cordee.runs.team.member_channel import TeamChannel
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.state import RecoveryState, TeamState, WorkersState
from cordee.runs.team.workers import Workers
from cordee.strategies.choice import entry_of
from cordee.training.components import bare_strategy


class TeamLeader:
    """The `Leader` of one team."""

    codec = Codec(TEAM)
    package = "cordee.runs.team"  # which has the main function of the workers
    prints = False  # whether what workers print goes to the launcher's terminal
    _channel: TeamChannel
    _workers: Workers
    _losses: Losses
    _generations: Generations

    def __init__(self, spec: CoordinatorSpec, launcher: LauncherLink) -> None:
        self._spec = spec
        self._launcher = launcher
        job = self._job = Job.load(spec.job_file)
        restored = launcher.restored
        self._state = self._begin() if restored is None else msgspec.msgpack.decode(restored, type=TeamState)
        self._membership = self._state.membership
        self._recoveries = Recoveries(self._state.recoveries)
        self._checkpoints = CheckpointReceiver(Path(spec.run_dir) / "checkpoints", self._membership)
        self._stragglers = Stragglers()  # not remembered: it is soon known again
        self._scaling = Scaling(job, spec.num_slots, self._scale) if job.cluster.autoscale else None

    def _begin(self) -> TeamState:
        job = self._job
        return TeamState(
            membership=Membership(
                num_workers=job.strategy.workers,
                failure_timeout_s=job.cluster.failure_timeout_s,
                min_workers=job.cluster.min_workers,
                is_elastic=self._is_elastic,
            ),
            addresses=Addresses.of(job, self._spec),
            workers=WorkersState(data=self._spec.facts.get("data", "")),
            recoveries=RecoveryState(restarts=Restarts(job.cluster.max_restarts)),
        )

    @property
    def addresses(self) -> Addresses:
        return self._state.addresses

    @property
    def step(self) -> int:
        return self._membership.step

    def find_ended(self) -> Summary | None:
        return None  # workers find out

    def open(self, channel: ServerChannel) -> None:
        state, launcher = self._state, self._launcher
        members = self._channel = TeamChannel(
            channel, self._membership, self._take_event, self._handle_request, self._take_report, self._checkpoints
        )
        members.keep_timeline = TimelineFolder(Path(self._spec.run_dir)).write
        starter = MemberStarter(
            self._spec, self._job, launcher, self._membership, state.addresses, channel.fence, self.package
        )
        starter.prints = self.prints
        workers = self._workers = Workers(self._job, launcher, members, starter, state.workers, self._check_size)
        losses = self._losses = Losses(
            self._job.cluster, launcher, self._membership, workers, self._recoveries, state.losses
        )
        self._generations = Generations(launcher, members, workers, losses, self._recoveries, state.directives)

    def begin(self) -> None:
        for index in range(self._job.strategy.workers):
            self._workers.start(index)

    def resend_directives(self) -> None:
        self._checkpoints.remove_unfinished()
        self._generations.resend_directives()

    @property
    def is_over(self) -> bool:
        return self._membership.is_over

    def receive(self, timeout_s: float) -> None:
        self._channel.serve(timeout_s)

    def decide(self) -> None:
        self._losses.check_members()
        self._membership.check_storage(self._job.checkpoint.storage)
        if self._generations.direct():
            self._stragglers.forget()
            if self._scaling is not None:
                self._scaling.begin(self._membership.step, time.monotonic())
        if self._scaling is not None:
            membership = self._membership
            is_complete = len(membership.members) == membership.num_workers == len(membership.active)
            size = membership.num_workers if is_complete else 0
            self._scaling.update(membership.step, size, self._workers.threads, time.monotonic())

    def shut_down(self) -> bool:
        self._checkpoints.close()
        return False  # all have said goodbye

    @property
    def has_pending(self) -> bool:
        return self._channel.has_pending

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def flush(self) -> None:
        self._channel.flush()

    def _scale(self, num_workers: int, threads: int = 0, reason: str = "") -> str:
        return self._workers.scale(num_workers, threads, reason)

    def _handle_request(self, request: Scale | JoinRequest) -> str:
        if isinstance(request, JoinRequest):
            return self._workers.admit(request, self.addresses.public)
        return self._scale(request.num_workers, request.threads)

    @property
    def _is_elastic(self) -> bool:
        return entry_of(self._job).is_elastic

    def _check_size(self, num_workers: int) -> None:
        wanted = msgspec.structs.replace(self._job.strategy, workers=num_workers)
        bare_strategy(self._job).requirements(
            msgspec.structs.replace(self._job, strategy=wanted)
        )  # raises what it cannot do

    def _take_event(self, event: AnyEvent) -> None:
        """Have an event of a worker recorded, unless it is of the past or another has told the same."""
        match event:
            case events.Step(step=step):
                self._record_step(step)
            case events.Checkpoint(stall_s=stall_s) | events.Warned(stall_s=float(stall_s)):
                self._state.stall_s += stall_s
            case events.Commit(generation=int(generation)) if generation < self._membership.generation:
                return  # of one that was given up, is back, and had not noticed: its generation is over
            case events.RunStarted():
                if self._state.is_announced:
                    return
                self._state.is_announced = True
        self._launcher.emit(event)

    def _take_report(self, worker: int, report: TeamReport) -> None:
        match report:
            case StepReached(step=step, loss=loss):
                self._record_step(step)
                self._launcher.progress(step=step, loss=loss)
            case StepTime(step=step, seconds=seconds):
                self._record_step_time(worker, step, seconds)
            case FirstStep(step=step):
                self._complete_recovery(step)
            case WorkerSummary(summary=summary):
                self._state.summaries[worker] = summary

    def _record_step(self, step: int) -> None:
        self._membership.reported_step = max(self._membership.reported_step, step)

    def _record_step_time(self, worker: int, step: int, seconds: float) -> None:
        if self._scaling is not None:
            self._scaling.record(worker, seconds)
        if (slow := self._stragglers.record(f"worker {worker}", step, seconds)) is not None:
            self._launcher.emit(
                events.Straggler(worker=worker, step=step, seconds=slow.seconds, median_seconds=slow.median_s)
            )
            self._launcher.emit(events.Warned(message=slow.describe()))

    def _complete_recovery(self, step: int) -> None:
        recovered = self._recoveries.complete(step, self._membership.members, time.monotonic())
        if recovered is not None:
            self._launcher.emit(
                events.Recovery(
                    generation=self._membership.generation,
                    lost=recovered.lost,
                    seconds=recovered.seconds,
                    step=step,
                    steps_redone=recovered.steps_redone,
                )
            )

    def summarise(self) -> Summary:
        """Return the summary of the one that spoke for the last team, if all ended with the same weights."""
        summaries, recoveries = self._state.summaries, self._state.recoveries
        hashes = {summary.weights_sha256 for summary in summaries.values()}
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights: {sorted(map(str, hashes))}")
        summary = next(iter(summaries.values()))
        # A scheduler asks all processes to end at once: the workers leave, and the launcher wants the same.
        if self._losses.end_reason is not None and not self._launcher.should_stop():
            raise TrainingError(f"{self._losses.end_reason}. Step {summary.steps} is saved: --resume continues from it")
        peaks = [summary.peak_memory_bytes or 0 for summary in summaries.values()]
        return msgspec.structs.replace(
            summary,
            peak_memory_bytes=max(peaks) or None,
            bytes_sent=sum(summary.bytes_sent or 0 for summary in summaries.values()),
            recoveries=recoveries.num_complete,
            steps_redone=recoveries.steps_redone,
            checkpoint_stall_seconds=self._state.stall_s,
        )
