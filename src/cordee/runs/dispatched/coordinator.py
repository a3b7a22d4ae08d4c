"""Leads a run with work on demand: who is started, watched and shut down. Turns: `cluster/coordinator.py`."""

from __future__ import annotations

import time

import msgspec
from torch.optim import Optimizer

from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import Members, check_join_request
from cordee.communication.channel import ServerChannel
from cordee.communication.messages import JoinRequest, Scale
from cordee.communication.wire import Codec
from cordee.compute import OptimizerRecipe, make_schedule
from cordee.compute.schedules import PlateauSchedule, TorchSchedule
from cordee.core.errors import JobError, StorageError, TrainingError
from cordee.core.fault_points import reach
from cordee.data import Ledger
from cordee.monitoring import Summary
from cordee.monitoring.timeline import TimelineFolder
from cordee.runs.dispatched.dispatcher import Dispatcher
from cordee.runs.dispatched.facts import RunFacts
from cordee.runs.dispatched.losses import Losses
from cordee.runs.dispatched.messages import DISPATCHED, LIMITS
from cordee.runs.dispatched.on_demand_leader import OnDemandLeader
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.server_calls import ServerCalls
from cordee.runs.dispatched.state import RunState
from cordee.runs.dispatched.step_metrics import MOST_REFUSALS
from cordee.runs.dispatched.summary import Summariser
from cordee.strategies.parameter_server.strategy import settings_of
from cordee.training.progress import Progress


