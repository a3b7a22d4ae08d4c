"""What a coordinator of a served run knows of its processes: all that its successor needs."""

from __future__ import annotations

import msgspec

from cordee.cluster.coordinator import Addresses
from cordee.cluster.external_workers import ExternalWorkers
from cordee.cluster.shortage import Shortage
from cordee.runs.dispatched.state import Memory


class Process(msgspec.Struct, frozen=True):
    """A process that was asked for."""

    role: str
    index: int
    replica: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}" + (f".{self.replica}" if self.replica else "")


class Loss(msgspec.Struct, frozen=True):
    """A process that was lost, and when."""

    role: str
    name: str
    at_s: float
    step: int


class StarterState(msgspec.Struct, kw_only=True):
    """Who was started, and who came by itself."""

    next_worker: int  # number of the next one
    processes: dict[int, Process] = {}  # by its number at the engine
    num_started: int = 0
    newest_replica: dict[int, int] = {}  # of each server
    external_workers: ExternalWorkers = msgspec.field(default_factory=ExternalWorkers)
    away: list[str] = []  # frozen and given up, but not killed: they may come back


class LossState(msgspec.Struct, kw_only=True):
    """What was lost, and what is done about it."""

    num_replaced: int = 0
    num_lost_over: dict[int, int] = {}  # workers lost over each unit of work
    last: str = ""  # the last loss of a worker, in words
    num_recoveries: int = 0
    recovering: list[Loss] = []  # no step was committed since
    shortage: Shortage | None = None  # too few are left, and others are waited for


class RunState(msgspec.Struct, kw_only=True):
    """What a coordinator must know to take up where another was."""

    addresses: Addresses
    started: float
    begun_s: float
    base_s: float  # of training time before this attempt
    samples_before: int
    peak_memory_bytes: int = 0  # of the worker that took most
    starter: StarterState
    losses: LossState = msgspec.field(default_factory=LossState)
    dispatcher: Memory | None = None
