"""The trials of a fault walk: where each point is passed, what is tried there, in which order; and its command line."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from fault_trials import Result, Walker

from cordee.core.fault_points import Action, Fault
from warm_launch import WarmServer


class Place(NamedTuple):
    """Where a point is passed, and which visits are tried there."""

    scenario: str
    process: str
    visits: tuple[int, ...] = (1,)


class Walk(NamedTuple):
    """How a point is walked. `error` is tried where an operation stands that can fail."""

    places: tuple[Place, ...]
    actions: tuple[Action, ...] = ("kill", "freeze", "error")
    ends_early: tuple[Action, ...] = ()  # after these the run may end with a saved state, and is resumed
    loses_updates: tuple[tuple[str, Action], ...] = ()  # scenarios and actions after which nobody has all updates


DEATHS: tuple[Action, ...] = ("kill", "freeze")


def of(scenario: str, process: str, *visits: int) -> Place:
    return Place(scenario, process, visits or (1,))


class Case(NamedTuple):
    """One trial of the walk."""

    scenario: str
    fault: Fault
    may_end_early: bool
    loses_updates: bool

    @property
    def name(self) -> str:
        fault = self.fault
        return f"{fault.point}-{fault.process}-{fault.visit}-{fault.action}-{self.scenario.replace(' ', '_')}"


def cases(walk: Mapping[str, Walk]) -> Iterator[Case]:
    """Yield every trial."""
    for point, way in walk.items():
        for place in way.places:
            for visit in place.visits:
                for action in way.actions:
                    yield Case(
                        place.scenario,
                        Fault(point, place.process, action, visit),
                        may_end_early=action in way.ends_early,
                        loses_updates=(place.scenario, action) in way.loses_updates,
                    )


def sample(chosen: Iterable[Case]) -> list[Case]:
    """Return one of the trials for each point: its first place and visit, killed there."""
    first: dict[str, Case] = {}
    for case in chosen:
        if case.fault.action == "kill":
            first.setdefault(case.fault.point, case)
    return list(first.values())


def spread(chosen: Iterable[Case]) -> list[Case]:
    """Order trials: each action at each point once, then each a second time, and so on; a walk that is broken off has
    been everywhere.
    """
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for case in chosen:
        key = (case.fault.point, case.fault.action)
        turns.append((seen[key], case))
        seen[key] += 1
    return [case for _, case in sorted(turns, key=lambda turn: turn[0])]


def walk_all(walker: Walker, chosen: Iterable[Case], num_at_once: int = 2) -> Iterator[Result]:
    """Try each case; yield the results as they come."""
    chosen = list(chosen)
    walker.prepare({case.scenario for case in chosen})
    with ThreadPoolExecutor(num_at_once) as pool:
        yield from pool.map(
            lambda case: walker.try_fault(
                case.scenario, case.fault, may_end_early=case.may_end_early, loses_updates=case.loses_updates
            ),
            chosen,
        )


class Walked:
    """The walker of a file's tests, and what they found."""

    def __init__(self, walker: Walker) -> None:
        self.walker, self.results = walker, list[Result]()

    def check(self, chosen: Iterable[Case]) -> None:
        """Try each case; fail with what did not hold."""
        found = list(walk_all(self.walker, chosen))
        self.results += found
        problems = [
            f"{result.scenario}: {result.fault}: {result.problem} ({result.folder})"
            for result in found
            if result.problem
        ]
        assert not problems, "\n".join(problems)


def main(
    description: str | None,
    makers: Mapping[str, Callable[[WarmServer, Path], Walker]],
    choose: Callable[[Walker], Iterable[Case]],
) -> int:
    """Try what the command line asks for, of the trials that `choose` gives for each strategy; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", choices=list(makers))
    parser.add_argument("--point", action="append", help="only this point; may be given several times")
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--action", action="append")
    parser.add_argument("--process", action="append")
    parser.add_argument("--sample", action="store_true", help="one trial for each point")
    parser.add_argument("--shuffle", type=int, help="try them in the random order of this seed")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--results", type=Path, help="lines of JSON; trials in it that held are skipped")
    parser.add_argument("--folder", type=Path, help="where trials that failed are kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fault-walk-"))
    started_s, num_tried, num_failed = time.monotonic(), 0, 0
    for strategy in options.strategy or makers:
        place = folder / strategy
        place.mkdir(parents=True, exist_ok=True)
        with WarmServer() as server:
            walker = makers[strategy](server, place)
            chosen = _select(strategy, choose(walker), options)
            for case, result in zip(chosen, walk_all(walker, chosen, options.at_once), strict=True):
                num_tried += 1
                num_failed += bool(result.problem)
                _report(case, result, options.results)
    print(f"{num_tried} trials, {num_failed} failed, {time.monotonic() - started_s:.0f} s")
    return 1 if num_failed else 0


def _select(strategy: str, chosen: Iterable[Case], options: argparse.Namespace) -> list[Case]:
    """Return the trials that the command line asks for and that have not held before, in their order."""
    selected = [
        case
        for case in (sample(chosen) if options.sample else chosen)
        if (not options.point or case.fault.point in options.point)
        and (not options.scenario or case.scenario in options.scenario)
        and (not options.action or case.fault.action in options.action)
        and (not options.process or case.fault.process in options.process)
    ] * options.repeat
    if options.results and options.results.exists():
        lines = options.results.read_bytes().splitlines()
        known = [result for line in lines if not (result := msgspec.json.decode(line, type=Result)).problem]
        done = {(result.scenario, result.fault) for result in known if result.strategy == strategy}
        selected = [case for case in selected if (case.scenario, case.fault) not in done]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(selected)
    return spread(selected)


def _report(case: Case, result: Result, results: Path | None) -> None:
    state = "FAILED" if result.problem else "ok"
    print(f"{state:6} {result.seconds:6.1f} s  {result.strategy} {case.name}", flush=True)
    if result.problem:
        print(f"       {result.problem}\n       {result.folder}", flush=True)
    if results:
        with results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
