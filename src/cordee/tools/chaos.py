"""`cordee chaos`: trains a job while real faults hit its workers, then proves from its events that all is well."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from cordee.cluster.control import scale_run
from cordee.cluster.processes import is_alive
from cordee.core import Job, env, fault_points
from cordee.core.errors import CordeeError, JobError, StorageError, TrainingError, nearest
from cordee.core.findings import Finding
from cordee.monitoring import AnyEvent, UnreadableLine, events, follow
from cordee.monitoring.jsonl import append_event
from cordee.monitoring.run_directory import JOB_FILE
from cordee.tools.audit import audit_run

START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 180.0  # for the next step that is reported, after a fault
END_TIMEOUT_S = 180.0
SCALE_TIMEOUT_S = 10.0  # for the coordinator to receive it
HARM_S = 2.0  # how long a worker is slow or cut off, or its disk full
MANY_RESTARTS = 100_000
COORDINATOR = "coordinator"


class Fault(NamedTuple):
    """One thing to do to a worker, `at_s` seconds after the faults begin."""

    at_s: float
    kind: str
    chance: float  # from 0 to 1: which worker


class Outcome(msgspec.Struct, frozen=True):
    """What became of the run."""

    faults: list[str]
    seconds: float  # with faults
    samples_per_second: float
    calm_samples_per_second: float | None  # before and after the faults
    recoveries: int
    steps_redone: int
    slowest_recovery_s: float
    findings: list[Finding]

    @property
    def is_sound(self) -> bool:
        return all(finding.state != "problem" for finding in self.findings)


def train_command(job_file: Path, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains a job with as many replacements as it takes."""
    settings = [f"cluster.max_restarts={MANY_RESTARTS}", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "cordee", "train", str(job_file), "--run-dir", str(run_dir), "-q", *options]


def plan_faults(kinds: Sequence[str], *, every_s: float, for_s: float, seed: int) -> list[Fault]:
    """Return what happens when; the same for the same seed. Raises JobError for a fault that is not known."""
    for kind in kinds:
        if kind not in FAULTS:
            raise JobError(f"no fault '{kind}'{nearest(kind, FAULTS)} (known: {', '.join(FAULTS)})")
    if not kinds or every_s <= 0 or for_s <= 0:
        raise JobError("cordee chaos needs at least one fault, and times longer than nothing")
    chance = random.Random(seed)
    times = [every_s * (number + 1) for number in range(int(for_s / every_s))]
    return [Fault(at_s, chance.choice(list(kinds)), chance.random()) for at_s in times if at_s < for_s]


def aim(places: Sequence[str], action: str) -> list[fault_points.Fault]:
    """Return the faults at named places, `POINT[:PROCESS[:VISIT]]` each. Raises JobError for what is not known.

    Without a process it is the first that passes; without a visit its first.
    """
    known: tuple[str, ...] = typing.get_args(fault_points.Attack)
    if action not in known:
        raise JobError(f"no action '{action}'{nearest(action, known)} (known: {', '.join(known)})")
    faults = []
    for place in places:
        point, _, rest = place.partition(":")
        process, _, visit = rest.partition(":")
        if point not in fault_points.POINTS:
            raise JobError(f"no fault point '{point}'{nearest(point, fault_points.POINTS)} (cordee chaos --points)")
        if process and not fault_points.is_process(process):
            names = fault_points.PROCESSES
            hint = f"{nearest(process, names)} (known: {', '.join(names)}, *)"
            raise JobError(f"--at {place}: no process '{process}'{hint}")
        if "launcher" in (process, fault_points.POINTS[point].partition(":")[0]):
            raise JobError(f"--at {place}: the launcher is the command itself, the run ends with it")
        if visit and not (visit.isdecimal() and int(visit)):
            raise JobError(f"--at {place}: '{visit}' is not the number of a visit, which is 1 or more")
        faults.append(
            fault_points.Fault(point, process or "*", typing.cast(fault_points.Action, action), int(visit or 1))
        )
    return faults


