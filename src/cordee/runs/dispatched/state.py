"""What a coordinator of a dispatched run knows: all that its successor needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cordee.cluster.coordinator import Addresses
from cordee.cluster.members import Members
from cordee.cluster.policies import Shortage
from cordee.compute import Metrics
from cordee.data.ledger import LedgerState
from cordee.parameters.server_slots import ServerSlots
from cordee.training.progress import Progress

Place = tuple[int, int, int, int]  # step, epoch, batches of it, samples in all


@dataclass
class StepSum:
    """What workers said of the parts of one step."""

    loss_sum: float = 0.0
    count: float = 0.0
    num_items: int = 0
    num_correct: int = 0
    num_samples: int = 0
    norms: list[tuple[int, float]] = field(default_factory=list)  # of parts of parameters, by the parameter's number


@dataclass
class Outcome:
    """How the run ended."""

    stopped_by: str | None = None
    metrics: Metrics | None = None
    weights_sha256: str = ""
    end_reason: str = ""  # why the run ends early although nobody failed
    ages: tuple[int, ...] = ()
    problem: str = ""  # why the last checkpoint is missing
    stall_s: float = 0.0  # that nothing was handed out for checkpoints


class StepMetricsState(msgspec.Struct, kw_only=True):
    """How far the metrics of the steps are."""

    counted: int  # steps that are in the progress
    sums: dict[int, StepSum] = {}  # of those after
    to_apply: tuple[int, float] = (-1, 1.0)  # the step that servers may apply, and how they scale it
    first_work_s: float | None = None  # when training proper began
    last_step_s: float | None = None  # when the newest step was committed
    num_refused_in_a_row: int = 0


class SnapshotState(msgspec.Struct, kw_only=True):
    """What the evaluator was told, and has done."""

    num_tasks: int = 0
    task_place: Place = (0, 0, 0, 0)  # where training was when the task was given
    task_loss: float | None = None  # mean training loss of the epoch, then
    task_step: int = -1
    has_last_task: bool = False  # the task that ends the run is given
    is_task_open: bool = False
    is_reading: bool = False  # a snapshot is being read: nothing may change
    is_deciding: bool = False  # training waits for what the evaluation says
    saved_step: int = -1  # of the job: its checkpoint is there
    paused_s: float | None = None  # since when nothing is handed out for a snapshot
    stall_s: float = 0.0  # of the last snapshot


class DispatcherState(msgspec.Struct, kw_only=True):
    """What a dispatcher that comes back must know."""

    progress: Progress
    slots: ServerSlots
    metrics: StepMetricsState
    snapshots: SnapshotState = msgspec.field(default_factory=SnapshotState)
    attempt: int = 0  # how often units were handed out again because a server was lost with what it had of them
    barrier: int  # nothing of this step is handed out before a snapshot
    ledger: LedgerState | None = None
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    is_final: bool = False
    is_over: bool = False
    residuals_step: int = -1  # at which workers were told last to have servers keep what compression left out
    residuals: dict[str, bool] = {}  # the workers that were told then, and whether it is done
    feeding_back: set[str] = set()  # the workers that have left something out


class Loss(msgspec.Struct, frozen=True):
    """A process that was lost, and when."""

    role: str
    name: str
    at_s: float
    step: int


class LossState(msgspec.Struct, kw_only=True):
    """What was lost, and what is done about it."""

    num_replaced: int = 0
    counted: str = ""  # what was lost with the last of them (`Exited.lost_with`)
    num_lost_over: dict[str, int] = {}  # workers lost over each piece of work, by its description
    last: str = ""  # the last loss of a worker, in words
    num_recoveries: int = 0
    recovering: list[Loss] = []  # no step was committed since
    shortage: Shortage | None = None  # too few are left, and others are waited for


class OnDemandState(msgspec.Struct, kw_only=True):
    """What every coordinator that hands out work must know to take up where another was."""

    addresses: Addresses
    started: float
    base_s: float  # of training time before this attempt
    samples_before: int
    peak_memory_bytes: int = 0  # of the worker that took most
    members: Members
    losses: LossState = msgspec.field(default_factory=LossState)


class RunState(OnDemandState, kw_only=True):
    """The same of a run with parameter servers."""

    dispatcher: DispatcherState | None = None
