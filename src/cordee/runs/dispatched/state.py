"""What a dispatcher knows of processes, steps and the end of the run: all that its successor needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cordee.compute import Metrics
from cordee.data.ledger import LedgerState
from cordee.runs.dispatched.server_slots import ServerSlots
from cordee.training.progress import Progress

Place = tuple[int, int, int, int]  # step, epoch, batches of it, samples in all


@dataclass
class ProcessRecord:
    """What is known of one process."""

    role: str
    index: int
    pid: int
    incarnation: int
    heard_s: float
    address: str = ""  # of a server
    public: str = ""  # the same, for workers of other hosts
    step: int = 0
    is_done: bool = False
    num_events: int = 0  # heard of it
    is_leaving: bool = False  # gets no more work: it was told to go, or the run is to have fewer
    has_left: bool = False  # was let go


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
    verdict: str = ""  # why the run ends early although nobody failed
    ages: tuple[int, ...] = ()
    problem: str = ""  # why the last checkpoint is missing
    stall_s: float = 0.0  # that nothing was handed out for checkpoints


class StepMetricsState(msgspec.Struct, kw_only=True):
    """Where the accounts of the steps are."""

    counted: int  # steps that are in the progress
    sums: dict[int, StepSum] = {}  # of those after
    settle: tuple[int, float] = (-1, 1.0)  # the step that servers may apply, and how they scale it
    first_work_s: float | None = None  # when training proper began
    last_step_s: float | None = None  # when the newest step was committed
    num_refused_in_a_row: int = 0


class SnapshotState(msgspec.Struct, kw_only=True):
    """What the evaluator was told, and has done."""

    num_orders: int = 0
    ordered_at: Place = (0, 0, 0, 0)  # where training was when the order was given
    ordered_loss: float | None = None  # mean training loss of the epoch, then
    ordered_step: int = -1
    has_ordered_last: bool = False  # the order that ends the run is given
    is_order_open: bool = False
    is_reading: bool = False  # a snapshot is being read: nothing may change
    is_deciding: bool = False  # training waits for what the evaluation says
    saved_step: int = -1  # of the job: its checkpoint is there
    paused_s: float | None = None  # since when nothing is handed out for a snapshot
    stall_s: float = 0.0  # of the last snapshot


class Memory(msgspec.Struct, kw_only=True):
    """What a dispatcher that comes back must know."""

    progress: Progress
    slots: ServerSlots
    accounts: StepMetricsState
    snapshots: SnapshotState = msgspec.field(default_factory=SnapshotState)
    attempt: int = 0  # how often units were handed out again because a server was lost with what it had of them
    barrier: int  # nothing of this step is handed out before a snapshot
    ledger: LedgerState | None = None
    process_records: dict[str, ProcessRecord] = {}
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    is_final: bool = False
    is_over: bool = False