class DispatchedLeader(OnDemandLeader):
    """The `Leader` of one run with workers, servers and an evaluator."""

    codec = Codec(DISPATCHED, LIMITS)
    _state: RunState
    _dispatcher: Dispatcher
    _losses: Losses

    def __init__(self, spec: CoordinatorSpec, launcher: LauncherLink) -> None:
        super().__init__(spec, launcher)
        job = self._job
        self._facts = facts = msgspec.convert(spec.facts, RunFacts)
        self._settings = settings_of(job)
        num_batches = -(-facts.num_samples // job.training.batch_size)
        self._recipe = OptimizerRecipe(
            _make_nothing,
            make_schedule(
                job.schedule,
                facts.total_steps,
                job.python_path,
                num_batches=num_batches,
                better=lambda metric: "lower" if metric in facts.lower_is_better else "higher",
            ),
            facts.lr_factor,
            groups=tuple(facts.groups),
        )
        if isinstance(self._recipe.schedule, TorchSchedule | PlateauSchedule):
            self._recipe.schedule.fit(facts.groups)
        self._servers = ServerCalls(spec.run_id, spec.client_keys)
        self._has_changed = False  # what must be written down though nothing follows from it
        if launcher.restored is not None:
            self._state = msgspec.msgpack.decode(launcher.restored, type=RunState)
            assert self._state.dispatcher is not None
            self._progress = self._state.dispatcher.progress
        else:
            progress = self._progress = self._load_progress(spec.resume)
            self._state = RunState(
                addresses=Addresses.of(job, spec),
                started=time.time(),
                base_s=progress.elapsed_s,
                samples_before=progress.samples,
                members=Members(failure_timeout_s=job.cluster.failure_timeout_s),
            )
        self._plan = self._make_plan()
        self._summariser = Summariser(
            self._run_dir, self._plan, facts, self._progress, self._state, self._launcher.emit
        )

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def begun_s(self) -> float | None:
        return self._dispatcher.metrics.begun_s

    def find_ended(self) -> Summary | None:
        return self._summariser.summarise_ended()

    def open(self, channel: ServerChannel) -> None:
        launcher, cluster, state = self._launcher, self._job.cluster, self._state
        dispatcher = self._dispatcher = self._make_dispatcher(channel, self._plan)
        dispatcher.keep_timeline = TimelineFolder(self._run_dir).write
        starter = self._starter = ProcessStarter(
            self._spec,
            self._job,
            launcher,
            state.members,
            state.addresses,
            channel.fence,
            "cordee.runs.dispatched",
            self._settings.place,
        )
        starter.data = self._facts.data
        self._losses = Losses(cluster, launcher, dispatcher, starter, self._servers, state.losses)

    def begin(self) -> None:
        self._summariser.announce()
        for index in range(self._settings.servers):
            for _ in range(self._settings.replicas):
                self._starter.start_server(index, resume=self._spec.resume)
        self._starter.start("evaluator", 0)
        for index in range(self._job.strategy.workers):
            self._starter.start("worker", index)

    def _look_after_members(self) -> None:
        dispatcher, losses = self._dispatcher, self._losses
        losses.start_followers()
        if self._servers.pair(dispatcher.servers):
            self._has_changed = True  # a follower that is not known to follow would not take over
        losses.report_recoveries()
        if dispatcher.metrics.has_only_refusals:
            step = self._progress.step + 1
            raise TrainingError(
                f"the servers refused {MOST_REFUSALS} gradients in a row at step {step}: none was finite. "
                "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set strategy.clip_norm = 1.0"
            )

    def shut_down(self) -> bool:
        if super().shut_down():
            return True
        for record in self._state.members.started:
            if record.role == "server":
                self._launcher.signal(record.number, "end")
        reach("dispatch.shut_down_done")
        return False

    @property
    def has_pending(self) -> bool:
        return self._has_changed or super().has_pending

    def encode(self) -> bytes:
        self._state.dispatcher = self._dispatcher.current_state()
        return msgspec.msgpack.encode(self._state)

    def flush(self) -> None:
        self._has_changed = False
        super().flush()

    def summarise(self) -> Summary:
        """Return the summary. Raises StorageError or TrainingError if what was trained is not saved, or not all."""
        outcome, step = self._dispatcher.outcome, self._progress.step
        self._progress.elapsed_s = self._elapsed_s()
        if outcome.problem:
            raise StorageError(f"step {step} was reached, but its weights could not be saved: {outcome.problem}")
        if outcome.end_reason:
            raise TrainingError(f"{outcome.end_reason}. Step {step} is saved: --resume continues from it")
        return self._summariser.summarise(outcome, self._dispatcher.metrics.training_s)

    def _make_dispatcher(self, channel: ServerChannel, plan: RunPlan) -> Dispatcher:
        num_shares = self._job.training.num_shards or self._job.strategy.workers
        return Dispatcher(
            channel,
            self._state.members,
            self._take_event,
            self._handle_request,
            plan=plan,
            ledger=Ledger(plan.exchanges, num_shares),
            progress=self._progress,
            show=self._launcher.progress,
            elapsed_s=self._elapsed_s,
            rate=self._rate,
            checkpoints=self._checkpoints,
            restored=self._state.dispatcher,
        )

    def _make_plan(self) -> RunPlan:
        facts = self._facts
        return RunPlan(
            self._job,
            self._settings,
            facts.num_samples,
            facts.total_steps,
            self._make_policy(self._progress.patience, facts.lower_is_better),
            facts.counts_classes,
            start=self._progress.step,
            dtype=facts.dtype,
            schedule=self._recipe.schedule,
        )

    def _load_progress(self, resume: bool) -> Progress:
        loaded = self._load_newest(resume)
        return Progress() if loaded is None else msgspec.convert(loaded.state.values["progress"], Progress)

    def _check_request(self, request: Scale | JoinRequest) -> None:
        if isinstance(request, JoinRequest):
            check_join_request(request, self.addresses.public)
        elif request.threads:
            raise JobError("workers of parameter servers keep their threads: leave --threads out")

    def _rate(self, step: int) -> float:
        schedule = self._recipe.schedule
        if isinstance(schedule, PlateauSchedule):
            schedule.level = int(self._progress.plateau.get("level", 0))
        return self._recipe.first_rate(step)


def _make_nothing(named_parameters: object) -> Optimizer:
    raise AssertionError("a coordinator has no parameters")
