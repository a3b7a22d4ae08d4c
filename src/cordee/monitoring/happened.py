"""What is worth a line or a mark among the events of a run: the dashboard, `cordee watch` and traces show the same."""

from __future__ import annotations

import re
from typing import NamedTuple

from cordee.monitoring import events as kinds
from cordee.monitoring.wording import plural

_SILENCE = re.compile(r"is frozen: no sign of life for (\d+\.?\d*) s")


class Happened(NamedTuple):
    """Something that happened to a run."""

    kind: str  # "lost", "fault", "checkpoint" …
    text: str  # may hold what a program wrote: it is to be made printable
    step: int | None = None


def describe(event: kinds.AnyEvent) -> Happened | None:
    """Return what happened by an event; None where it is not worth a mark. Pure."""
    match event:
        case kinds.WorkerLost():
            return Happened("lost", f"{event.role} {event.worker} {event.reason}", event.step)
        case kinds.WorkerLeft():
            return Happened("left", f"{event.role} {event.worker} left", event.step)
        case kinds.Recovery():
            redone = plural(event.steps_redone, "step")
            return Happened("recovery", f"recovered in {event.seconds:.2f} s, {redone} redone", event.step)
        case kinds.Fault():
            return Happened("fault", f"cordee chaos: {event.fault} {event.target}".rstrip())
        case kinds.Generation():
            workers = plural(len(event.members), "worker")
            return Happened("generation", f"generation {event.generation}: {workers}", event.step)
        case kinds.Scale():
            return Happened("scale", f"{event.before} to {plural(event.workers, 'worker')}", event.step)
        case kinds.Checkpoint():
            return Happened("checkpoint", f"checkpoint of step {event.step} in {event.seconds:.2f} s", event.step)
        case kinds.Warned():
            return Happened("warning", event.message)
        case kinds.CoordinatorLost() | kinds.ForkServerLost():
            return Happened("lost", f"{event.member or 'a process'}: {event.reason}")
        case kinds.UpdatesLost():
            return Happened("lost", f"server {event.server}: {plural(event.updates, 'update')} lost", event.step)
        case kinds.SamplesLost():
            return Happened("lost", f"what was learnt of {plural(event.samples, 'sample')} is lost", event.step)
        case kinds.RunStarted() if event.start_step:
            return Happened("resumed", f"resumed after step {event.start_step}", event.start_step)
        case kinds.RunEnded():
            return Happened("end", f"{event.status}{f': {event.error}' if event.error else ''}", event.steps)
    return None


def frozen_s(event: kinds.WorkerLost) -> float:
    """Return for how long a lost member had been frozen; 0 for one that was lost otherwise. Pure."""
    found = _SILENCE.search(event.reason)
    return float(found[1]) if found else 0.0
