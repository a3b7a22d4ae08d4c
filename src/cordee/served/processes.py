"""What a coordinator of a served run knows of its processes: all that its successor needs."""

from __future__ import annotations

import msgspec

from cordee.cluster.restarts import Shortage
from cordee.served.memory import Memory


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


class RunMemory(msgspec.Struct, kw_only=True):
    """What a coordinator must know to take up where another was."""

    address: str
    public: str = ""  # the address for other hosts, if there is one
    far: dict[int, float] = {}  # workers of other hosts, and when they were taken
    next_worker: int
    started: float
    begun_s: float
    base_s: float  # of training time before this attempt
    samples_before: int
    processes: dict[int, Process] = {}  # by its number at the engine
    away: list[str] = []  # frozen and given up, but not killed: they may come back
    guests: dict[int, int] = {}  # worker -> pid, of those that somebody else started
    num_replicas: dict[int, int] = {}  # the newest replica of each server
    numbers: int = 0
    num_replaced: int = 0
    num_lost_over: dict[int, int] = {}  # workers lost over each unit of work
    peak_memory_bytes: int = 0  # of the worker that took most
    last_loss: str = ""  # of a worker
    shortage: Shortage | None = None  # too few are left, and others are waited for
    recoveries: int = 0
    recovering: list[Loss] = []
    dispatcher: Memory | None = None
