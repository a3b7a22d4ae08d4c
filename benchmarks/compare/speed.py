"""Our side of the benchmarks, by short fixed jobs that both checkouts run in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from compare.behaviour import TIMEOUT_S, Killer, read_events
from compare.cases import JOBS
from compare.checkouts import Checkout
from compare.processes import Ended, run_command

WARM_STEPS = 50  # before a worker is killed
STEPS_AFTER = 5  # that are waited for, to be sure that training continues


class SpeedError(Exception):
    """A benchmark that gave no figure."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The figures of one benchmark: milliseconds by round, in the order measured."""

    before: list[float]
    after: list[float]

    @property
    def ratio(self) -> float | None:
        """The median over rounds of after divided by before: above 1, AFTER is slower. None without a whole round."""
        ratios = [after / before for before, after in zip(self.before, self.after)]
        return statistics.median(ratios) if ratios else None


def measure(
    names: Collection[str], before: Checkout, after: Checkout, folder: Path, rounds: int, timed: dict[str, Timed]
) -> None:
    """Run each benchmark `rounds` times in both, and add the figures to `timed`.

    Each round begins with the other one; a first run of both is not counted. Raises SpeedError if one fails.
    """
    for name in names:
        for number in range(-1, rounds):
            for checkout in (before, after) if number % 2 == 0 else (after, before):
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    figures = BENCHMARKS[name](checkout, Path(place))
                if number < 0:
                    continue
                for what, figure_ms in figures.items():
                    both = timed.setdefault(f"{name}{what}", Timed(before=[], after=[]))
                    getattr(both, checkout.side).append(figure_ms)
            if number >= 0:
                print(f"{name}: round {number + 1} of {rounds}", flush=True)


def _train(checkout: Checkout, folder: Path, job: str, *settings: str) -> dict[str, float]:
    """Return the milliseconds of a step, without evaluating and saving."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    command = ["-m", "cordee", "train", str(JOBS / job), "--run-dir", str(folder / "run"), "-q", *overrides]
    _run(checkout, folder, command)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {"": summary["samples"] / summary["steps"] / summary["samples_per_second"] * 1e3}


def _overhead(checkout: Checkout, folder: Path) -> dict[str, float]:
    return _train(checkout, folder, "lenet.toml")


def _data_parallel(checkout: Checkout, folder: Path) -> dict[str, float]:
    settings = ("strategy.name=data_parallel", "strategy.workers=2", "training.batch_size=64", "training.steps=300")
    return _train(checkout, folder, "lenet.toml", *settings)


def _staleness(checkout: Checkout, folder: Path) -> dict[str, float]:
    return _train(checkout, folder, "paced.toml", f"model.folder={json.dumps(str(folder))}")


def _server(checkout: Checkout, folder: Path) -> dict[str, float]:
    ended = _run(checkout, folder, [str(JOBS / "store_speed.py")])
    return {f", {size} floats": figure for size, figure in json.loads(ended.stdout).items()}


def _recovery(checkout: Checkout, folder: Path) -> dict[str, float]:
    """Return the milliseconds from kill -9 of a worker to the first step after the pause that it makes."""
    run = folder / "run"
    killer = Killer(run, WARM_STEPS)
    found_s: list[float] = []

    def watch() -> None:
        killer()
        if killer.killed_s is None:
            return
        steps_s = [event["time"] for event in read_events(run) if event.get("type") == "step"]
        if (recovered_s := find_recovery(steps_s, killer.killed_s)) is not None:
            found_s.append(recovered_s)
            raise _SeenEnoughError

    command = ["-m", "cordee", "train", str(JOBS / "killed.toml"), "--run-dir", str(run), "-q"]
    with contextlib.suppress(_SeenEnoughError):
        _run(checkout, folder, command, watch)
    return {"": found_s[0] * 1e3}


class _SeenEnoughError(Exception):
    pass


def find_recovery(steps_s: list[float], killed_s: float) -> float | None:
    """Return how long after the kill the longest pause between two steps ended; None before enough have followed."""
    moments = [max(at_s for at_s in steps_s if at_s <= killed_s), *(at_s for at_s in steps_s if at_s > killed_s)]
    if len(moments) <= STEPS_AFTER:
        return None
    _, end_s = max((later - earlier, later) for earlier, later in itertools.pairwise(moments))
    return end_s - killed_s


def _run(
    checkout: Checkout, folder: Path, arguments: list[str], while_running: Callable[[], None] = lambda: None
) -> Ended:
    ended = run_command(
        [checkout.python, *arguments],
        environment=checkout.environment,
        folder=folder,
        timeout_s=TIMEOUT_S,
        while_running=while_running,
    )
    if ended.exit_code != 0:
        raise SpeedError(f"{checkout.side}: {' '.join(arguments)} failed:\n{ended.last_words()}")
    return ended


BENCHMARKS: Mapping[str, Callable[[Checkout, Path], dict[str, float]]] = {
    "overhead": _overhead,
    "data_parallel": _data_parallel,
    "server": _server,
    "recovery": _recovery,
    "staleness": _staleness,
}
