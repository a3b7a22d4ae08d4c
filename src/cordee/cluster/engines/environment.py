"""The engine `env`: processes that something else started (torchrun, srun, mpirun, Kubernetes, …) are the agents.

All of them run the same command. Rank 0 becomes the launcher; each of them, rank 0 as well, is a slot that runs an
agent when the launcher asks for it. A slot outlives its agent: the launcher then asks for another, and the scheduler,
which would end everything if one of its processes ended, notices nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from cordee.checkpoint.stored_run import is_stored
from cordee.cluster.engine import Capacity
from cordee.cluster.engines.agent_messages import AgentOrder, Versions
from cordee.cluster.engines.agents import AgentEnded, AgentSource, EngineRequest
from cordee.cluster.engines.environment_link import (
    Connection,
    Rendezvous,
    Slot,
    SlotState,
    SlotTask,
    close_server,
    find_rendezvous,
    look_up,
    open_server,
    own_ip,
)
from cordee.communication.channel import Received, ServerChannel
from cordee.communication.messages import Refused
from cordee.core import Job, env
from cordee.core.errors import CommunicationError, CordeeError, JobError
from cordee.core.findings import Finding
from cordee.core.interrupts import INTERRUPTED, InterruptFlag
from cordee.core.launchers import LaunchedTask

HOLD_S = 0.25  # that a slot waits for an answer, if there is nothing to do
TICK_S = 0.02
SILENT_S = 10.0  # without a message of a slot, after which its agent counts as ended
MISSING_S = 120.0  # for a slot to be there for an agent
LEAVE_AFTER_S = 2.0  # that a slot which was asked to end stays: rank 0, asked as well, ends the run
CLOSE_S = 5.0  # for slots to end their agents
LAST_S = 20.0  # for all slots to hear that the run is over; rank 0 may have failed before the others were there
CHECK_S = 60.0  # that `cordee doctor` waits for all processes
FAILED = 1  # exit code of ranks above 0 when rank 0 was lost, or failed


def make_source(request: EngineRequest) -> EnvironmentSource:
    """Return the processes of this launch, as seen by its rank 0. Raises JobError."""
    task = env.launched_task()
    if request.num_slots > task.world_size:
        raise JobError(
            f"the job has {request.num_slots} workers, and {task.launcher} started {task.world_size} processes: set "
            f"strategy.workers = {task.world_size}, or start {request.num_slots} processes"
        )
    if request.job.cluster.address:
        raise JobError(
            f"cluster.address = {request.job.cluster.address!r} is not for the engine env, which listens at "
            "MASTER_ADDR or at the first host that the scheduler lists: remove it"
        )
    return EnvironmentSource(_launch or Launch(find_rendezvous(task)), is_owner=_launch is None)


def work_as_agent(job: Job) -> int | None:
    """Be a slot of the launch until its run ends; return the exit code. Returns None in rank 0, the launcher.

    Prints nothing but errors. Ctrl-C and SIGTERM leave the decision to rank 0, which most likely gets them too; if it
    does not, the worker here leaves after its step. A second signal ends this process at once.
    """
    task = env.launched_task()
    if task.rank == 0:
        return None
    connection = Connection(find_rendezvous(task))
    try:
        with InterruptFlag(lambda: None) as flag:
            return Slot(task, connection.ask).serve(flag)
    except CommunicationError as error:
        sys.stderr.write(f"cordee: {error}\n")
        return FAILED
    finally:
        connection.close()


@contextlib.contextmanager
def lead_launch() -> Iterator[Callable[[int], None]]:
    """In rank 0: inside, the other processes of the launch are heard. Leaving has them exit.

    They exit with the code that the function is given which this yields, or with that of the error that ends the block:
    a scheduler that starts failed processes again then starts all of them, and not only rank 0.
    """
    global _launch
    code = 0

    def set_code(new: int) -> None:
        nonlocal code
        code = new

    if _launch is not None:
        yield set_code
        return
    _launch = Launch(find_rendezvous(env.launched_task()))
    try:
        yield set_code
    except BaseException as error:
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)
        raise
    finally:
        _launch.close(code)
        _launch = None


def place_run(job: Job, run_dir: Path | None, resume: bool) -> tuple[Path | None, bool]:
    """Return the run directory and whether to resume, by what the scheduler says of this start.

    A job that is started again continues its run: in --run-dir, or in the directory that has its id in its name.
    Raises JobError if it was started again, and the directory cannot be known.
    """
    task = env.launched_task()
    is_again = bool(task.restart_count)
    if resume:
        return run_dir, True
    if run_dir is None and task.job_id:
        run_dir = env.runs_folder() / f"{job.name}-{task.job_id}"
        # Where starts are not counted, the directory is there at the second.
        is_again = is_again or task.restart_count is None
    if run_dir is None:
        if is_again:
            raise JobError(
                f"{task.launcher} has started this job again (for the {task.restart_count}th time), and nothing says "
                "which run to continue: give --run-dir, or set CORDEE_JOB_ID to an id of the job"
            )
        return None, False
    # On another host the directory is not there, and the storage has the run.
    return run_dir, is_again and ((run_dir / "job.toml").is_file() or is_stored(job.checkpoint.storage, run_dir))


class _SlotRecord(msgspec.Struct):
    """What rank 0 knows of a slot."""

    incarnation: int
    host: str
    heard_s: float
    order: AgentOrder | None = None  # that it was given, and has not finished
    leaving_since_s: float | None = None
    is_told: bool = False  # that the run is over


class Slots:
    """The slots of a launch, and the agents that wait for one. Decides without I/O; the clock is passed in."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._records: dict[int, _SlotRecord] = {}  # by rank
        self._queue: dict[int, tuple[AgentOrder, float]] = {}  # by number, with the time it was asked for
        self._stopped: set[int] = set()  # agents that are not needed any more
        self._ended: list[AgentEnded] = []
        self._reported: set[int] = set()
        self._seen: set[int] = set()  # ranks
        self._code: int | None = None  # the run is over: what slots exit with
        self.versions = Versions.here()

    def ask(self, order: AgentOrder, now_s: float) -> None:
        self._queue[order.number] = (order, now_s)

    def stop(self, number: int) -> None:
        self._queue.pop(number, None)
        self._stopped.add(number)

    def finish(self, code: int) -> None:
        self._queue.clear()
        self._code = code

    @property
    def has_agents(self) -> bool:
        """Whether a slot has an agent, as far as is known."""
        return any(record.order is not None for record in self._records.values())

    @property
    def is_everybody_told(self) -> bool:
        """Whether each slot knows that the run is over, but for those that were lost before."""
        return len(self._seen) == self._world_size and all(record.is_told for record in self._records.values())

    def take_ended(self, now_s: float) -> list[AgentEnded]:
        """Return the agents that have ended since this was last asked."""
        for rank, record in list(self._records.items()):
            if now_s - record.heard_s > SILENT_S:
                self._end(record, f"rank {rank} on {record.host} was not heard of for {now_s - record.heard_s:.0f} s")
                del self._records[rank]
        for number, (_, asked_s) in list(self._queue.items()):
            if now_s - asked_s > MISSING_S:
                del self._queue[number]
                self._report(number, self._describe_missing())
        ended, self._ended = self._ended, []
        return ended

    def _describe_missing(self) -> str:
        missing = sorted(set(range(self._world_size)) - self._records.keys())
        if not missing:
            return "all processes of the launch have an agent"
        listed = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return f"nothing was heard of rank {listed} within {MISSING_S:g} s: what they print says why"

    def handle(self, state: SlotState, incarnation: int, now_s: float, *, is_stopping: bool) -> SlotTask | Refused:
        """Return what a slot is to do. `is_stopping`: rank 0 was asked to end as well."""
        if state.versions != self.versions:
            return Refused(
                "version",
                f"rank {state.rank} on {state.host} has {state.versions.describe()}, rank 0 has "
                f"{self.versions.describe()}: install the same versions everywhere",
            )
        record = self._records.get(state.rank)
        if record is None or record.incarnation != incarnation:
            if record is not None:
                self._end(record, f"rank {state.rank} on {record.host} was started again")
            record = self._records[state.rank] = _SlotRecord(incarnation, state.host, now_s)
            self._seen.add(state.rank)
        record.heard_s = now_s
        if record.order is not None and state.ended == record.order.number:
            self._end(record, state.how)
        if state.is_leaving and record.leaving_since_s is None:
            record.leaving_since_s = now_s
        if self._code is not None:
            record.is_told = True
            return SlotTask("over", code=self._code)
        must_leave = record.leaving_since_s is not None and (
            not is_stopping and now_s - record.leaving_since_s > LEAVE_AFTER_S
        )
        if record.order is None and must_leave:
            del self._records[state.rank]
            return SlotTask("over", code=INTERRUPTED)
        if record.order is None and self._queue and record.leaving_since_s is None:
            number = next(iter(self._queue))
            record.order, _ = self._queue.pop(number)
        if record.order is None:
            return SlotTask("wait")
        if state.agent == record.order.number:
            return SlotTask("stop" if must_leave or state.agent in self._stopped else "wait")
        if record.order.number in self._stopped:  # before it began
            self._end(record, "")
            return SlotTask("wait")
        return SlotTask("start", record.order.to_text())

    def _end(self, record: _SlotRecord, how: str) -> None:
        if record.order is not None:
            self._report(record.order.number, how)
            record.order = None

    def _report(self, number: int, how: str) -> None:
        if number not in self._reported:
            self._reported.add(number)
            self._ended.append(AgentEnded(number, how))


