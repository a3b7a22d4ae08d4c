"""The coordinator of a run: leads it from its start, or from where another coordinator was, to its end.

A process of its own. Each turn it hears what has come in, decides, writes down what it knows and what it is about to
do, and does it. Killed at any moment, another continues from there (`cluster/journal.py`). What is decided is for the
`Leader` of the kind of run.
"""

from __future__ import annotations

import functools
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cordee.cluster.control import Control, write_control
from cordee.cluster.engine import Place, ProcessSpec
from cordee.cluster.launcher_link import TICK_S, LauncherLink, LauncherSpec
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import MemberRecord, Members
from cordee.communication.channel import ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import find_listening, host_id
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import CommunicationError, CordeeError, JobError
from cordee.core.fault_points import identify, reach
from cordee.monitoring import Summary, events, setup_logging

log = logging.getLogger("cordee.coordinator")

REBIND_TIMEOUT_S = 10.0


class CoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells a coordinator. Travels through a private socket."""

    kind: str  # of the run
    run_dir: str
    run_id: str
    server_keys: str
    client_keys: str
    control_keys: str
    resume: bool
    marker: str = ""  # what the launcher wrote into `checkpoint.storage`; empty where there is none
    launcher_pid: int
    num_slots: int  # processes that have a core of their own
    most_workers: int | None = None  # that the engine can start
    address: str = ""  # HOST or HOST:PORT at which the engine's processes on other hosts reach this one
    facts: dict[str, Any]  # what the kind of run lets its coordinator know of the job's components
    launcher: LauncherSpec

    @property
    def job_file(self) -> Path:
        return Path(self.run_dir) / "job.toml"


class Addresses(msgspec.Struct):
    """Where the coordinator listens, and another in its place."""

    local: str  # for processes of this host
    public: str = ""  # for those of other hosts; empty if they cannot join

    @classmethod
    def of(cls, job: Job, spec: CoordinatorSpec) -> Addresses:
        """Return those of a run that begins. The port that the engine uses is its own."""
        asked = job.cluster.address or spec.address
        listening = find_listening(asked) if asked else None
        if listening is not None and not job.cluster.address:
            listening = listening._replace(port=0)
        return cls("tcp://127.0.0.1:*", listening.address if listening else "")


class MemberStarter:
    """Has processes started for members, and takes those that come by themselves. Nothing else does either."""

    def __init__(
        self,
        spec: CoordinatorSpec,
        job: Job,
        launcher: LauncherLink,
        members: Members,
        addresses: Addresses,
        fence: Callable[[str, int], None],
        package: str,
        others_place: Place = "launcher",
    ) -> None:
        """`fence` has the channel refuse what an incarnation of a member still says. `package` has a module with a
        function `main` for each role. `others_place` is where those run that are not workers.
        """
        self.run_dir = Path(spec.run_dir)
        self._spec = spec
        self._job = job
        self._launcher = launcher
        self._members = members
        self._addresses = addresses
        self._fence = fence
        self._package = package
        self._others_place = others_place
        self._text = job.to_toml()
        self.data = ""  # what is known of the run's data
        self.prints = False  # whether what workers print goes to the launcher's terminal, and not into their logs

    def start(self, role: str, index: int, *, replica: int = 0, **extra: Any) -> MemberRecord:
        """Have a process started for a member, in the place of an earlier one if any, with `extra` in its spec."""
        members = self._members
        members.num_started += 1
        record = self._expect(MemberRecord(role=role, index=index, replica=replica, number=members.num_started))
        argument = msgspec.to_builtins(self._make_spec(record, extra))
        log = None if self.prints else str(self.log_file(record))
        place: Place = "slot" if role == "worker" else self._others_place
        target = f"{self._package}.{role}:main"
        # The replicas of a server are not to be lost with one host.
        process = ProcessSpec.new(record.number, target, argument, log=log, place=place, apart=f"{role} {index}")
        self._launcher.start(process)
        record.started = process.incarnation
        return record

    def admit(self, index: int, request: JoinRequest) -> str:
        """Take a worker that somebody else started; return its spec: the same as others, and the launcher.

        The worker takes part when it has said that it is there.
        """
        is_remote = request.host_id != host_id()
        record = self._expect(MemberRecord(index=index, pid=request.pid, is_remote=is_remote))
        spec = self._make_spec(record, {"launcher_pid": self._spec.launcher_pid})
        reach("workers.admitted")
        return msgspec.json.encode(spec).decode()

    def check_room(self, num_workers: int) -> None:
        """Raise JobError for more workers than the engine can start."""
        most = self._spec.most_workers
        if most is not None and num_workers > most:
            raise JobError(f"the engine has {most} slots and cannot get more: {num_workers} workers are too many")

    def log_file(self, record: MemberRecord) -> Path:
        name = record.role if record.role == "evaluator" else record.name
        return self.run_dir / "logs" / f"{name}.log"

    def _expect(self, record: MemberRecord) -> MemberRecord:
        self._members.expect(record, time.monotonic())
        if record.fenced:
            self._fence(record.name, record.fenced)
        return record

    def _make_spec(self, record: MemberRecord, extra: dict[str, Any]) -> MemberSpec:
        spec, public = self._spec, self._addresses.public
        common = MemberSpec(
            kind=spec.kind,
            role=record.role,
            index=record.index,
            replica=record.replica,
            serial=record.serial,
            run_dir=spec.run_dir,
            run_id=spec.run_id,
            address=self._addresses.local,
            public=public,
            client_keys=spec.client_keys,
            store=spec.launcher.folder,
            resume=spec.resume,
            marker=spec.marker,
            failure_timeout_s=self._members.failure_timeout_s,
            startup_timeout_s=self._members.startup_timeout_s,
            num_local=self._job.strategy.workers,
            run_host=host_id(),
            job=self._text,
            data=self.data,
        )
        return msgspec.structs.replace(common, **extra)


class Leader(Protocol):
    """What a kind of run decides, and knows. Made from the job, or from what the coordinator before it wrote down.

    Nothing that it wants is done before the next commit, so that what it follows from is written down first.
    """

    codec: Codec

    @property
    def addresses(self) -> Addresses: ...

    @property
    def step(self) -> int:
        """How far the run is."""

    def find_ended(self) -> Summary | None:
        """Return the summary of a run that is resumed and has nothing left to do."""

    def open(self, channel: ServerChannel) -> None:
        """Take the channel that processes speak to. Called once, before everything below."""

    def begin(self) -> None:
        """Have the first processes started."""

    def resend_directives(self) -> None:
        """Say again what processes may not have heard of an earlier coordinator, and do not ask for by themselves."""

    @property
    def is_over(self) -> bool: ...

    def receive(self, timeout_s: float) -> None:
        """Take what has come in, waiting at most `timeout_s` for the first message."""

    def decide(self) -> None:
        """Decide what follows from what is known by now. Raises TrainingError if the run cannot continue."""

    def shut_down(self) -> bool:
        """Tell those that are left that the run is over; return whether somebody is still waited for."""

    @property
    def has_pending(self) -> bool:
        """Whether there is something to write down before anything is sent."""

    def encode(self) -> bytes:
        """Return what another coordinator must know to take up here."""

    def flush(self) -> None:
        """Send what is to be sent."""

    def summarise(self) -> Summary:
        """Return what came of the run. Raises CordeeError if it ended well in vain."""


def run_coordinator(spec: CoordinatorSpec, make_leader: Callable[[CoordinatorSpec, LauncherLink], Leader]) -> int:
    """Lead a run, tell the launcher how it ended, return the exit code. For the process of a coordinator."""
    identify("coordinator")
    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm signals every process of a job, not only those it started
        signal.signal(number, signal.SIG_IGN)  # the launcher says when the user wants an end
    with setup_logging(Path(spec.run_dir) / "logs" / "coordinator.log"), LauncherLink(spec.launcher) as launcher:
        try:
            summary = _lead(spec, make_leader(spec, launcher), launcher)
            launcher.flush()
            reach("launcher_link.end")
            launcher.end(msgspec.to_builtins(summary))
            reach("launcher_link.ended")
        except CordeeError as error:
            launcher.flush()
            launcher.fail(error)
    return 0


def _lead(spec: CoordinatorSpec, leader: Leader, launcher: LauncherLink) -> Summary:
    """Take the run from where it is to its end. Raises what it ends with instead."""
    is_new = launcher.restored is None
    if is_new and spec.resume and (ended := leader.find_ended()) is not None:
        return ended

    commit = functools.partial(commit_turn, leader, launcher)
    with open_channel(leader.addresses, spec.run_id, leader.codec, ServerKeys.from_text(spec.server_keys)) as channel:
        leader.addresses.local, leader.addresses.public = channel.address, channel.public
        leader.open(channel)
        if is_new:
            leader.begin()
        else:
            log.warning("taking up at step %d", leader.step)
            reach("coordinator.back")
            leader.resend_directives()
        commit()
        reach("coordinator.listening")
        control = Control.of(channel.address, spec.run_id, spec.control_keys, channel.public)
        if problem := write_control(Path(spec.run_dir), control):
            launcher.emit(events.Warned(message=problem))
        reach("coordinator.control_written")
        while not leader.is_over:
            leader.receive(TICK_S)
            reach("coordinator.heard")
            commit()  # processes wait for their answers; nobody waits for what follows
            leader.decide()
            commit()
        reach("coordinator.over")
        while leader.shut_down():
            commit()
            leader.receive(TICK_S)
        commit()
    return leader.summarise()


def commit_turn(leader: Leader, launcher: LauncherLink) -> None:
    """Write down what is known and what follows, if anything does; then do it."""
    if launcher.has_pending or leader.has_pending:
        reach("coordinator.decided")
        launcher.commit(leader.encode())
        reach("coordinator.committed")
    leader.flush()


def open_channel(addresses: Addresses, run_id: str, codec: Codec, keys: ServerKeys) -> ServerChannel:
    """Listen at the addresses of an earlier coordinator, or at new ones. Raises CommunicationError.

    The port of one that was killed is free at once, unless somebody else took it meanwhile.
    """
    deadline_s = time.monotonic() + REBIND_TIMEOUT_S
    speaker = Speaker(run=run_id, name="coordinator", incarnation=time.time_ns())
    while True:
        try:
            reach("launcher_link.listen")
            return ServerChannel(addresses.local, speaker, codec, keys, public=addresses.public)
        except CommunicationError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
