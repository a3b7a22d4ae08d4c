"""A team of another size: the plan is made anew, and the run says what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from cordee.cluster import Team
from cordee.core import Job
from cordee.monitoring import Event
from cordee.planner.amounts import in_time
from cordee.planner.auto import decide, predict_as
from cordee.strategies.choice import choose_strategy
from cordee.training.components import Components


class Replanner:
    """A sink that hears of every team that is formed. Where its size is another, it emits the event `plan`.

    The strategy of a run that is under way stays: those that can lose and gain workers are not worth giving up for a
    few percent, and the others have their size for good. A strategy that is predicted to be faster is proposed: a
    run that is ended and resumed goes on with it from the last step. Takes milliseconds, in the launcher.
    """

    def __init__(self, asked: Job, parts: Components, emit: Callable[..., None]) -> None:
        """`asked` is the job before 'auto' was replaced, `parts` are those it runs with."""
        self._asked, self._parts, self._emit = asked, parts, emit
        self._num_workers = parts.team.num_workers

    def emit(self, event: Event) -> None:
        if event.type == "generation" and len(event.fields["members"]) != self._num_workers:
            self._num_workers = len(event.fields["members"])
            self._plan(self._num_workers)

    def close(self) -> None:
        pass

    def _plan(self, num_workers: int) -> None:
        asked = _with(self._asked, num_workers, self._asked.strategy.name)
        usual = _with(asked, num_workers, choose_strategy(asked))
        team = Team(num_workers=num_workers, num_local_workers=num_workers)
        decision = decide(asked, dataclasses.replace(self._parts, job=usual, team=team), may_measure=False)
        current = _with(self._parts.job, num_workers, self._parts.job.strategy.name)
        own = predict_as(current, dataclasses.replace(self._parts, job=current, team=team))
        best = decision.prediction
        self._emit(
            "plan",
            workers=num_workers,
            strategy=current.strategy.name,
            predicted_step_seconds=own.step_s if own else None,
            best=best.strategy if best else None,
            best_step_seconds=best.step_s if best else None,
            reason=decision.reason,
        )
        if own is None or best is None or best.strategy == current.strategy.name or num_workers == 1:
            return
        self._emit(
            "warning",
            message=f"with {num_workers} workers {best.label} is predicted to take {in_time(best.step_s)} a step, and "
            f"{current.strategy.name} {in_time(own.step_s)}: to change, end the run and go on with --resume "
            f"--workers {num_workers} --strategy {best.strategy}",
        )


def _with(job: Job, num_workers: int, name: str) -> Job:
    strategy = msgspec.structs.replace(job.strategy, workers=num_workers, name=name)
    return msgspec.structs.replace(job, strategy=strategy)