def run_with_faults(
    command: Sequence[str],
    run_dir: Path,
    faults: Sequence[Fault],
    *,
    for_s: float,
    calm_s: float = 0.0,
    aimed: Sequence[fault_points.Fault] = (),
    lose_messages: float = 0.0,
    say: Callable[[str], None],
) -> Outcome:
    """Start a run and let the faults happen for `for_s` seconds, then end and check it.

    Nothing happens to it for half of `calm_s` before, from its first step on, and for the other half after. Those that
    are `aimed` at fault points happen when a process gets there, from its start on. Of the messages between workers and
    parameter servers, the share `lose_messages` is lost or late all the time. Raises TrainingError if the run
    fails, does not end when it is asked to, or does not pass a point.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cordee-") as place,
        _training(command, Path(place), aimed, lose_messages) as process,
    ):
        seen = Seen(run_dir)
        _await_first_step(process, seen)
        calm = [(time.time(), time.time() + calm_s / 2)]
        _sleep_until(time.monotonic() + calm_s / 2, process)
        began, started_s = time.time(), time.monotonic()
        happened = []
        for fault in faults:
            _sleep_until(started_s + fault.at_s, process)
            if process.poll() is not None:
                break
            victim = _victim(seen, fault)
            if victim is not None:
                say(f"{fault.at_s:6.1f} s  {fault.kind} {victim.name} (pid {victim.pid})")
                _record(run_dir, events.Fault(fault=fault.kind, target=victim.name))
                FAULTS[fault.kind](victim)
                happened.append(fault.kind)
                _await_step(process, seen, fault)
        if aimed and not faults:
            _await_aimed(process, seen, Path(place), aimed, started_s + for_s)
        else:
            _sleep_until(started_s + for_s, process)
        if aimed and process.poll() is None:
            for point, at in fault_points.happened_at(Path(place)):
                _record(run_dir, events.Fault(time=at, fault=point.action, target=f"at {point.point}"))
        ended = time.time()
        _sleep_until(time.monotonic() + calm_s / 2, process)
        calm.append((ended, time.time()))
        _end(process)
        happened += _check_aimed(Path(place), aimed, say)
    found = seen.refresh().events
    recoveries = [event for event in found if isinstance(event, events.Recovery)]
    return Outcome(
        faults=happened,
        seconds=ended - began,
        samples_per_second=samples_per_second(found, [(began, ended)]),
        calm_samples_per_second=samples_per_second(found, calm) if calm_s else None,
        recoveries=len(recoveries),
        steps_redone=sum(event.steps_redone for event in recoveries),
        slowest_recovery_s=max((event.seconds for event in recoveries), default=0.0),
        findings=audit_run(run_dir),
    )


def samples_per_second(found: Sequence[AnyEvent], spans: Sequence[tuple[float, float]]) -> float:
    """Return how many samples were trained on per second in these spans of time, by the steps that were reported.

    Between two reports as many are taken to be done in each moment. Steps that were done again count once.
    """
    times: list[float] = []
    samples: list[int] = []
    for event in found:
        if not isinstance(event, events.Step | events.Commit) or event.samples is None:
            continue
        if not samples or event.samples > samples[-1]:
            times.append(max([event.time, *times[-1:]]))  # workers have clocks of their own
            samples.append(event.samples)
    if not times:
        return 0.0
    counted = sum(_interpolate(end, times, samples) - _interpolate(begin, times, samples) for begin, end in spans)
    return counted / sum(end - begin for begin, end in spans)


def _interpolate(at: float, times: Sequence[float], values: Sequence[float]) -> float:
    after = bisect.bisect_right(times, at)
    if after in (0, len(times)):
        return values[min(after, len(times) - 1)]
    share = (at - times[after - 1]) / (times[after] - times[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _record(run_dir: Path, fault: events.Fault) -> None:
    """Have the events of the run say what was done to it: the dashboard and the trace show it."""
    with contextlib.suppress(StorageError):  # the test is worth more than the record of it
        append_event(run_dir, events.stamp(fault, "chaos"))


class Victim(NamedTuple):
    name: str
    pid: int
    run_dir: Path


def _kill(victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGKILL)


def _freeze(victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGSTOP)


def _slow(victim: Victim) -> None:
    """Let the worker run for a tenth of the time only."""
    until_s = time.monotonic() + HARM_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(victim.pid, signal.SIGCONT)
            time.sleep(0.01)


def _fill_disk(victim: Victim) -> None:
    """Have the kernel refuse what the worker writes to files, as a full disk would."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(victim.pid)
        before = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        time.sleep(HARM_S)
        process.rlimit(resource.RLIMIT_FSIZE, before)


