"""`cordee doctor --run`: proves from a run's own events that nothing was lost, doubled or disagreed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cordee.core.errors import RunDirectoryError
from cordee.doctor import Finding
from cordee.monitoring import read_events
from cordee.monitoring.run_directory import EVENTS_FILE

Event = Mapping[str, Any]
VERDICTS = ("the run is sound", "wrong with this run")
SERVED = ("parameter_server",)


def audit_run(folder: Path) -> list[Finding]:
    """Return what the events of a run say about it. Raises RunDirectoryError where there are none."""
    path = folder / EVENTS_FILE
    if not path.exists():
        raise RunDirectoryError(f"{folder} has no {EVENTS_FILE}: it is not a run directory")
    return audit(list(read_events(path)))


def audit(events: Sequence[Event]) -> list[Finding]:
    """Return one finding for each property. Pure."""
    started = next((event for event in events if event["type"] == "run_started"), None)
    if started is None:
        return [Finding("run", "problem", "it never began to train", "look into its logs")]
    commits = [event for event in events if event["type"] == "commit"]
    if started.get("strategy") in SERVED:  # its workers come and go without a team that would be formed anew
        return [
            _finding("steps", _check_steps(events), f"{_last_step(events)} committed, in order"),
            _finding(
                "samples", _check_samples(events, started), f"each counted once per epoch, at {len(commits)} commits"
            ),
            _finding("work", _check_reported(events), "each step reported once"),
            _updates(events),
            _losses(events),
        ]
    return [
        _finding("generations", _check_generations(events), f"{_count(events, 'generation')} formed, none overlap"),
        _finding("steps", _check_steps(events), f"{_last_step(events)} committed, in order"),
        _finding("samples", _check_samples(events, started), f"each counted once per epoch, at {len(commits)} commits"),
        _finding("members", _check_members(events), _describe_agreement(commits)),
        _losses(events),
    ]


def _finding(subject: str, problems: Iterable[str], fine: str) -> Finding:
    found = list(problems)
    if not found:
        return Finding(subject, "ok", fine)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(subject, "problem", found[0] + more, "please report it with the run's events.jsonl and logs")


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
                f"while {current} was going on"
            )


def _check_steps(events: Sequence[Event]) -> Iterator[str]:
    """Commits never go back, but to one whose checkpoint was saved, where nobody was left to go on from.

    Those of one worker are recorded in order; the news of one that is cut off come after those of the others.
    """
    committed: dict[int | None, int] = {}
    saved, may_load, floor = {0}, True, 0
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
                yield f"generation {event['generation']} goes on from step {event['step']} after step {last}"
            floor = event.get("step") or 0
        elif kind == "commit":
            worker, step = event.get("worker"), event["step"]
            last = max(committed.values(), default=0) if may_load else max(committed.get(worker, 0), floor)
            if may_load and step in saved:
                committed = {}  # all go on from there
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
    for event in events:
        if event["type"] == "commit":
            expected = event["epoch"] * num_samples + min(event["batch"] * batch_size, num_samples)
            if event["samples"] != expected:
                yield f"{event['samples']} samples were counted by step {event['step']}, there were {expected}"
        elif event["type"] == "step":
            epochs, batches = divmod(event["step"], num_batches)
            expected = epochs * num_samples + min(batches * batch_size, num_samples)
            if event["samples"] != expected:
                yield f"{event['samples']} samples were counted by step {event['step']}, there were {expected}"


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
    for event in events:
        if event["type"] == "generation":
            if event["generation"] == 1:  # of a run that is resumed
                known, counts = {}, Counter()
            handed = {step: commit for step, commit in handed.items() if step <= (event.get("step") or 0)}
        elif event["type"] == "run_started":
            handed = {}
        if event["type"] != "commit" or not event.get("digest"):
            continue
        own = (event.get("worker", 0), *_at(event))
        counts[own] += 1
        first = known.setdefault((*_at(event), counts[own]), event)
        if parts := _differing(first, event):
            yield (
                f"at step {event['step']} worker {event.get('worker', 0)} differs in {', '.join(parts)} "
                f"from worker {first.get('worker', 0)}"
            )
        before = handed.setdefault(event["step"], event)
        # The place in the data may be another: an epoch is closed, or evaluated, after its last step.
        parts = [part for part in _differing(before, event) if part != "progress"]
        if before["generation"] != event["generation"] and parts:
            yield (
                f"generation {event['generation']} continues from step {event['step']} with another "
                f"{', '.join(parts)} than generation {before['generation']} had"
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
    return Finding("updates", "problem", detail, "set strategy.replicas = 2: a second server has every update")


def _losses(events: Sequence[Event]) -> Finding:
    """At most one step is computed again, unless nobody is left who could go on from where the team was."""
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
    parts = {part for commit in commits for part in commit.get("digest") or ()}
    named = [part for part in ("model", "buffers", "optimizer", "progress") if part in parts]
    return f"agree on {', '.join(named) or 'nothing that was recorded'} at {len({_at(c) for c in commits})} places"


def _at(commit: Event) -> tuple[int, int]:
    return commit.get("generation", 0), commit["step"]


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event["type"] == kind for event in events)


def _last_step(events: Sequence[Event]) -> int:
    return max((event["step"] for event in events if event["type"] in ("commit", "step", "checkpoint")), default=0)
