"""What leaders of runs with work on demand share, whatever the work is: start, turns, scaling, shutting down."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from cordee import checkpoint
from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.launcher_link import LauncherLink
from cordee.communication.messages import JoinRequest, Scale
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.core.stopping import Patience, StopPolicy
from cordee.monitoring import AnyEvent, events
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.dispatched.on_demand_losses import OnDemandLosses, WorkQueue
from cordee.runs.dispatched.process_starter import ProcessStarter
from cordee.runs.dispatched.state import OnDemandState


class OnDemandQueue(WorkQueue, Protocol):
    """What hands out the work, as its leader uses it."""

    @property
    def has_pending(self) -> bool: ...

    def serve(self, timeout_s: float) -> None: ...

    def stop(self, reason: str) -> None: ...

    def shut_down(self) -> None: ...

    def flush(self) -> None: ...


class OnDemandLeader(ABC):
    """The part of a `Leader` (`cluster/coordinator.py`) that does not depend on what the work is."""

    _state: OnDemandState
    _dispatcher: OnDemandQueue
    _starter: ProcessStarter
    _losses: OnDemandLosses

    def __init__(self, spec: CoordinatorSpec, launcher: LauncherLink) -> None:
        self._spec = spec
        self._launcher = launcher
        self._run_dir = Path(spec.run_dir)
        self._job = Job.load(spec.job_file)
        self._shut_down_by_s: float | None = None

    @property
    @abstractmethod
    def step(self) -> int: ...

    @property
    @abstractmethod
    def begun_s(self) -> float | None:
        """When the first piece of work was handed out; None before."""

    @abstractmethod
    def _check_request(self, request: Scale | JoinRequest) -> None:
        """Raise JobError for what this kind of run cannot do."""

    @abstractmethod
    def _look_after_members(self) -> None:
        """Do what members need besides being replaced. Each turn."""

    @property
    def addresses(self) -> Addresses:
        return self._state.addresses

    @property
    def is_over(self) -> bool:
        return self._dispatcher.is_over

    @property
    def has_pending(self) -> bool:
        return self._dispatcher.has_pending

    def flush(self) -> None:
        self._dispatcher.flush()

    @cached_property
    def _checkpoints(self) -> CheckpointReceiver:
        """What saves for members that do not have the run directory."""
        return CheckpointReceiver(self._run_dir / "checkpoints", self._state.members)

    def resend_directives(self) -> None:
        self._checkpoints.remove_unfinished()  # whoever had no answer asks again

    def receive(self, timeout_s: float) -> None:
        self._dispatcher.serve(timeout_s)

    def decide(self) -> None:
        dispatcher, losses, stop_s = self._dispatcher, self._losses, self._job.stop.time_s
        losses.check_members(time.monotonic())
        self._state.members.check_storage(self._job.checkpoint.storage)
        losses.check_failures()
        self._look_after_members()
        losses.check_shortage()
        if self._launcher.should_stop():
            dispatcher.stop("interrupt")
        elif stop_s is not None and self._elapsed_s() >= stop_s:
            dispatcher.stop("time")

    def shut_down(self) -> bool:
        """Let workers and evaluator end in order; what is still there is ended by the engine."""
        if self._shut_down_by_s is None:
            reach("dispatch.shut_down")
            self._shut_down_by_s = time.monotonic() + self._job.cluster.failure_timeout_s
        records = self._state.members.records.values()
        others = [record for record in records if record.role != "server" and record.may_send]
        if time.monotonic() < self._shut_down_by_s and not all(record.is_done for record in others):
            self._dispatcher.shut_down()
            return True
        self._checkpoints.close()
        return False

    def _load_newest(self, resume: bool) -> checkpoint.Loaded | None:
        """Return the newest complete checkpoint, if the run continues and there is one. Warns of damaged ones."""
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints") if resume else None
        if loaded is not None:
            for path, reason in loaded.damaged:
                message = f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}"
                self._launcher.emit(events.Warned(message=message))
        elif resume:
            self._launcher.emit(events.Warned(message="the run has no checkpoint yet: starting from the beginning"))
        return loaded

    def _make_policy(self, patience: Patience, lower_is_better: Iterable[str]) -> StopPolicy:
        keep_best = self._job.checkpoint.keep_best
        best = keep_best if isinstance(keep_best, str) else ""
        return StopPolicy(self._job.stop, patience, frozenset(lower_is_better), best)

    def _handle_request(self, request: Scale | JoinRequest) -> str:
        """Do what somebody with the control file wants; return what is said to them. Raises JobError."""
        self._check_request(request)
        if isinstance(request, JoinRequest):
            return self._starter.admit(self._starter.next_worker, request)
        return self._scale(request.num_workers)

    def _scale(self, num_workers: int) -> str:
        """Start workers, or have the last ones leave. Returns at once what will happen."""
        min_workers = self._job.cluster.min_workers
        if num_workers < min_workers:
            raise JobError(f"cluster.min_workers = {min_workers} is more than {num_workers}")
        self._starter.check_room(num_workers)
        before = self._state.members.staying_workers
        for record in before[num_workers:]:
            if record.phase == "starting":
                raise JobError(f"{record.name} is still starting: try again in a moment")
            record.is_leaving = True
        for _ in range(num_workers - len(before)):
            self._starter.start_worker()
        self._launcher.emit(events.Scale(workers=num_workers, before=len(before), step=self.step))
        return f"from {len(before)} to {num_workers} workers"

    def _take_event(self, event: AnyEvent) -> None:
        if isinstance(event, events.WorkerEnded):
            peak = event.peak_memory_bytes or 0
            self._state.peak_memory_bytes = max(self._state.peak_memory_bytes, peak)
        self._launcher.emit(event)

    def _elapsed_s(self) -> float:
        """Return how long the run has trained, without the start of its processes: as teams count it."""
        return self._state.base_s + (0.0 if self.begun_s is None else time.perf_counter() - self.begun_s)
