"""Walks the fault points of team runs: every point, every process that passes it, two visits, every action.

    PYTHONPATH=tests:tests/faults python -m fault_walk [--strategy data_parallel] [--point P] [--scenario S]

`WALK` says for each point where it is passed. An entry is also needed for a point that only another kind of run passes
(`fault_walk_served.py`): a test fails for a point that has none.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL
from typing import NamedTuple

import msgspec
from fault_trials import FAIL, Result, Scenario, Trial, Walker

from cordee.core.fault_points import Action, Fault
from warm_launch import WarmServer

JOB = """
[model]
use = "mlp"
hidden = [16]
dropout = 0.1
[data]
use = "synthetic"
shape = [8]
num_classes = 3
size = 64
test_size = 16
[optimizer]
use = "adam"
lr = 0.01
[training]
batch_size = 16
steps = 12
reproducible = true
threads = 1
[strategy]
name = "data_parallel"
workers = 2
[cluster]
failure_timeout = "2s"
max_restarts = 20
[monitoring]
every_steps = 1
[checkpoint]
every_steps = 4
keep = 1
"""
STEP = "step.begun"
HOLD_0 = Fault(STEP, "worker-0", "hold", 5)
HOLD_0_LATE = Fault(STEP, "worker-0", "hold", 7)
HOLD_1 = Fault(STEP, "worker-1", "hold", 7)


def _after_loss(trial: Trial) -> None:
    trial.until_held(HOLD_0_LATE)
    trial.until_members(2, "worker-0")
    trial.release(HOLD_0_LATE)


def _disband(trial: Trial) -> None:
    """Who is held does not notice the loss by itself: it hears of it."""
    trial.until_held(HOLD_0)
    trial.until(lambda: trial.num_visits("link.disband", "worker-0"))
    trial.release(HOLD_0)


def _after_loss_of_first(trial: Trial) -> None:
    trial.until_held(HOLD_1)
    trial.until_members(2, "worker-1")
    trial.release(HOLD_1)


def _scale_out(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.scale(3)
    trial.until_members(3, "worker-0")
    trial.release(HOLD_0)


def _join(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.join()
    trial.until_members(3, "worker-0")
    trial.release(HOLD_0)


def _leave(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.until_members(1, "worker-0")
    trial.release(HOLD_0)


def _scale_in(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.scale(1)
    trial.until_members(1, "worker-0")
    trial.release(HOLD_0)


def _kill_coordinator(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.signal(trial.pid_of("coordinator_started"), SIGKILL)
    trial.until(lambda: trial.num_visits("coordinator.control_written", "coordinator") >= 2)
    trial.release(HOLD_0)


def _interrupt(trial: Trial) -> None:
    trial.until_held(HOLD_0)
    trial.process.send_signal(SIGINT)
    trial.until(lambda: trial.num_visits("link.stop", "worker-0"))
    trial.release(HOLD_0)


def _wake(trial: Trial) -> None:
    trial.until_held(HOLD_0_LATE)
    trial.signal(trial.pid_of("worker_started", 1), SIGCONT)
    trial.until_members(2, "worker-0")
    trial.release(HOLD_0_LATE)


def _leave_damaged(folder: Path) -> None:
    """A checkpoint that is damaged stands where the run is going to save one."""
    damaged = folder / "run" / "checkpoints" / "step-8"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")


# The model of the job, and a mistake in it that shows when the first checkpoint is there.
FAILING = """
import os
from cordee.models.mlp import mlp
def net(input_shape, num_classes, hidden, dropout):
    model = mlp(input_shape=input_shape, num_classes=num_classes, hidden=hidden, dropout=dropout)
    model.register_forward_pre_hook(check)
    return model
def check(model, inputs):
    if os.path.exists("fail") and os.path.exists("run/checkpoints/step-4"):
        raise ZeroDivisionError("the user's own mistake")
