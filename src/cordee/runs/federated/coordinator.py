"""Leads a federated run: which workers are started, watched and shut down. Turns: `cluster/coordinator.py`."""

from __future__ import annotations

import time

import msgspec

from cordee import checkpoint
from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import Members
from cordee.communication.channel import ServerChannel
from cordee.communication.messages import JoinRequest, Scale
from cordee.communication.wire import Codec
from cordee.core.errors import CheckpointError, JobError, StorageError, TrainingError
from cordee.core.stopping import StopPolicy
from cordee.monitoring import Summary
from cordee.monitoring.timeline import TimelineFolder
from cordee.runs.dispatched.on_demand_leader import OnDemandLeader
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.federated.board import Board, BoardState
from cordee.runs.federated.dispatcher import RoundDispatcher
from cordee.runs.federated.facts import FederatedFacts
from cordee.runs.federated.losses import WorkerLosses
from cordee.runs.federated.messages import FEDERATED, LIMITS
from cordee.runs.federated.round_files import RoundFileServer
from cordee.runs.federated.state import FederatedState
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.strategy import settings_of
from cordee.training import progress as training
from cordee.training.progress import Progress


class FederatedLeader(OnDemandLeader):
    """The `Leader` of one run of rounds. It holds no vectors: workers keep them in files of the run directory."""

    codec = Codec(FEDERATED, LIMITS)
    _state: FederatedState
    _dispatcher: RoundDispatcher

    def __init__(self, spec: CoordinatorSpec, launcher: LauncherLink) -> None:
        super().__init__(spec, launcher)
        job = self._job
        self._facts = msgspec.convert(spec.facts, FederatedFacts)
        self._settings = settings_of(job)
        if launcher.restored is not None:
            self._state = msgspec.msgpack.decode(launcher.restored, type=FederatedState)
        else:
            progress = self._load_progress(spec.resume)
            self._state = FederatedState(
                addresses=Addresses.of(job, spec),
                started=time.time(),
                base_s=progress.elapsed_s,
                samples_before=progress.samples,
                samples_at_round=progress.samples,
                num_rounds=self._settings.rounds,
                members=Members(failure_timeout_s=job.cluster.failure_timeout_s),
                progress=progress,
                board=BoardState(round=progress.step),
            )

    @property
    def step(self) -> int:
        return self._state.progress.step

    @property
    def begun_s(self) -> float | None:
        return self._state.begun_s

    def find_ended(self) -> Summary | None:
        progress, limit = self._state.progress, self._job.stop.steps
        last = min(self._settings.rounds, limit or self._settings.rounds)
        reason = None
        if progress.metrics is not None and progress.evaluated_at == progress.step:
            reason = self._make_stop_policy().stop_reason(progress.metrics.get)
        if progress.step and self._make_stop_policy().is_time_up(progress.elapsed_s):
            reason = reason or "time"
        if progress.step < last and reason is None:
            return None
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints")
        assert loaded is not None
        outcome = self._state.outcome
        outcome.stopped_by, outcome.metrics = reason, progress.metrics
        outcome.weights_sha256 = checkpoint.weights_sha256(loaded.state.part("model").tensors)
        self._announce()
        return self.summarise()

    def open(self, channel: ServerChannel) -> None:
        job, state = self._job, self._state
        algorithm = make_algorithm(self._settings.use, job.python_path)
        schedule = Schedule(self._settings, algorithm, job.seed, self._facts.sizes, job.training.batch_size)
        dispatcher = self._dispatcher = RoundDispatcher(
            channel,
            state.members,
            self._take_event,
            self._handle_request,
            job=job,
            board=Board(schedule, state.board, merges=self._settings.parts.robust is None),
            state=state,
            policy=self._make_stop_policy(),
            num_clients=len(self._facts.sizes),
            show=self._launcher.progress,
            elapsed_s=self._elapsed_s,
            checkpoints=self._checkpoints,
            files=RoundFileServer(self._run_dir, state.members),
        )
        dispatcher.keep_timeline = TimelineFolder(self._run_dir).write
        self._starter = ProcessStarter(
            self._spec, job, self._launcher, state.members, state.addresses, channel.fence, "cordee.runs.federated"
        )
        self._starter.data = self._facts.data
        self._losses = WorkerLosses(job.cluster, self._launcher, dispatcher, self._starter)

    def begin(self) -> None:
        self._announce()
        for index in range(self._job.strategy.workers):
            self._starter.start("worker", index)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def summarise(self) -> Summary:
        """Return the summary. Raises StorageError or TrainingError if what was trained is not saved, or not all."""
        state, outcome, progress = self._state, self._state.outcome, self._state.progress
        progress.elapsed_s = self._elapsed_s()
        if outcome.problem:
            raise StorageError(
                f"round {progress.step} was reached, but its weights could not be saved: {outcome.problem}"
            )
        if outcome.end_reason:
            raise TrainingError(f"{outcome.end_reason}. Round {progress.step} is saved: --resume continues from it")
        trained = progress.samples - state.samples_before
        training_s = time.perf_counter() - state.begun_s if state.begun_s is not None else None
        ended = training.Outcome(
            stopped_by=outcome.stopped_by,
            metrics=outcome.metrics if progress.evaluated_at == progress.step else None,
            samples_per_second=trained / training_s if trained and training_s else None,
            stall_s=0.0,
        )
        summary = training.summarise(self._facts.description, progress, ended, started=state.started, num_batches=None)
        return msgspec.structs.replace(
            summary,
            weights_sha256=outcome.weights_sha256 or None,
            peak_memory_bytes=state.peak_memory_bytes or None,
            recoveries=state.losses.num_recoveries,
            epsilon=outcome.epsilon,
        )

    def _announce(self) -> None:
        place = {"run_dir": str(self._run_dir), "start_step": self._state.progress.step}
        description = msgspec.structs.replace(self._facts.description, clients=len(self._facts.sizes), **place)
        self._launcher.emit(description)

    def _load_progress(self, resume: bool) -> Progress:
        loaded = self._load_newest(resume)
        if loaded is None:
            return Progress()
        if "server" not in loaded.state.part("rounds").values:
            raise CheckpointError(
                f"{loaded.path.name} was made by another strategy: it has no server and no clients to continue with. "
                "Continue with that strategy, or start a new run"
            )
        return msgspec.convert(loaded.state.values["progress"], Progress)

    def _make_stop_policy(self) -> StopPolicy:
        return self._make_policy(self._state.progress.patience, self._facts.lower_is_better)

    def _check_request(self, request: Scale | JoinRequest) -> None:
        if isinstance(request, JoinRequest):
            raise JobError("workers that simulate clients are started by the launcher: cordee scale RUN N has more")
        if request.threads:
            raise JobError("the number of threads is part of the arithmetic of clients: leave --threads out")

    def _look_after_members(self) -> None:
        pass