def _partition(victim: Victim) -> None:
    """Have the kernel drop what goes over the worker's connections."""
    cut_off(victim.pid, HARM_S)


def _leave(victim: Victim) -> None:
    """Tell the worker to go, and ask for as many as the job has."""
    os.kill(victim.pid, signal.SIGTERM)
    time.sleep(HARM_S)
    num_workers = Job.load(victim.run_dir / JOB_FILE).strategy.workers
    deadline_s = time.monotonic() + SCALE_TIMEOUT_S
    while True:
        try:
            scale_run(victim.run_dir, num_workers)
        except CordeeError:  # a coordinator may be on its way back
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.1)
        else:
            return


FAULTS: dict[str, Callable[[Victim], None]] = {
    "kill": _kill,
    "freeze": _freeze,
    "slow": _slow,
    "full-disk": _fill_disk,
    "partition": _partition,
    COORDINATOR: _kill,
    "leave": _leave,
}


def _await_aimed(
    process: subprocess.Popen[str],
    seen: Seen,
    place: Path,
    aimed: Sequence[fault_points.Fault],
    deadline_s: float,
) -> None:
    """Wait until all have happened, and a step was taken after the last."""
    while process.poll() is None and time.monotonic() < deadline_s:
        if len(fault_points.happened(place)) == len(aimed):
            _await_step(process, seen, Fault(0.0, f"{aimed[-1].action} at {aimed[-1].point}", 0.0))
            return
        time.sleep(0.05)


def _check_aimed(place: Path, aimed: Sequence[fault_points.Fault], say: Callable[[str], None]) -> list[str]:
    if not aimed:
        return []
    happened = fault_points.happened(place)
    for fault in aimed:
        if fault not in happened:
            who = "nobody" if fault.process == "*" else f"{fault.process} never"
            raise TrainingError(f"{who} passed the fault point {fault.point} for the {fault.visit}. time")
        say(f"{fault.action} at {fault.point}: {fault_points.POINTS[fault.point]}")
    return [fault.action for fault in happened]


@contextlib.contextmanager
def _training(
    command: Sequence[str], place: Path, aimed: Sequence[fault_points.Fault], lose_messages: float
) -> Iterator[subprocess.Popen[str]]:
    asked = fault_points.ask_for(place, aimed) if aimed else {}
    environment = env.child_environment(asked | fault_points.ask_to_lose(lose_messages))
    with tempfile.TemporaryFile("w+") as stderr:  # a pipe that nobody reads would fill up in a long run
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, env=environment)
        process.stderr = stderr
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


