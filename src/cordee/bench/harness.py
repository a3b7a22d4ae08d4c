"""What all benchmarks have in common: contestants in processes of their own, interleaving, raw figures, rows."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import multiprocessing
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from cordee.compute import usable_cores
from cordee.core import env
from cordee.core.errors import CordeeError, JobError
from cordee.planner.measurements import processor_name
from cordee.version import __version__

ANSWER_TIMEOUT_S = 300.0

_context = multiprocessing.get_context("forkserver")
Figure = TypeVar("Figure")


class Report(msgspec.Struct):
    """The outcome of a benchmark: where it ran, every raw figure, and the rows a person reads."""

    name: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    raw: dict[str, list[float]]  # contestant -> one figure per round, in the order measured
    unit: str
    rows: list[dict[str, Any]]


def describe_machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which JSON does not know
        "cordee": __version__,
    }


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names a case, all or the first of its parts between slashes; without any, yes."""
    return not patterns or any(
        fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}/*") for pattern in patterns
    )


def find_unknown(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return a pattern that names no case."""
    return next((one for one in patterns if not any(is_wanted(name, [one]) for name in names)), None)


def measure_cases(
    measures: Mapping[str, Callable[[], dict[str, list[float]]]],
    wanted: Sequence[str],
    earlier: Report | None,
    say: Callable[[str], None],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure the cases that are wanted; return the raw figures of these and of `earlier`, and when each was measured.

    The names of raw figures begin with their case: "CASE: FIGURE". Figures of a case that is measured again are
    replaced, so that a long benchmark can be measured in parts.
    """
    if (unknown := find_unknown(wanted, list(measures))) is not None:
        raise JobError(f"--cases {unknown!r} names no case: there are {', '.join(measures)}")
    raw = dict(earlier.raw) if earlier is not None else {}
    dates: dict[str, str] = dict(earlier.settings.get("measured", {})) if earlier is not None else {}
    for case, measure in measures.items():
        if not is_wanted(case, wanted):
            continue
        say(case)
        figures = measure()
        raw = {name: values for name, values in raw.items() if not name.startswith(f"{case}: ")}
        raw |= {f"{case}: {name}": values for name, values in figures.items()}
        dates[case] = describe_machine()["date"]
    return raw, dates


def interleave(
    contestants: Mapping[str, Callable[[], Figure]],
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
    *,
    warm_up: bool = True,
) -> dict[str, list[Figure]]:
    """Call every contestant once per round, starting each round with another, and return all figures.

    A first, uncounted call warms each of them up.
    """
    names = list(contestants)
    for name in names if warm_up else ():
        contestants[name]()
    raw: dict[str, list[Figure]] = {name: [] for name in names}
    started = time.perf_counter()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            raw[name].append(contestants[name]())
        say(f"round {index + 1} of {rounds} ({time.perf_counter() - started:.0f} s)")
    return raw


def medians(raw: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(figures) for name, figures in raw.items()}


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of our figure divided by theirs: drifts of the machine cancel out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def compare_speeds(figures: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each contestant: its speed, and how many times that of it `cordee` reaches."""
    return [
        {
            "contestant": name,
            "samples_per_second": statistics.median(speeds),
            "cordee_is_times": median_ratio(figures["cordee"], speeds),
        }
        for name, speeds in figures.items()
    ]


def goal_outcome(is_reached: bool) -> str:
    return "reached" if is_reached else "MISSED"


class Place(NamedTuple):
    """A process of a contestant, and where it meets the others."""

    rank: int
    size: int
    folder: str

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder}/rendezvous"


class Processes:
    """`size` processes that run `main` with one kernel thread each, and a pipe to each of them.

    All stay in memory, with everything set up, and sleep while it is not their turn. So rounds can be short and many,
    and no start is measured.
    """

    def __init__(
        self, main: Callable[[Place, Connection], None], size: int, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="cordee-bench-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        port = free_port()
        for rank in range(size):
            ours, theirs = _context.Pipe()
            place = Place(rank, size, self._folder.name)
            process = _context.Process(target=_run, args=(main, place, theirs, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, question: Any) -> list[Any]:
        """Send `question` to all and return their answers. Raises CordeeError if one dies or does not answer."""
        for pipe in self._pipes:
            pipe.send(question)
        return self.answers()

    def answers(self) -> list[Any]:
        deadline = time.monotonic() + self._answer_timeout_s
        answers = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise CordeeError(f"a contestant did not answer within {self._answer_timeout_s:g} s")
                answers.append(pipe.recv())
            except EOFError:
                raise CordeeError("a process of a contestant died: its error is above") from None
        return answers

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


class Clock:
    """Called by a contestant's loop once a step; lets it run for a round and then waits for the next."""

    def __init__(self, pipe: Connection, num_steps: int) -> None:
        self._pipe, self._num_steps = pipe, num_steps
        self._left = 0
        self._started_s = 0.0
        self.busy_s = 0.0  # of this round, that a loop which knows it spent on computing

    def tick(self) -> None:
        if self._left == 0:  # set up, or at the end of a round
            if self._started_s:
                self._pipe.send((time.perf_counter() - self._started_s, self.busy_s))
            else:
                self._pipe.send("ready")
            self._pipe.recv()
            self._left = self._num_steps
            self.busy_s = 0.0
            self._started_s = time.perf_counter()
        self._left -= 1

    def wait_for(self, path: Path) -> None:
        """Wait until another process of the contestant has made a file, before the first tick."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise CordeeError(f"no {path.name} within {ANSWER_TIMEOUT_S:g} s")
            time.sleep(0.01)


# What a contestant does in each of its processes: loop for ever, telling the clock before each step.
Loop = Callable[[Place, Clock], None]


class Contestant(NamedTuple):
    """Processes that train: `size` of them run `loop`, with batches of `batch_size` each."""

    loop: Loop
    size: int
    num_steps: int  # of a round
    batch_size: int

    def train(self, place: Place, pipe: Connection) -> None:
        self.loop(place, Clock(pipe, self.num_steps))


def compete(
    contestants: Mapping[str, Contestant], rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the samples per second of each contestant in each round, and the share of the time that it was busy.

    Busy is what its loop told its clock.
    """
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(contextlib.closing(Processes(contestant.train, contestant.size)))
            for name, contestant in contestants.items()
        }
        for processes in running.values():
            processes.answers()  # that they are ready

        def take_round(name: str) -> tuple[float, float]:
            contestant, answers = contestants[name], running[name].ask("go")
            longest_s = max(elapsed_s for elapsed_s, _ in answers)
            samples = contestant.num_steps * contestant.batch_size * contestant.size
            return samples / longest_s, sum(busy_s for _, busy_s in answers) / (len(answers) * longest_s)

        found = interleave({name: lambda name=name: take_round(name) for name in running}, rounds, say)  # type: ignore[misc]
    speeds = {name: [speed for speed, _ in figures] for name, figures in found.items()}
    return speeds, {name: [share for _, share in figures] for name, figures in found.items()}


def run_apart(place: Place, clock: Clock, *, loop: Loop) -> None:
    """Run a loop as a process that is alone, whoever else does so at the same time."""
    folder = Path(place.folder) / f"alone-{place.rank}"
    folder.mkdir()
    loop(Place(0, 1, str(folder)), clock)


def _run(main: Callable[[Place, Connection], None], place: Place, pipe: Connection, port: int) -> None:
    env.adopt({"OMP_NUM_THREADS": "1"})
    if place.size > 1:  # peers find each other by it
        member = env.Place(place.rank, place.size, place.rank, place.size)
        env.adopt({**env.torchrun_environment(member, port), "NODE_RANK": "0"})
    torch.set_num_threads(1)
    with contextlib.chdir(place.folder):
        main(place, pipe)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