class SlotServer:
    """Hears the slots of other ranks in a thread, and has a function answer them."""

    def __init__(self, rendezvous: Rendezvous, slots: Slots) -> None:
        self._rendezvous = rendezvous
        self._slots = slots
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._has_been_stopped = False
        self._asked: dict[int, tuple[Received, SlotState, float]] = {}  # by rank: not answered yet
        self._channel: ServerChannel = open_server(rendezvous)
        self._thread = threading.Thread(target=self._serve, name="cordee-slots", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def lock(self) -> threading.Lock:
        """Held while the slots are looked at or changed."""
        return self._lock

    @property
    def has_been_stopped(self) -> bool:
        """Whether Ctrl-C or SIGTERM has reached this process."""
        self._has_been_stopped |= InterruptFlag.any_raised
        return self._has_been_stopped

    def exchange(self, state: SlotState, incarnation: int) -> SlotTask:
        """Answer the slot of this process, which waits if there is nothing to do."""
        deadline_s = time.monotonic() + HOLD_S
        while True:
            with self._lock:
                told = self._slots.handle(state, incarnation, time.monotonic(), is_stopping=self.has_been_stopped)
            assert isinstance(told, SlotTask), told  # the versions are those of this process
            if told.action != "wait" or time.monotonic() > deadline_s:
                return told
            time.sleep(TICK_S)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            received = self._channel.receive(TICK_S)
            while received is not None:
                if isinstance(received.message, SlotState):
                    self._asked[received.message.rank] = (received, received.message, time.monotonic())
                received = self._channel.receive(0.0)
            self._answer()

    def _answer(self) -> None:
        for rank, (received, state, asked_s) in list(self._asked.items()):
            now_s = time.monotonic()
            with self._lock:
                told = self._slots.handle(state, state.start, now_s, is_stopping=self.has_been_stopped)
            if isinstance(told, SlotTask) and told.action == "wait" and now_s - asked_s < HOLD_S:
                continue
            del self._asked[rank]
            try:
                self._channel.reply(received, told)
            except CommunicationError:
                continue  # it asks again when it is back

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        close_server(self._rendezvous, self._channel)


class Launch:
    """The processes of a launch, of which this is rank 0: heard from its beginning to its end."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.task = rendezvous.task
        self.slots = Slots(rendezvous.task.world_size)
        self.server = SlotServer(rendezvous, self.slots)
        incarnation = time.time_ns()
        own = Slot(rendezvous.task, lambda state: self.server.exchange(state, incarnation))
        self._own = threading.Thread(target=own.serve, args=(lambda: False,), name="cordee-own-slot", daemon=True)
        self._own.start()

    def close(self, code: int) -> None:
        """Have all processes exit with this code."""
        with self.server.lock:
            self.slots.finish(code)
        self._own.join(CLOSE_S)
        self.wait_until(lambda: self.slots.is_everybody_told, LAST_S)
        self.server.close()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float = CLOSE_S) -> None:
        """Wait until slots have done something, or the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self.server.lock:
                if is_done():
                    return
            time.sleep(TICK_S)


_launch: Launch | None = None  # of this process


class EnvironmentSource(AgentSource):
    """The processes of a launch as a source of agents."""

    name = "env"

    def __init__(self, launch: Launch, *, is_owner: bool) -> None:
        """The owner of the launch ends it as well."""
        self._launch = launch
        self._is_owner = is_owner
        self._started: set[int] = set()

    def describe(self) -> str:
        return self._launch.task.describe()

    def capacity(self) -> Capacity:
        task = self._launch.task
        return Capacity(slots_by_host(task), is_limit=True, address="" if task.is_one_host else own_ip(task))

    def start(self, order: AgentOrder) -> None:
        self._started.add(order.number)
        with self._launch.server.lock:
            self._launch.slots.ask(order, time.monotonic())

    def ended(self) -> Sequence[AgentEnded]:
        with self._launch.server.lock:
            return self._launch.slots.take_ended(time.monotonic())

    def stop(self, number: int) -> None:
        with self._launch.server.lock:
            self._launch.slots.stop(number)

    def close(self) -> None:
        for number in self._started:
            self.stop(number)
        self._launch.wait_until(lambda: not self._launch.slots.has_agents)
        if self._is_owner:
            self._launch.close(0)


def slots_by_host(task: LaunchedTask) -> dict[str, int]:
    """Return how many processes each host has, as far as the launcher says."""
    if task.tasks_by_host:
        return dict(task.tasks_by_host)
    others = task.world_size - task.tasks_per_host
    return {task.host: task.tasks_per_host, **({"other hosts": others} if others else {})}


def check() -> Iterable[Finding]:
    """Say what is wrong with this launch before a run: started like the run, in all processes.

    Rank 0 listens as in a run; the others connect, and look whether they see a file in the folder of runs.
    """
    try:
        task = env.launched_task()
    except JobError as error:
        yield Finding("launcher", "problem", str(error))
        return
    yield Finding("launcher", "ok", f"{task.describe()}, rank {task.rank}")
    if not task.job_id:
        detail = f"{task.launcher} gives no id that stays when the job is started again"
        yield Finding("job id", "note", detail, "set CORDEE_JOB_ID, or give --run-dir, to have it resume by itself")
    else:
        yield Finding("job id", "ok", task.job_id)
    try:
        rendezvous = find_rendezvous(task)
        yield Finding("secret", "ok", "given" if rendezvous.secret else "not needed on one host")
        if not task.is_one_host:
            yield Finding("host of rank 0", "ok", f"{task.first_host} ({look_up(task.first_host)})")
        yield from _check_as_first(rendezvous) if task.rank == 0 else _check_as_other(rendezvous)
    except CordeeError as error:
        yield Finding("launch", "problem", str(error))


def _check_as_other(rendezvous: Rendezvous) -> Iterable[Finding]:
    connection = Connection(rendezvous, find_timeout_s=CHECK_S)
    try:
        Slot(rendezvous.task, connection.ask).serve(lambda: False)
    finally:
        connection.close()
    yield Finding("rank 0", "ok", "reached")


def _check_as_first(rendezvous: Rendezvous) -> Iterable[Finding]:
    folder = env.runs_folder()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    marker, content = folder / f".cordee-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
    marker.write_text(content)
    task = rendezvous.task
    found = _LookingSlots(task.world_size, str(marker.absolute()))
    try:
        server = SlotServer(rendezvous, found)
        try:
            yield Finding("listening", "ok", server.address)
            deadline_s = time.monotonic() + CHECK_S
            while len(found.states) < task.world_size - 1 and time.monotonic() < deadline_s:
                time.sleep(TICK_S)
        finally:
            server.close()
    finally:
        marker.unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
    for rank in range(1, task.world_size):
        state, subject = found.states.get(rank), f"rank {rank}"
        if state is None:
            remedy = f"it must reach {server.address}; what it prints says why it does not"
            yield Finding(subject, "problem", f"has not connected within {CHECK_S:g} s", remedy)
        elif state.versions != found.versions:
            detail = f"{state.host} has {state.versions.describe()}, rank 0 {found.versions.describe()}"
            yield Finding(subject, "problem", detail, "install the same versions everywhere")
        elif state.seen != content:
            detail = f"{state.host} does not see the folder of runs, {folder.absolute()}"
            remedy = "training works without; a job that is started again elsewhere needs shared runs or storage"
            yield Finding(subject, "note", detail, remedy)
        else:
            yield Finding(subject, "ok", f"{state.host}, {state.versions.describe()}, sees the folder of runs")


class _LookingSlots(Slots):
    """Has each slot look for a file, and then lets it go."""

    def __init__(self, world_size: int, marker: str) -> None:
        super().__init__(world_size)
        self.states: dict[int, SlotState] = {}
        self._marker = marker

    def handle(self, state: SlotState, incarnation: int, now_s: float, *, is_stopping: bool) -> SlotTask | Refused:
        if state.versions != self.versions:
            self.states[state.rank] = state
            return super().handle(state, incarnation, now_s, is_stopping=is_stopping)
        if not state.seen:
            return SlotTask("look", self._marker)
        self.states[state.rank] = state
        return SlotTask("over")
