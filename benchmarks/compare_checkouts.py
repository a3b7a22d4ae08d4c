"""Compares two revisions of Cordée: whether they compute the same, and with --speed how fast.

    python benchmarks/compare_checkouts.py main                     main with HEAD
    python benchmarks/compare_checkouts.py v0.1.0 . --speed 5       a tag with the working tree, and their speed
    python benchmarks/compare_checkouts.py main --only own_loop --only overhead --speed 5

Both are exported into a temporary folder and run small fixed jobs through the command, the public Python API and the
files of the run directory, so that everything inside the package may have been moved. What is compared, and how
closely: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare.behaviour import Compared, compare_case
from compare.cases import CASES, Case
from compare.checkouts import Checkout, CheckoutError, check_out_both
from compare.comparing import describe_events, explain
from compare.speed import BENCHMARKS, SpeedError, Timed, measure


def main() -> int:
    arguments = _parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    benchmarks = [name for name in BENCHMARKS if arguments.speed and (not arguments.only or name in arguments.only)]
    compared: list[Compared] = []
    timed: dict[str, Timed] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="compare-checkouts-", ignore_cleanup_errors=True) as name:
            before, after = check_out_both(arguments.before, arguments.after, Path(name))
            print(f"before: {before.describe()}\nafter:  {after.describe()}\n", flush=True)
            try:
                _compare_behaviour(cases, before, after, Path(name), arguments.ignore_events, compared)
                if benchmarks:
                    measure(benchmarks, before, after, Path(name), arguments.speed, timed)
                    _print_speed(timed)
            finally:  # what an interrupted comparison has found is kept
                if arguments.results:
                    arguments.results.write_text(json.dumps(_as_json(before, after, compared, timed), indent=1) + "\n")
    except (CheckoutError, SpeedError) as error:
        print(f"compare_checkouts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_checkouts: interrupted", file=sys.stderr)
        return 130
    return _conclude(compared)


def _interrupt(number: int, frame: object) -> None:
    """End in order; a second Ctrl-C must not keep processes from being ended, which takes seconds."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parse() -> argparse.Namespace:
    known = [case.name for case in CASES]
    names = f"cases: {', '.join(known)}\n\nbenchmarks (with --speed): {', '.join(BENCHMARKS)}"
    codes = "exit codes: 0 same behaviour, 1 it differs or a case fails, 2 no comparison was possible, 130 Ctrl-C"
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"{names}\n\n{codes}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", help="a git revision, or the path of a checkout")
    parser.add_argument("after", metavar="AFTER", nargs="?", default="HEAD", help="the same; HEAD unless given")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this case or benchmark; may be repeated")
    parser.add_argument("--speed", metavar="ROUNDS", type=int, default=0, help="also measure, so many times in turn")
    parser.add_argument("--results", metavar="FILE", type=Path, help="write all outcomes and raw figures as JSON")
    parser.add_argument(
        "--ignore-events",
        metavar="TYPE,…",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="types of events whose change is intended",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.only or ()) - {*known, *BENCHMARKS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: there is no such case or benchmark\n{names}")
    if arguments.speed < 0:
        parser.error("--speed must be at least 1")
    return arguments


def _compare_behaviour(
    cases: list[Case],
    before: Checkout,
    after: Checkout,
    folder: Path,
    ignored_events: tuple[str, ...],
    compared: list[Compared],
) -> None:
    """Run the cases, print a line for each and add it to `compared`."""
    if not cases:
        return
    print(f"{'case':<30} {'behaviour':<10} {'before':>8} {'after':>8}")
    started_s = time.monotonic()
    for case in cases:
        found = compare_case(case, before, after, folder / case.name, ignored_events=ignored_events)
        compared.append(found)
        seconds = " ".join(f"{outcomes[0].seconds:>6.1f} s" for outcomes in (found.befores, found.afters))
        print(f"{case.name:<30} {_verdict(found):<10} {seconds}", flush=True)
        for difference in found.verdict.differences:
            print(f"    {explain(difference)}")
        if found.verdict.varying:
            print(f"    varies between runs of one checkout: {', '.join(found.verdict.varying)}")
        if failed := next((outcome for outcome in [*found.afters, *found.befores] if outcome.last_words), None):
            print("\n".join(f"    | {line}" for line in failed.last_words.splitlines()))
    print(f"{len(cases)} cases in {time.monotonic() - started_s:.0f} s\n", flush=True)


def _verdict(compared: Compared) -> str:
    if compared.verdict.differences:
        return "DIFFERS"
    if any(outcome.last_words for outcome in compared.befores):
        return "FAILS"  # in both, so that nothing was compared
    return "same" if compared.case.precision != "counted" else "same count"


def _conclude(compared: list[Compared]) -> int:
    verdicts = {found.case.name: _verdict(found) for found in compared}
    wrong = [name for name, verdict in verdicts.items() if verdict in ("DIFFERS", "FAILS")]
    if wrong:
        print(f"behaviour differs: {', '.join(wrong)}")
        return 1
    if verdicts:
        print("no difference in behaviour was found")
    return 0


def _print_speed(timed: dict[str, Timed]) -> None:
    print(f"\n{'benchmark':<26} {'before':>10} {'after':>10} {'after/before':>13}   figures in ms (less is better)")
    for name, both in timed.items():
        middles = f"{statistics.median(both.before):>10.3f} {statistics.median(both.after):>10.3f}"
        raw = "; ".join(" ".join(f"{figure:.3g}" for figure in figures) for figures in (both.before, both.after))
        print(f"{name:<26} {middles} {both.ratio:>13.3f}   {raw}")
    print(f"(load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)\n", flush=True)


def _as_json(before: Checkout, after: Checkout, compared: list[Compared], timed: dict[str, Timed]) -> dict[str, Any]:
    def plain(outcomes: list[Any]) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(outcome), "events": describe_events(outcome.events)} for outcome in outcomes]

    return {
        "before": {"revision": before.revision, "commit": before.commit},
        "after": {"revision": after.revision, "commit": after.commit},
        "machine": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "behaviour": {
            found.case.name: {
                "verdict": _verdict(found),
                "precision": found.case.precision,
                "differences": [dataclasses.asdict(difference) for difference in found.verdict.differences],
                "varying": found.verdict.varying,
                "before": plain(found.befores),
                "after": plain(found.afters),
            }
            for found in compared
        },
        "speed": {
            name: {"unit": "ms", "before": both.before, "after": both.after, "median_ratio": both.ratio}
            for name, both in timed.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