"""


def _make_mistake(folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING)
    (folder / FAIL).touch()


SCENARIOS = {
    "plain": Scenario(),
    "final save": Scenario(settings=("checkpoint.every_steps=1000",)),
    "loss": Scenario(_after_loss, (Fault(STEP, "worker-1", "kill", 4), HOLD_0_LATE)),
    "told of a loss": Scenario(_disband, (Fault(STEP, "worker-1", "kill", 5), HOLD_0)),
    "loss of the first": Scenario(_after_loss_of_first, (Fault(STEP, "worker-0", "kill", 4), HOLD_1)),
    "scale out": Scenario(_scale_out, (HOLD_0,)),
    "join": Scenario(_join, (HOLD_0,)),
    "leave": Scenario(_leave, (Fault(STEP, "worker-1", "leave", 4), HOLD_0)),
    "scale in": Scenario(_scale_in, (HOLD_0,)),
    "coordinator": Scenario(_kill_coordinator, (HOLD_0,)),
    "interrupt": Scenario(_interrupt, (HOLD_0,), ends_early=True),
    "failure": Scenario(settings=("model.use='failing:net'",), prepare=_make_mistake, ends_early=True),
    "resume": Scenario(resumes="interrupt"),
    "resume over a damaged one": Scenario(resumes="interrupt", prepare=_leave_damaged),
    "woken": Scenario(_wake, (Fault(STEP, "worker-1", "freeze", 4), HOLD_0_LATE), settings=("cluster.max_restarts=0",)),
}


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


DEATHS: tuple[Action, ...] = ("kill", "freeze")


def _of(scenario: str, process: str, *visits: int) -> Place:
    return Place(scenario, process, visits or (1,))


# A member: in the first generation, in the one after a loss, in the one that a replacement joins.
MEMBERS = (
    _of("plain", "worker-0", 1),
    _of("plain", "worker-1", 1),
    _of("loss", "worker-0", 2, 3),
    _of("loss", "worker-1", 2),
    _of("loss of the first", "worker-0", 2),
    _of("loss of the first", "worker-1", 2, 3),
    _of("scale out", "worker-0", 2),
    _of("scale out", "worker-2", 1),
    _of("join", "worker-2", 1),
    _of("leave", "worker-0", 2),
    _of("resume", "worker-1", 1),
)
# A team of one has nobody to set up with.
SET_UP = (
    _of("plain", "worker-0", 1),
    _of("plain", "worker-1", 1),
    _of("loss", "worker-0", 2),
    _of("loss", "worker-1", 2),
    _of("loss of the first", "worker-0", 2),
    _of("loss of the first", "worker-1", 2),
    _of("scale out", "worker-0", 2),
    _of("scale out", "worker-2", 1),
    _of("join", "worker-2", 1),
    _of("resume", "worker-1", 1),
)
NEW = (
    _of("plain", "worker-0", 1),
    _of("plain", "worker-1", 1),
    _of("loss", "worker-1", 2),
    _of("scale out", "worker-2", 1),
    _of("join", "worker-2", 1),
)
SAVING = (_of("plain", "worker-0", 1, 2, 3), _of("final save", "worker-0", 1), _of("loss of the first", "worker-1", 1))
FINAL = (_of("final save", "worker-0"), _of("final save", "worker-1"))
# Who has a state gives it to who has none.
HANDED = (
    _of("loss", "worker-0", 1),
    _of("loss", "worker-1", 1),
    _of("loss of the first", "worker-0", 1),
    _of("loss of the first", "worker-1", 1),
    _of("scale out", "worker-2", 1),
    _of("join", "worker-2", 1),
)
ENDING = (_of("plain", "worker-0", 1), _of("plain", "worker-1", 1), _of("scale out", "worker-2", 1))
TURNS = (
    _of("plain", "coordinator", 1, 2, 10),
    _of("loss", "coordinator", 15, 20, 25),
    _of("scale out", "coordinator", 20, 25, 30),
    _of("leave", "coordinator", 15, 20),
    _of("interrupt", "coordinator", 15, 20),
    _of("coordinator", "coordinator", 20),
)

WALK: dict[str, Walk] = {
    "link.join": Walk((*NEW, _of("woken", "worker-1", 2))),
    "link.joined": Walk(NEW, DEATHS),
    "link.send_ready": Walk(MEMBERS),
    "link.ready": Walk(MEMBERS, DEATHS),
    "link.answered": Walk(MEMBERS, DEATHS),
    "link.pause": Walk(
        (_of("loss", "worker-0"), _of("scale out", "worker-0"), _of("scale out", "worker-1"), _of("leave", "worker-1")),
        DEATHS,
    ),
    "link.disband": Walk((_of("told of a loss", "worker-0"),), DEATHS),
    "link.stop": Walk((_of("interrupt", "worker-0"), _of("interrupt", "worker-1")), DEATHS),
    "link.given_up": Walk((_of("woken", "worker-1"),), DEATHS),
    "link.send_leaving": Walk((_of("leave", "worker-1"),)),
    "link.send_failure": Walk((_of("failure", "worker-*"),)),  # the first of the two ends the run
    "link.send_goodbye": Walk(ENDING),
    "link.goodbye": Walk(ENDING, DEATHS),
    "step.begun": Walk(
        (
            _of("plain", "worker-0", 1, 2, 5, 12),
            _of("plain", "worker-1", 1, 2, 5, 12),
            _of("scale out", "worker-2", 1, 2),
        )
    ),
    "step.taken": Walk((_of("plain", "worker-0", 1, 2, 5, 12), _of("plain", "worker-1", 1, 2, 12))),
    "evaluate.begun": Walk((_of("plain", "worker-0", 1, 2, 3), _of("plain", "worker-1", 1, 2))),
    "evaluate.done": Walk((_of("plain", "worker-0", 1, 2, 3), _of("plain", "worker-1", 1, 2))),
    "save.begun": Walk((_of("plain", "worker-0", 1, 2, 3), _of("plain", "worker-1", 1, 2), *FINAL)),
    "save.consolidated": Walk((_of("plain", "worker-0", 1, 2, 3), _of("plain", "worker-1", 1, 2), *FINAL)),
    "end.reached": Walk(ENDING),
    "enter.begun": Walk(MEMBERS),
    "enter.gathered": Walk(MEMBERS),
    "enter.loaded": Walk((_of("resume", "worker-0"),)),
    "enter.shared": Walk(HANDED),
    "enter.agreed": Walk(MEMBERS),
    "enter.set_up": Walk(MEMBERS),
    "compare.begun": Walk(MEMBERS),
    "compare.done": Walk(MEMBERS),
    "enter.resumed": Walk(MEMBERS),
    "enter.done": Walk(MEMBERS),
    "share.begun": Walk(HANDED),
    "share.described": Walk(HANDED),
    "share.done": Walk(HANDED),
    "setup.begun": Walk(SET_UP),
    "setup.shared": Walk(SET_UP),
    "meeting.begin": Walk(MEMBERS),
    "segment.introduced": Walk(MEMBERS),
    "segment.made": Walk(
        (_of("plain", "worker-0"), _of("loss", "worker-0", 2, 3), _of("loss of the first", "worker-1", 1, 2))
    ),
    "segment.found": Walk(
        (
            _of("plain", "worker-1"),
            _of("loss", "worker-1", 2),
            _of("loss of the first", "worker-0", 1),
            _of("scale out", "worker-2"),
        )
    ),
    "segment.mapped": Walk(MEMBERS),
    "segment.answered": Walk(MEMBERS),
    "meeting.formed": Walk(MEMBERS),
    "meeting.end": Walk(
        (
            _of("plain", "worker-0"),
            _of("plain", "worker-1"),
            _of("loss", "worker-0", 1, 2),
            _of("loss of the first", "worker-1", 1, 2),
            _of("leave", "worker-1"),
        ),
        DEATHS,
    ),
    "checkpoint.staged": Walk((_of("plain", "worker-0", 1, 2, 3), _of("loss of the first", "worker-1", 1)), DEATHS),
    "checkpoint.folder": Walk(SAVING, ends_early=("error",)),
    "checkpoint.file": Walk(SAVING, ends_early=("error",)),
    "checkpoint.values": Walk(SAVING, ends_early=("error",)),
    "checkpoint.manifest": Walk(SAVING, ends_early=("error",)),
    "checkpoint.set_aside": Walk((_of("resume over a damaged one", "worker-0"),)),
    "checkpoint.rename": Walk(SAVING, ends_early=("error",)),
    "checkpoint.renamed": Walk(SAVING, ends_early=("error",)),
    "checkpoint.saved": Walk(SAVING, ends_early=("error",)),
    "checkpoint.remove": Walk((_of("plain", "worker-0", 1, 2),), ends_early=("error",)),
    "checkpoint.removing": Walk((_of("plain", "worker-0", 1, 2),), ends_early=("error",)),
    "checkpoint.written": Walk(SAVING, DEATHS),
    "launcher_link.listen": Walk((_of("plain", "coordinator"), _of("coordinator", "coordinator", 2))),
    "launcher_link.again": Walk((_of("coordinator", "coordinator", 1),), DEATHS),
    "coordinator.back": Walk((_of("coordinator", "coordinator", 1),), DEATHS),
    "coordinator.listening": Walk((_of("plain", "coordinator"), _of("coordinator", "coordinator", 2)), DEATHS),
    "coordinator.control_written": Walk((_of("plain", "coordinator"), _of("coordinator", "coordinator", 2)), DEATHS),
    "coordinator.heard": Walk((*TURNS, _of("plain", "coordinator", 40)), DEATHS),
    "coordinator.decided": Walk(TURNS, DEATHS),
    "journal.write": Walk(TURNS),
    "journal.written": Walk(TURNS, DEATHS),
    "launcher_link.errand": Walk(TURNS, DEATHS),
    "coordinator.committed": Walk(TURNS, DEATHS),
    "coordinator.reply": Walk(
        (
            _of("plain", "coordinator", 1, 2, 5),
            _of("loss", "coordinator", 8, 10),
            _of("scale out", "coordinator", 10, 15),
            _of("join", "coordinator", 10),
        )
    ),
    "coordinator.directive": Walk(
        (
            _of("plain", "coordinator", 1, 2),
            _of("loss", "coordinator", 3, 4, 5, 6),
            _of("scale out", "coordinator", 3, 4, 5, 6),
            _of("leave", "coordinator", 3, 4, 5),
            _of("interrupt", "coordinator", 3, 4, 5),
        )
    ),
    "coordinator.directed": Walk(
        (
            _of("plain", "coordinator", 1, 2),
            _of("loss", "coordinator", 3, 4, 5, 6),
            _of("scale out", "coordinator", 3, 4, 5, 6),
            _of("leave", "coordinator", 3, 4, 5),
            _of("interrupt", "coordinator", 3, 4, 5),
        ),
        DEATHS,
    ),
    "generations.formed": Walk(
        (_of("plain", "coordinator"), _of("loss", "coordinator", 2, 3), _of("leave", "coordinator", 2)), DEATHS
    ),
    "generations.pause": Walk((_of("loss", "coordinator"), _of("scale in", "coordinator")), DEATHS),
    "generations.finish": Walk((_of("interrupt", "coordinator"),), DEATHS),
    "generations.leave": Walk((_of("leave", "coordinator"), _of("scale in", "coordinator")), DEATHS),
    "losses.found": Walk((_of("loss", "coordinator"), _of("loss of the first", "coordinator")), DEATHS),
    "losses.replaced": Walk((_of("loss", "coordinator"), _of("loss of the first", "coordinator")), DEATHS),
    "staff.scaled": Walk((_of("scale out", "coordinator"), _of("scale in", "coordinator")), DEATHS),
    "staff.enlisted": Walk((_of("join", "coordinator"),), DEATHS),
    "coordinator.over": Walk((_of("plain", "coordinator"),), DEATHS),
    "launcher_link.end": Walk((_of("plain", "coordinator"),), DEATHS),
    "launcher_link.ended": Walk((_of("plain", "coordinator"),), DEATHS),
    "supervisor.start": Walk((_of("plain", "launcher"), _of("coordinator", "launcher", 2)), DEATHS),
    "supervisor.errand": Walk((_of("plain", "launcher", 1, 2, 10), _of("loss", "launcher", 20)), DEATHS),
    "supervisor.errand_done": Walk((_of("plain", "launcher", 1, 2, 10), _of("loss", "launcher", 20)), DEATHS),
    "supervisor.ended": Walk((_of("plain", "launcher"),), DEATHS),
    "launch.summary": Walk((_of("plain", "launcher"),), ends_early=("error",)),
    "launch.closed": Walk((_of("plain", "launcher"),), DEATHS),
    "fork_server.asked": Walk((_of("plain", "fork-server", 1, 2, 3), _of("loss", "fork-server", 4)), DEATHS),
    "fork_server.forked": Walk((_of("plain", "fork-server", 1, 2, 3), _of("loss", "fork-server", 4)), DEATHS),
    "fork_server.answered": Walk((_of("plain", "fork-server", 1, 2, 3), _of("loss", "fork-server", 4)), DEATHS),
    "forked.alive": Walk((_of("plain", "forked", 1, 2, 3), _of("loss", "forked", 4)), DEATHS),
    "forked.reported": Walk((_of("plain", "forked", 1, 2, 3), _of("loss", "forked", 4)), DEATHS),
    "joining.asks": Walk((_of("join", "joiner"),), DEATHS),
    "joining.taken": Walk((_of("join", "joiner"),), DEATHS),
}


class Case(NamedTuple):
    """One trial of the walk."""

    scenario: str
    fault: Fault
    may_end_early: bool

    @property
    def name(self) -> str:
        fault = self.fault
        return f"{fault.point}-{fault.process}-{fault.visit}-{fault.action}-{self.scenario.replace(' ', '_')}"


def cases(walk: dict[str, Walk] = WALK) -> Iterator[Case]:
    """Yield every trial."""
    for point, way in walk.items():
        for place in way.places:
            for visit in place.visits:
                for action in way.actions:
                    yield Case(
                        place.scenario,
                        Fault(point, place.process, action, visit),
                        may_end_early=action in way.ends_early,
                    )


def sample(walk: dict[str, Walk] = WALK) -> list[Case]:
    """Return one trial for each point: its first place and visit, killed there."""
    first: dict[str, Case] = {}
    for case in cases(walk):
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
            lambda case: walker.try_fault(case.scenario, case.fault, may_end_early=case.may_end_early), chosen
        )


def make_walker(server: WarmServer, folder: Path) -> Walker:
    return Walker(server, folder, "data_parallel", JOB, SCENARIOS)


def main(walk: dict[str, Walk], make: Callable[[WarmServer, Path], Walker]) -> int:
    """Try what the command line asks for, of the trials of `walk`; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    chosen = [
        case
        for case in (sample(walk) if options.sample else cases(walk))
        if (not options.point or case.fault.point in options.point)
        and (not options.scenario or case.scenario in options.scenario)
        and (not options.action or case.fault.action in options.action)
        and (not options.process or case.fault.process in options.process)
    ] * options.repeat
    if options.results and options.results.exists():
        lines = options.results.read_bytes().splitlines()
        known = [result for line in lines if not (result := msgspec.json.decode(line, type=Result)).problem]
        chosen = [c for c in chosen if not any((r.scenario, r.fault) == (c.scenario, c.fault) for r in known)]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(chosen)
    chosen = spread(chosen)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fault-walk-"))
    folder.mkdir(parents=True, exist_ok=True)
    started_s, num_failed = time.monotonic(), 0
    with WarmServer() as server:
        walker = make(server, folder)
        for case, result in zip(chosen, walk_all(walker, chosen, options.at_once), strict=True):
            num_failed += bool(result.problem)
            print(f"{'FAILED' if result.problem else 'ok':6} {result.seconds:6.1f} s  {case.name}", flush=True)
            if result.problem:
                print(f"       {result.problem}\n       {result.folder}", flush=True)
            if options.results:
                with options.results.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    print(f"{len(chosen)} trials, {num_failed} failed, {time.monotonic() - started_s:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(WALK, make_walker))