class Seen:
    """What the events of a run have said so far. `refresh` reads only what is new."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._offset = 0
        self.events: list[AnyEvent] = []
        self.workers: dict[int, int] = {}  # their processes
        self.coordinator = 0  # its process
        self.samples = 0
        self.last_step_time = 0.0  # or of a recovery

    def refresh(self) -> Seen:
        new, self._offset = follow(self.run_dir, self._offset)
        for event in new:
            match event:
                case UnreadableLine():
                    continue
                case events.Step(samples=int(samples)) | events.Commit(samples=samples):
                    self.samples = max(self.samples, samples)
                case events.WorkerStarted(role="worker", worker=worker, pid=pid):
                    self.workers[worker] = pid
                case events.CoordinatorStarted(pid=pid):
                    self.coordinator = pid
            if isinstance(event, events.Step | events.Recovery):
                self.last_step_time = max(self.last_step_time, event.time)
            self.events.append(event)
        return self


def _victim(seen: Seen, fault: Fault) -> Victim | None:
    seen.refresh()
    if fault.kind == COORDINATOR:
        return Victim("", seen.coordinator, seen.run_dir) if seen.coordinator and is_alive(seen.coordinator) else None
    workers = sorted((worker, pid) for worker, pid in seen.workers.items() if is_alive(pid))
    if not workers:
        return None
    worker, pid = workers[int(fault.chance * len(workers))]
    return Victim(f"worker {worker}", pid, seen.run_dir)


def _await_first_step(process: subprocess.Popen[str], seen: Seen) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while seen.refresh().samples == 0:
        if process.poll() is not None:
            raise TrainingError(f"the run ended before its first step: {_last_output(process)}")
        if time.monotonic() > deadline_s:
            raise TrainingError(f"the run took no step within {START_TIMEOUT_S:g} s")
        time.sleep(0.1)


def _await_step(process: subprocess.Popen[str], seen: Seen, fault: Fault) -> None:
    """Wait until training has continued. On a busy machine that may take longer than it is to the next fault, and a
    step that workers are lost in again and again is given up, rightly.
    """
    happened, deadline_s = time.time(), time.monotonic() + STEP_TIMEOUT_S
    while process.poll() is None and seen.refresh().last_step_time <= happened:
        if time.monotonic() > deadline_s:
            raise TrainingError(f"no step was taken within {STEP_TIMEOUT_S:g} s of '{fault.kind}' at {fault.at_s:g} s")
        time.sleep(0.1)


def _sleep_until(moment_s: float, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and time.monotonic() < moment_s:
        time.sleep(min(0.1, max(0.0, moment_s - time.monotonic())))


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the run to end, unless it has; raise if it failed or hangs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        left = ", ".join(_describe(one) for one in [psutil.Process(process.pid), *_family(process.pid)])
        raise TrainingError(
            f"the run did not end within {END_TIMEOUT_S:g} s of being asked to; its processes: {left}"
        ) from None
    if process.returncode not in (0, 130):
        raise TrainingError(f"the run failed: {_last_output(process)}")


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({process.name()}, {process.status()})"
    return f"{process.pid} (gone)"


def _last_output(process: subprocess.Popen[str]) -> str:
    process.wait()
    assert process.stderr is not None
    process.stderr.seek(0)
    return process.stderr.read().strip().removeprefix("cordee: ") or f"exit code {process.returncode}"


# A network that does not get through: a socket filter that lets nothing pass is put onto both ends of every connection
# of a process, from outside, through copies of their descriptors (pidfd_getfd, Linux 5.6). TCP sends again what was
# dropped, and delivers it when the line is back: as behind a broken switch. Shared memory is not touched.

_PIDFD_GETFD = 438  # on all architectures
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: keep 0 bytes of the packet


def cut_off(pid: int, seconds: float) -> int:
    """Let nothing through between a process and those it is connected to; return how many connections that were.

    Returns after `seconds`, with everything as before. Raises JobError where the kernel does not permit it.
    """
    with contextlib.ExitStack() as ends:
        cut = [ends.enter_context(_silenced(owner, fd)) for owner, fd in _both_ends(pid)]
        time.sleep(seconds)
    return sum(cut) // 2


def _both_ends(pid: int) -> list[tuple[int, int]]:
    """Return process and descriptor of each end of the established TCP connections of a process."""
    known = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED and c.pid]
    own = {(c.laddr, c.raddr) for c in known if c.pid == pid}
    return [(c.pid, c.fd) for c in known if (c.laddr, c.raddr) in own or (c.raddr, c.laddr) in own]


@contextlib.contextmanager
def _silenced(pid: int, fd: int) -> Iterator[bool]:
    """Inside, a socket of another process receives nothing. Gives whether there is such a socket."""
    number = _copy_descriptor(pid, fd)
    if number is None:
        yield False
        return
    with socket.socket(fileno=number) as copy:
        program = ctypes.create_string_buffer(_RETURN_NOTHING)
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
        try:
            yield True
        finally:
            copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _copy_descriptor(pid: int, fd: int) -> int | None:
    """Return a descriptor of our own for that of another process; None if one of the two is gone."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        number: int = library.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    problem = ctypes.get_errno()
    if number < 0 and isinstance(OSError(problem, ""), PermissionError):
        raise JobError(
            f"the kernel does not let us reach the sockets of process {pid} (pidfd_getfd: {os.strerror(problem)}): "
            "leave 'partition' out of --faults, or run as root"
        )
    return number if number >= 0 else None
