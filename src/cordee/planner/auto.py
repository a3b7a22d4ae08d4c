"""What `strategy.name = "auto"` becomes, and what a run is predicted to take: from what the cache knows.

Nothing here may hold up the start of a run: what is not in the cache is measured only where that takes less than a
second, and else the plain rule decides.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.references import LIVE_PREFIX
from cordee.data.datasets import IterableSource
from cordee.monitoring import AnyEvent, events
from cordee.planner.amounts import in_time
from cordee.planner.cost_model import MODELS, predict, with_runs
from cordee.planner.hardware import ThisMachine
from cordee.planner.measurements import ModelProfile, free_memory_bytes, is_busy, keep, read_kept
from cordee.planner.pipelines import num_chunks_of, usual_microbatches
from cordee.planner.planning import job_as, kept_machine, refusal, refused_slices
from cordee.planner.prediction import Candidate, Prediction, Work, mesh_of
from cordee.planner.profiling import assemble_alone, estimate_step_s, profile_key, take_profile
from cordee.planner.recording import read_runs
from cordee.planner.search import CLOSE, is_candidate, search
from cordee.strategies.choice import choose_strategy
from cordee.strategies.table import STRATEGIES, usual_strategy
from cordee.training.components import Components

log = logging.getLogger("cordee.planner")

QUICK_STEP_S = 0.05  # a model whose step takes no longer is profiled on the spot
QUICK_BUDGET_S = 0.4


@dataclass(frozen=True)
class Decision:
    """The strategy a run gets. `prediction` is None where nothing was known to predict from."""

    job: Job
    prediction: Prediction | None
    reason: str
    is_sure: bool = True  # what it is predicted from was measured on a quiet machine


def plans_first(asked: Job) -> bool:
    """Return whether `decide` may measure: then nothing else should run in the meantime."""
    workers = asked.strategy.workers
    return asked.strategy.name == "auto" and workers > 1 and kept_machine().has_exchanges(workers)


def decide(asked: Job, parts: Components, *, may_measure: bool = True) -> Decision:
    """Return what `asked`, the job before 'auto' was replaced, should run as.

    `parts` are those of the plain rule's job, which is what stays where there is nothing better. Cheap: see above;
    without `may_measure` nothing is measured at all.
    """
    is_auto = asked.strategy.name == "auto"
    work, is_sure, why_not = _work(parts, may_measure=may_measure and plans_first(asked))
    if work is None:
        return Decision(parts.job, None, why_not)
    workers = parts.job.strategy.workers
    predictions = [p for p in search(work, workers, refused_slices(parts.model, workers)) if p.workers == workers]
    if not is_auto:
        reason = "the strategy is the one that the job says"
        prediction = _as_asked(parts.job, work)
        return Decision(parts.job, prediction, reason, is_sure or (prediction is not None and prediction.num_runs > 0))
    usual = next((p for p in predictions if p.strategy == parts.job.strategy.name), None)
    for prediction, job in _that_run(asked, parts, predictions) if is_sure else ():
        if usual is not None and usual.fits and prediction.step_s > usual.step_s * (1 - CLOSE):
            break  # equal, as far as can be predicted
        if prediction.strategy != parts.job.strategy.name:
            return Decision(job, prediction, _compared(prediction, usual))
    if usual is None:
        return Decision(parts.job, None, "the usual choice")
    reason = f"{usual.strategy}, {in_time(usual.step_s)} a step: {usual.note}"
    if not is_sure:
        reason += "; other programs were using the machine when that was measured, so nothing else was looked at"
    return Decision(parts.job, usual, reason, is_sure)


def predict_as(job: Job, parts: Components) -> Prediction | None:
    """Return what `job`, with its own strategy and numbers, is predicted to take; None where too little is known."""
    work, _, _ = _work(dataclasses.replace(parts, job=job), may_measure=False)
    return None if work is None else _as_asked(job, work)


def _work(parts: Components, *, may_measure: bool) -> tuple[Work | None, bool, str]:
    """Return what is to be predicted, whether it was measured on a quiet machine, or why nothing can be predicted."""
    profile, why_not = _profile(parts, may_measure=may_measure)
    if profile is None:
        return None, False, why_not
    workers, machine = parts.job.strategy.workers, kept_machine()
    if workers > 1 and not machine.has_exchanges(workers):
        return None, False, f"exchanges of {workers} workers were not measured: `cordee plan` does so"
    hardware = ThisMachine(machine, workers, free_memory_bytes())
    is_sure = not profile.was_busy and not machine.was_busy
    work = Work(profile, parts.job.training.batch_size, hardware, parts.job.training.accumulate, is_sure)
    return with_runs(work, read_runs(parts).ways, time.time()), is_sure, ""


def _as_asked(job: Job, work: Work) -> Prediction | None:
    """Return the prediction for the strategy with the job's own numbers, or its defaults."""
    name, workers, settings = choose_strategy(job), job.strategy.workers, dict(job.strategy.settings)
    if workers == 1 and STRATEGIES[name].cost_model == "replicas":  # what is left of a team
        name = usual_strategy(1)
    if not STRATEGIES[name].axis and "mesh" not in settings:
        return None
    if STRATEGIES[name].cost_model not in MODELS:
        return None  # a round is as long as its clients: it is not predicted
    mesh = mesh_of(Candidate(strategy=name, workers=workers, settings=settings))
    if mesh.pipeline > 1:
        share_size = max(1, work.batch_size // mesh.num_shares)
        settings["microbatches"] = settings.get("microbatches") or usual_microbatches(mesh.pipeline, share_size)
        if job.training.recompute:
            settings.pop("recompute", None)  # the profile has it
        num_chunks = settings.get("stages") or num_chunks_of(settings.get("schedule", "1f1b"), mesh.pipeline)
        if num_chunks > len(work.profile.blocks):
            return None
    try:
        return predict(Candidate(strategy=name, workers=workers, settings=settings), work)
    except JobError as error:  # a placement of parts of the profile's blocks
        log.info("the step is not predicted: %s", error)
        return None


def _profile(parts: Components, *, may_measure: bool) -> tuple[ModelProfile | None, str]:
    key = profile_key(parts)
    profile = read_kept("profiles", key, ModelProfile)
    if profile is not None or not may_measure:
        return profile, "the model was not profiled: `cordee plan` does so"
    if LIVE_PREFIX in str(parts.job.to_dict()) or isinstance(parts.splits.train, IterableSource):
        return None, "the model was not profiled: its parts exist in this process only, or its data is a stream"
    try:
        step_s = estimate_step_s(parts)
        if step_s > QUICK_STEP_S:
            return None, f"the model was not profiled, as its step takes {in_time(step_s)}: `cordee plan` does so"
        busy = is_busy()
        profile = take_profile(assemble_alone(parts.job), budget_s=QUICK_BUDGET_S)
        profile = msgspec.structs.replace(profile, was_busy=busy)
    except Exception as error:  # noqa: BLE001 - a model that cannot be profiled may still be trained
        return None, f"the model could not be profiled: {type(error).__name__}: {error}"
    keep("profiles", key, profile)
    return profile, ""


def _that_run(asked: Job, parts: Components, predictions: list[Prediction]) -> Iterator[tuple[Prediction, Job]]:
    """Yield what fits and would be accepted with the job's own settings, the fastest first."""
    for prediction in predictions:
        is_automatic = STRATEGIES[prediction.strategy].is_automatic
        if is_automatic and is_candidate(prediction) and refusal(asked, parts, prediction) is None:
            yield prediction, job_as(asked, prediction)


def _compared(choice: Prediction, usual: Prediction | None) -> str:
    reason = f"{choice.label}, {in_time(choice.step_s)} a step: {choice.note}"
    if usual is None:
        return reason
    why = "does not fit into memory" if not usual.fits else f"would take {in_time(usual.step_s)}"
    return f"{reason}; {usual.strategy} {why}"


class Replanner:
    """A sink that sees every team that is formed. Where its size is another, it emits the event `plan`.

    The strategy of a run that is under way stays: those that can lose and gain workers are not worth giving up for a
    few percent, and the others have their size for good. A strategy that is predicted to be faster is proposed: a
    run that is ended and resumed continues with it from the last step. Takes milliseconds, in the launcher.
    """

    def __init__(self, asked: Job, parts: Components, emit: Callable[[AnyEvent], None]) -> None:
        """`asked` is the job before 'auto' was replaced, `parts` are those it runs with."""
        self._asked, self._parts, self._emit = asked, parts, emit
        self._num_workers = parts.team.num_workers

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, events.Generation) and len(event.members) != self._num_workers:
            self._num_workers = len(event.members)
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
            events.Plan(
                workers=num_workers,
                strategy=current.strategy.name,
                predicted_step_seconds=own.step_s if own else None,
                best=best.strategy if best else None,
                best_step_seconds=best.step_s if best else None,
                reason=decision.reason,
            )
        )
        if own is None or best is None or best.strategy == current.strategy.name or num_workers == 1:
            return
        self._emit(
            events.Warned(
                message=f"with {num_workers} workers {best.label} is predicted to take {in_time(best.step_s)} a step, "
                f"and {current.strategy.name} {in_time(own.step_s)}: to change, end the run and continue with --resume "
                f"--workers {num_workers} --strategy {best.strategy}"
            )
        )


def _with(job: Job, num_workers: int, name: str) -> Job:
    strategy = msgspec.structs.replace(job.strategy, workers=num_workers, name=name)
    return msgspec.structs.replace(job, strategy=strategy)
