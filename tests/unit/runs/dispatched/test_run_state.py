"""What the coordinator of a dispatched run writes down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cordee.cluster import Team
from cordee.cluster.coordinator import Addresses, CoordinatorSpec, commit_turn, open_channel
from cordee.cluster.journal import JOURNAL_FILE, Journal
from cordee.cluster.launcher_link import LauncherLink, LauncherSpec
from cordee.cluster.launcher_messages import listen
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import MemberRecord, Members
from cordee.cluster.policies import Shortage
from cordee.communication.keys import make_keys
from cordee.communication.this_host import host_id
from cordee.compute import Metrics
from cordee.core import Job
from cordee.data.ledger import LedgerState
from cordee.monitoring.events import Warned
from cordee.parameters.server_slots import ServerSlot, ServerSlots
from cordee.runs.dispatched.coordinator import DispatchedLeader
from cordee.runs.dispatched.facts import RunFacts
from cordee.runs.dispatched.link import DispatchLink
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
from cordee.training.components import assemble
from cordee.training.progress import Progress


def test_what_a_coordinator_knows_survives_being_written_down() -> None:
    dispatcher = DispatcherState(
        progress=Progress(step=3),
        slots=ServerSlots([ServerSlot("server-0", "server-0.1", is_following=True)]),
        metrics=StepMetricsState(counted=3, sums={4: StepSum(loss_sum=1.5, count=2)}, to_apply=(2, 0.5)),
        snapshots=SnapshotState(num_tasks=1, task_place=(3, 0, 3, 12), is_task_open=True, is_reading=True),
        barrier=4,
        ledger=LedgerState(3, 7, [6], [5], {4: "worker-1"}),
        outcome=Outcome(metrics=Metrics(1.0, 0.5, None, 4, 0.1), ages=(1, 2)),
    )
    state = RunState(
        addresses=Addresses("tcp://127.0.0.1:1"),
        started=1.0,
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


SERVER_KEYS, (CLIENT_KEYS, CONTROL_KEYS) = make_keys(2)
JOB = {
    "model": {"use": "mlp"},
    "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": 8},
    "training": {"batch_size": 4, "epochs": 1},
    "strategy": {"name": "parameter_server"},
    "cluster": {"failure_timeout": 2.0},
}


def test_heartbeats_have_nothing_written_down(tmp_path: Path) -> None:
    job = Job.from_dict(JOB)
    (tmp_path / "job.toml").write_text(job.to_toml())
    parts = assemble(job, Team())
    parts.train.close()
    spec = CoordinatorSpec(
        kind="dispatched",
        run_dir=str(tmp_path),
        run_id="run",
        server_keys=SERVER_KEYS.to_text(),
        client_keys=CLIENT_KEYS.to_text(),
        control_keys=CONTROL_KEYS.to_text(),
        resume=False,
        launcher_pid=1,
        num_slots=2,
        facts=msgspec.to_builtins(RunFacts.of(parts)),
        launcher=LauncherSpec(folder=str(tmp_path), run_dir=str(tmp_path), run_id="run", alive_every_s=60.0),
    )
    member = MemberSpec(
        kind="dispatched",
        role="worker",
        index=0,
        run_dir=str(tmp_path),
        run_id="run",
        run_host=host_id(),
        job="",
        address="",
        client_keys=CLIENT_KEYS.to_text(),
        failure_timeout_s=2.0,
        startup_timeout_s=10.0,
    )
    with listen(tmp_path), LauncherLink(spec.launcher) as launcher:
        leader = DispatchedLeader(spec, launcher)
        with open_channel(leader.addresses, "run", leader.codec, SERVER_KEYS) as channel:
            leader.open(channel)
            leader.begin()
            commit_turn(leader, launcher)

            def lead_until(is_so: Callable[[], object]) -> int:
                """Lead the run until something is so; return the number of journal entries by then."""
                deadline_s = time.monotonic() + 20.0
                while not is_so():
                    assert time.monotonic() < deadline_s, "it did not happen in time"
                    leader.receive(0.01)
                    commit_turn(leader, launcher)
                    leader.decide()
                    commit_turn(leader, launcher)
                with Journal(tmp_path / JOURNAL_FILE, "run") as journal:
                    return journal.num_entries

            with DispatchLink(msgspec.structs.replace(member, address=channel.address)) as link:
                joining = threading.Thread(target=link.join)
                joining.start()
                before = lead_until(lambda: not joining.is_alive())
                link.step, began_s = 3, time.monotonic()
                after = lead_until(lambda: link._heard_s > began_s + 1.2)  # at least three were answered
                assert leader._state.members.records["worker-0"].step == 3
                assert after == before, "nothing has changed that the next coordinator must know"
                telling = threading.Thread(target=link.emit, args=(Warned(message="written down"),))
                telling.start()
                assert lead_until(lambda: not telling.is_alive()) == before + 1
