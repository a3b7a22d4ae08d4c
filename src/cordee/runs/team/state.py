"""What a coordinator of a team knows: all that its successor needs."""

from __future__ import annotations

import msgspec

from cordee.cluster.coordinator import Addresses
from cordee.cluster.policies import FailureReport, Restarts, Shortage
from cordee.monitoring import Summary
from cordee.runs.team.membership import Membership


class WorkersState(msgspec.Struct, kw_only=True):
    """What workers are told."""

    data: str = ""  # a fingerprint of the data: those of all workers must be the same
    threads: int = 0  # of each worker; 0 is what the job says
    is_reform_wanted: bool = False  # the same workers are to form another generation


class Recovery(msgspec.Struct, frozen=True):
    """What is under way between a loss and the first step of those left."""

    lost: list[int]
    started_s: float
    reached_step: int  # steps that were taken or under way when the team was lost


class RecoveryState(msgspec.Struct, kw_only=True):
    """What was lost, and how far the others are with continuing."""

    restarts: Restarts
    trained: list[int] = []  # members of the last generation that took a step
    lost: list[FailureReport] = []  # since the last generation was formed
    under_way: Recovery | None = None
    num_complete: int = 0
    steps_redone: int = 0


class LossState(msgspec.Struct, kw_only=True):
    """Why the run may have to end early."""

    shortage: Shortage | None = None  # too few are left, and others are waited for
    end_reason: str | None = None  # why the run ends although its workers end well


class DirectiveState(msgspec.Struct, kw_only=True):
    """What the members of the present generation were told."""

    is_pause_sent: bool = False
    is_stop_sent: bool = False


class TeamState(msgspec.Struct, kw_only=True):
    """What a coordinator must know to take up where another was."""

    membership: Membership
    addresses: Addresses
    workers: WorkersState = msgspec.field(default_factory=WorkersState)
    recoveries: RecoveryState
    losses: LossState = msgspec.field(default_factory=LossState)
    directives: DirectiveState = msgspec.field(default_factory=DirectiveState)
    summaries: dict[int, Summary] = {}
    is_announced: bool = False  # that the run has started
    stall_s: float = 0.0  # that training stood still for checkpoints
