"""What the coordinator of a dispatched run writes down."""

from __future__ import annotations

import msgspec

from cordee.cluster.coordinator import Addresses
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.policies import Shortage
from cordee.compute import Metrics
from cordee.data.ledger import LedgerState
from cordee.parameters.server_slots import ServerSlot, ServerSlots
from cordee.runs.dispatched.state import (
    DispatcherState,
    Loss,
    LossState,
    Outcome,
    RunState,
    SnapshotState,
    StepMetricsState,
    StepSum,
)
from cordee.training.progress import Progress


def test_what_a_coordinator_knows_survives_being_written_down() -> None:
    dispatcher = DispatcherState(
        progress=Progress(step=3),
        slots=ServerSlots([ServerSlot("server-0", "server-0.1", is_following=True)], version=1),
        metrics=StepMetricsState(counted=3, sums={4: StepSum(loss_sum=1.5, count=2)}, to_apply=(2, 0.5)),
        snapshots=SnapshotState(num_tasks=1, task_place=(3, 0, 3, 12), is_task_open=True, is_reading=True),
        barrier=4,
        ledger=LedgerState(3, 7, [6], [5], {4: "worker-1"}),
        outcome=Outcome(metrics=Metrics(1.0, 0.5, None, 4, 0.1), ages=(1, 2)),
    )
    state = RunState(
        addresses=Addresses("tcp://127.0.0.1:1"),
        started=1.0,
        begun_s=2.0,
        base_s=0.0,
        samples_before=0,
        members=Members(
            failure_timeout_s=5.0,
            num_started=3,
            records={
                "worker-1": MemberRecord(index=1, pid=99, incarnation=17, fenced=16, heard_s=0.5, phase="joined"),
                "server-0.1": MemberRecord(role="server", index=0, replica=1, number=3, started=7, address="here"),
            },
        ),
        losses=LossState(recovering=[Loss("worker", "worker-0", 1.0, 2)], shortage=Shortage("too few", 3.0)),
        dispatcher=dispatcher,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RunState) == state
