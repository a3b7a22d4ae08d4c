"""The trials of a fault walk: where each point is passed, what is tried there, in which order; and its command line.

    PYTHONPATH=tests:tests/faults python -m walking [--results FOLDER] [...]    # all walks, one after the other

An option that this command does not know is for the walks. Called again for the same code, it continues where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from fault_trials import NOT_HAPPENED, Result, Walker

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
WALKS = ("fault_walk", "fault_walk_dispatched", "fault_walk_split", "fault_walk_script")
ROOT = Path(__file__).parents[2]


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


def draw(chosen: Iterable[Case], seed: int) -> list[Case]:
    """Return one of the trials for each point: of any place, visit and action, as `seed` has it."""
    by_point: dict[str, list[Case]] = {}
    for case in chosen:
        by_point.setdefault(case.fault.point, []).append(case)
    return [random.Random(f"{seed} {point}").choice(trials) for point, trials in by_point.items()]


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
        """Try each case; fail with what did not hold.

        A run that had ended before its fault was no trial: a busy machine starts a replacement too late. Once more,
        alone, it has to happen.
        """
        chosen = list(chosen)
        found = list(walk_all(self.walker, chosen))
        missed = [place for place, result in enumerate(found) if f"{NOT_HAPPENED}; exit code 0" in result.problem]
        for place, result in zip(missed, walk_all(self.walker, [chosen[place] for place in missed], 1), strict=True):
            found[place] = result
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
    parser.add_argument("--draw", type=int, help="one trial for each point, which this seed draws")
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
    if options.sample or options.draw is not None:
        chosen = sample(chosen) if options.sample else draw(chosen, options.draw)
    selected = [
        case
        for case in chosen
        if (not options.point or case.fault.point in options.point)
        and (not options.scenario or case.scenario in options.scenario)
        and (not options.action or case.fault.action in options.action)
        and (not options.process or case.fault.process in options.process)
    ] * options.repeat
    if options.results:
        lines = _lines(options.results)
        known = [result for line in lines if not (result := msgspec.json.decode(line, type=Result)).problem]
        done = {(result.scenario, result.fault) for result in known if result.strategy == strategy}
        selected = [case for case in selected if (case.scenario, case.fault) not in done]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(selected)
    return spread(selected)


def walk_everything() -> int:
    """Run every walk; return the exit code: 1 if a trial of this call failed, or a walk broke off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = (
        "where results and failed trials are kept (default: a folder in fault-walks/ for each state of the code)"
    )
    parser.add_argument("--results", type=Path, help=help_text)
    options, for_walks = parser.parse_known_args()
    folder = options.results or ROOT / "fault-walks" / _revision()
    folder.mkdir(parents=True, exist_ok=True)
    started_s, broken = time.monotonic(), []
    for walk in WALKS:
        print(f"{walk}: results in {folder / walk}.jsonl", flush=True)
        files = ["--results", str(folder / f"{walk}.jsonl"), "--folder", str(folder / walk)]
        if subprocess.run([sys.executable, "-m", walk, *files, *for_walks], check=False).returncode:
            broken.append(walk)
    for walk in WALKS:
        results = [msgspec.json.decode(line, type=Result) for line in _lines(folder / f"{walk}.jsonl")]
        failed = [result for result in results if result.problem]
        held = {(result.strategy, result.scenario, result.fault) for result in results if not result.problem}
        again = sum((result.strategy, result.scenario, result.fault) in held for result in failed)
        print(f"{walk}: {len(held)} trials held, {len(failed)} failed, of which {again} held when they were repeated")
        for result in failed:
            print(f"  {result.strategy}, {result.scenario}: {result.fault}: {result.problem} ({result.folder})")
    print(f"{time.monotonic() - started_s:.0f} s" + (f"; failed or broken off: {', '.join(broken)}" if broken else ""))
    return 1 if broken else 0


def _revision() -> str:
    """Return a name of the code as it is: what held for other code is tried again."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    untracked = [ROOT / name.decode() for name in git("ls-files", "-zo", "--exclude-standard").split(b"\0") if name]
    changes = git("diff", "HEAD") + b"".join(path.read_bytes() for path in untracked)
    head = git("rev-parse", "--short=12", "HEAD").decode().strip()
    return f"{head}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _report(case: Case, result: Result, results: Path | None) -> None:
    state = "FAILED" if result.problem else "ok"
    print(f"{state:6} {result.seconds:6.1f} s  {result.strategy} {case.name}", flush=True)
    if result.problem:
        print(f"       {result.problem}\n       {result.folder}", flush=True)
    if results:
        with results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    sys.exit(walk_everything())
