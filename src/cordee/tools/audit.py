"""`cordee doctor --run`: proves from a run's own events that nothing was lost, doubled or disagreed on."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.core.findings import Finding
from cordee.monitoring import read_lines
from cordee.monitoring.run_directory import CHECKPOINTS, EVENTS_FILE

Event = Mapping[str, Any]
CONCLUSIONS = ("the run is sound", "wrong with this run")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class RunStarted(msgspec.Struct):
    strategy: str
    servers: Count | None = None  # of a dispatched run
    start_step: Count = 0
    train_samples: Count | None = None
    batch_size: Count | None = None


class Generation(msgspec.Struct):
    generation: Count
    step: Count | None = None


class Commit(msgspec.Struct):
    """Of a worker of a team, which belongs to a generation, or of parameter servers."""

    step: Count
    epoch: Count
    batch: Count
    samples: Count
    samples_lost: Count | None = None
    worker: Count | None = None
    generation: Count | None = None
    digest: dict[str, str] | None = None
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        if self.generation is None and (self.worker is not None or self.weights_sha256 is None):
            raise ValueError("Object missing required field `generation`")


class Step(msgspec.Struct):
    step: Count
    samples: Count
    samples_lost: Count | None = None


class SamplesLost(msgspec.Struct):
    samples: Count
    step: Count


class Saved(msgspec.Struct):
    step: Count


class Recovery(msgspec.Struct):
    seconds: float
    steps_redone: Count = 0
    lost: list[Count] | str = ""


class UpdatesLost(msgspec.Struct):
    server: Count
    updates: Count
    step: Count
    from_step: Count


class RunEnded(msgspec.Struct):
    status: str
    steps: Count = 0


# What the audit uses, and what it must have.
SHAPES: Mapping[str, type[msgspec.Struct]] = {
    "run_started": RunStarted,
    "generation": Generation,
    "commit": Commit,
    "step": Step,
    "checkpoint": Saved,
    "recovery": Recovery,
    "updates_lost": UpdatesLost,
    "samples_lost": SamplesLost,
    "run_ended": RunEnded,
}


def audit_run(folder: Path) -> list[Finding]:
    """Return what the events of a run say about it. Raises RunDirectoryError where there are none to be read."""
    path = folder / EVENTS_FILE
    if not path.exists():
        raise RunDirectoryError(f"{folder} has no {EVENTS_FILE}: it is not a run directory")
    lines, is_cut = read_lines(path)
    return [*audit(lines, is_cut=is_cut), *_check_folder(folder)]


def _check_folder(folder: Path) -> Iterator[Finding]:
    checkpoints = folder / CHECKPOINTS
    if checkpoints.is_symlink():
        detail = f"{checkpoints} is a link to {checkpoints.readlink()}, and no links are followed"
        yield Finding("checkpoints", "problem", detail, "put the folder itself there")


def audit(lines: Sequence[Event | None], *, is_cut: bool = False) -> list[Finding]:
    """Return one finding for each property. Pure.

    A line that could not be read is None; with `is_cut` a last one followed that was not finished.
    """
    events: list[Event] = []
    damaged: list[tuple[int, str]] = []
    for number, event in enumerate(lines, 1):
        if (why := _find_damage(event)) is None and event is not None:
            events.append(event)
        else:
            damaged.append((number, str(why)))
    return [_describe_lines(len(lines), damaged, is_cut=is_cut), *_audit(events)]


def _find_damage(event: Event | None) -> str | None:
    if event is None:
        return "it is no JSON object with a type"
    shape = SHAPES.get(event["type"])
    if shape is None:
        return None
    try:
        msgspec.convert(event, shape)
    except msgspec.ValidationError as error:
        return f"{event['type']}: {error}"
    return None


def _describe_lines(num_lines: int, damaged: Sequence[tuple[int, str]], *, is_cut: bool) -> Finding:
    if damaged:
        (first, why), num = damaged[0], len(damaged)
        lines = "1 line" if num == 1 else f"{num} lines"
        detail = f"{lines} of {EVENTS_FILE} cannot be read, the first is line {first} ({why})"
        return Finding("events", "problem", detail, "what these lines said is not checked; restore the file if you can")
    if is_cut:
        return Finding("events", "note", f"the last line of {EVENTS_FILE} is not finished: its writer was killed")
    return Finding("events", "ok", f"all {num_lines} can be read")


def _audit(events: Sequence[Event]) -> list[Finding]:
    started = next((event for event in events if event["type"] == "run_started"), None)
    if started is None:
        return [Finding("run", "problem", "it never began to train", "look into its logs")]
    commits = [event for event in events if event["type"] == "commit"]
    if started.get("servers"):  # a dispatched run: workers come and go without a team that would be formed again
        return [
            _finding("steps", _check_steps(events), f"{_last_step(events)} committed, in order"),
            _samples(events, started),
            *_commits(events, commits),
            _finding("work", _check_reported(events), "each step reported once"),
            _updates(events),
            _losses(events),
        ]
    if started.get("clients"):  # rounds: there is no team, and clients have epochs of their own
        return [
            _finding("steps", _check_steps(events), f"{_last_step(events)} committed, in order"),
            *_commits(events, commits),
            _losses(events),
        ]
    return [
        _finding("generations", _check_generations(events), f"{_count(events, 'generation')} formed, none overlap"),
        _finding("steps", _check_steps(events), f"{_last_step(events)} committed, in order"),
        _samples(events, started),
        *_commits(events, commits),
        *(
            [_finding("members", chain(_check_parts(events), _check_members(events)), _describe_agreement(commits))]
            if commits
            else []
        ),
        _losses(events),
    ]


def _finding(subject: str, problems: Iterable[str], fine: str) -> Finding:
    found = list(problems)
    if not found:
        return Finding(subject, "ok", fine)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(subject, "problem", found[0] + more, "please report it with the run's events.jsonl and logs")


def _commits(events: Sequence[Event], commits: Sequence[Event]) -> list[Finding]:
    """Without commits nothing says what the run had; after its end there must be some."""
    if commits:
        return []
    ended = [event for event in events if event["type"] == "run_ended"]
    num_steps = max(_last_step(events), *(event.get("steps", 0) for event in ended), 0)
    if ended and num_steps:
        detail = f"none is recorded, though the run ended after {num_steps} steps: nothing is known of what it had"
        return [Finding("commits", "problem", detail, "a run that failed before its first checkpoint has none")]
    return [Finding("commits", "note", "none is recorded so far: nothing is known of what the run had")]


def _samples(events: Sequence[Event], started: Event) -> Finding:
    if not started.get("train_samples") or not started.get("batch_size"):
        return Finding("samples", "note", "not checked: how many an epoch has is not known")
    places = f"{_count(events, 'commit')} commits and {_count(events, 'step')} reports"
    num_lost = max((event.get("samples_lost") or 0 for event in events if event["type"] == "commit"), default=0)
    but = f", but {num_lost} that lost workers had trained on alone" if num_lost else ""
    return _finding("samples", _check_samples(events, started), f"each counted once per epoch{but}, at {places}")


def _check_generations(events: Sequence[Event]) -> Iterator[str]:
    """Generations count up by one, and nobody commits in one that is over."""
    current = 0
    for event in events:
        if event["type"] == "generation":
            if event["generation"] not in (current + 1, 1):
                yield f"generation {event['generation']} follows {current}"
            current = event["generation"]
        elif event["type"] == "commit" and event.get("worker") is not None and event["generation"] != current:
            yield (
                f"worker {event['worker']} committed step {event['step']} in generation {event['generation']} "
                f"while {current} was current"
            )


def _check_steps(events: Sequence[Event]) -> Iterator[str]:
    """Commits never go back, but to one whose checkpoint was saved, where nobody was left to continue from.

    Those of one worker are recorded in order; the news of one that is cut off come after those of the others.
    """
    committed: dict[int | None, int] = {}
    saved, may_load, floor = {0}, True, 0
    begun: int | None = None  # the generation that has committed something: who starts later is not the first of it
    for event in events:
        kind = event["type"]
        if kind == "checkpoint":
            saved.add(event["step"])
        elif kind == "run_started":
            may_load = True
        elif kind == "generation":
            may_load = event.get("step") is None
            last = max(committed.values(), default=0)
            if not may_load and event["step"] < last:
                yield f"generation {event['generation']} continues from step {event['step']} after step {last}"
            floor, begun = event.get("step") or 0, None
        elif kind == "commit":
            worker, step = event.get("worker"), event["step"]
            if begun is not None and event.get("generation") == begun:
                may_load = False
            begun = event.get("generation") or None
            last = max(committed.values(), default=0) if may_load else max(committed.get(worker, 0), floor)
            if may_load and step in saved:
                committed = {}  # all continue from there
            elif step < last:
                yield f"step {step} was committed after step {last}"
            if may_load:
                floor, may_load = step, False
            committed[worker] = step
            saved.add(step)  # maybe: all may be lost after the last byte of it and before the news


def _check_samples(events: Sequence[Event], started: Event) -> Iterator[str]:
    """What was counted is what the place in the data says: whole epochs, and all batches of the present one."""
    num_samples, batch_size = started.get("train_samples"), started.get("batch_size")
    if not num_samples or not batch_size:
        return
    num_batches = -(-num_samples // batch_size)
    lost = _LostByStep(event["step"] for event in events if event["type"] == "samples_lost")
    for event in events:
        if event["type"] == "samples_lost":
            lost.record(event["step"], event["samples"])  # one that is told twice was taken back by a resume
            continue
        if event["type"] == "commit":
            expected = event["epoch"] * num_samples + min(event["batch"] * batch_size, num_samples)
        elif event["type"] == "step":
            epochs, batches = divmod(event["step"], num_batches)
            expected = epochs * num_samples + min(batches * batch_size, num_samples)
        else:
            continue
        num_lost = event.get("samples_lost") or 0
        if event["samples"] + num_lost != expected:
            also = f" and {num_lost} lost" if num_lost else ""
            yield f"{event['samples']} samples were counted{also} by step {event['step']}, there were {expected}"
        told = lost.count(event["step"])
        if num_lost != told:
            yield f"{num_lost} samples are lost by step {event['step']}, and the losses that are recorded are of {told}"


class _LostByStep:
    """How many samples were lost by each step. Adding them up anew for each event would take time with the square."""

    def __init__(self, steps: Iterable[int]) -> None:
        self._steps = sorted(set(steps))
        self._numbers = [0] * len(self._steps)
        self._sums = [0] * (len(self._steps) + 1)  # a Fenwick tree

    def record(self, step: int, num_samples: int) -> None:
        place = bisect_right(self._steps, step)
        more = num_samples - self._numbers[place - 1]
        self._numbers[place - 1] = num_samples
        while place < len(self._sums):
            self._sums[place] += more
            place += place & -place

    def count(self, step: int) -> int:
        place, total = bisect_right(self._steps, step), 0
        while place:
            total += self._sums[place]
            place -= place & -place
        return total


def _check_reported(events: Sequence[Event]) -> Iterator[str]:
    """The steps that are reported grow; only a run that is resumed may go back, to what was saved."""
    last = 0
    for event in events:
        if event["type"] == "run_started":
            last = event.get("start_step", 0)
        elif event["type"] == "step":
            if event["step"] <= last:
                yield f"step {event['step']} was reported after step {last}"
            last = event["step"]


def _check_members(events: Sequence[Event]) -> Iterator[str]:
    """Members that commit a step together have the same, and the next generation continues with what the last had."""
    known: dict[tuple[int, int, int], Event] = {}
    # A generation may commit a step twice: when it is entered, and when it is evaluated and saved.
    counts: Counter[tuple[int, int, int]] = Counter()
    handed: dict[int, Event] = {}  # the last commit of each step, as long as it can be continued from
    steps: list[int] = []  # of these, negative: a heap, the latest first
    for event in events:
        if event["type"] == "generation":
            if event["generation"] == 1:  # of a run that is resumed
                known, counts = {}, Counter()
            while steps and -steps[0] > (event.get("step") or 0):
                del handed[-heapq.heappop(steps)]
        elif event["type"] == "run_started":
            handed, steps = {}, []
        if event["type"] != "commit":
            continue
        if not event.get("digest"):
            if event.get("generation") is not None:
                yield f"worker {event.get('worker') or 0} committed step {event['step']} without a digest"
            continue
        own = (event.get("worker") or 0, *_at(event))
        counts[own] += 1
        first = known.setdefault((*_at(event), counts[own]), event)
        if parts := _differing(first, event) + sorted(first["digest"].keys() - event["digest"].keys()):
            yield (
                f"at step {event['step']} worker {event.get('worker') or 0} differs in {', '.join(parts)} "
                f"from worker {first.get('worker') or 0}"
            )
        if event["step"] not in handed:
            heapq.heappush(steps, -event["step"])
        before = handed.setdefault(event["step"], event)
        # The place in the data may be another: an epoch is closed, or evaluated, after its last step.
        parts = [part for part in _differing(before, event) if part != "progress"]
        if before["generation"] != event["generation"] and parts:
            yield (
                f"generation {event['generation']} continues from step {event['step']} with another "
                f"{', '.join(parts)} than generation {before['generation']} had"
            )


def _check_parts(events: Sequence[Event]) -> Iterator[str]:
    """What one commit has a digest of, all have that were made since the run was started or resumed.

    Where each worker has a part of the optimizer, the model is whole, and has a digest, only where it is saved.
    """
    commits: list[Event] = []
    is_formed = False  # a run with one worker has no generations: there only `run_started` says that it begins
    for event in events:
        is_first = event["type"] == "generation" and event["generation"] == 1
        if is_first or (event["type"] == "run_started" and not is_formed):
            yield from _find_incomplete(commits)
            commits = []
            is_formed = is_first
        elif event["type"] == "run_started":
            is_formed = False
        elif event["type"] == "commit" and event.get("digest"):
            commits.append(event)
    yield from _find_incomplete(commits)


def _find_incomplete(commits: Sequence[Event]) -> Iterator[str]:
    every: set[str] = set().union(*(commit["digest"] for commit in commits))
    for commit in commits:
        missing = every - commit["digest"].keys()
        if missing and ("optimizer" in every or commit["digest"].keys() - {"buffers", "progress"}):
            yield (
                f"worker {commit.get('worker') or 0} committed step {commit['step']} without a digest of "
                f"{', '.join(sorted(missing))}, which others have"
            )


def _differing(one: Event, other: Event) -> list[str]:
    return [part for part, value in other["digest"].items() if one["digest"].get(part, value) != value]


def _updates(events: Sequence[Event]) -> Finding:
    """Every update is in all of the weights, unless a parameter server was lost that nobody followed."""
    lost = [event for event in events if event["type"] == "updates_lost"]
    if not lost:
        return Finding("updates", "ok", "none lost")
    total, first = sum(event["updates"] for event in lost), lost[0]
    detail = f"{total} lost: the weights are not those of an undisturbed run. Server {first['server']}"
    detail += f" continued from step {first['from_step']} at step {first['step']}"
    detail += f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return Finding("updates", "problem", detail, "set strategy.replicas = 2: a follower has every update")


def _losses(events: Sequence[Event]) -> Finding:
    """At most one step is computed again, unless nobody is left who could continue from where the team was."""
    recoveries = [event for event in events if event["type"] == "recovery"]
    redone = sum(event.get("steps_redone", 0) for event in recoveries)
    longest = max((event["seconds"] for event in recoveries), default=0.0)
    detail = f"{_count(events, 'worker_lost')} workers lost, {len(recoveries)} recoveries, {redone} steps redone"
    detail += f", the longest took {longest:.2f} s" if recoveries else ""
    if num_whole := len(_whole_losses(events)):
        detail += f"; {num_whole} of them from a checkpoint, since nobody was left"
    return _finding("losses", _check_redone(events), detail)


def _check_redone(events: Sequence[Event]) -> Iterator[str]:
    whole = {id(event) for event in _whole_losses(events)}  # comparing events would take time with the square of them
    for event in events:
        if event["type"] == "recovery" and event.get("steps_redone", 0) > 1 and id(event) not in whole:
            lost = ", ".join(map(str, event.get("lost", [])))
            yield f"{event['steps_redone']} steps were redone after the loss of {lost}, though others were left"


def _whole_losses(events: Sequence[Event]) -> list[Event]:
    """Return the recoveries of teams that were lost as a whole. Strategies without generations have none."""
    whole, is_whole = [], False
    for event in events:
        if event["type"] == "generation":
            is_whole = event.get("step") is None
        elif event["type"] == "recovery" and is_whole:
            whole.append(event)
    return whole


def _describe_agreement(commits: Sequence[Event]) -> str:
    if not commits:
        return "not compared so far"
    parts = {part for commit in commits for part in commit.get("digest") or ()}
    named = [part for part in ("model", "buffers", "optimizer", "progress") if part in parts]
    return f"agree on {', '.join(named) or 'nothing that was recorded'} at {len({_at(c) for c in commits})} places"


def _at(commit: Event) -> tuple[int, int]:
    return commit.get("generation", 0), commit["step"]


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event["type"] == kind for event in events)


def _last_step(events: Sequence[Event]) -> int:
    return max((event["step"] for event in events if event["type"] in ("commit", "step", "checkpoint")), default=0)
