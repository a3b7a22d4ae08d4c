"""Measuring the model of a run on its test set, alone or with the other members of a team."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.compute import Metrics, evaluate
from cordee.compute.evaluation import Rows
from cordee.compute.schedules import PlateauSchedule
from cordee.core.errors import TrainingError
from cordee.core.shards import sum_shards
from cordee.core.stopping import StopPolicy
from cordee.data import Loader
from cordee.strategies.strategy import Evaluated, EvaluatesTogether, Strategy
from cordee.training.callbacks import RunCallbacks
from cordee.training.components import Components
from cordee.training.progress import Progress

_CLOSE = 1e-6  # hosts with other processors may differ in the last bits


def make_policy(components: Components) -> StopPolicy:
    """Return what says which evaluation is the best, and which ends the run."""
    job = components.job
    best_by = job.checkpoint.keep_best if isinstance(job.checkpoint.keep_best, str) else ""
    return StopPolicy(job.stop, lower_is_better=components.lower_is_better, best_by=best_by)


def why_stopped_before(policy: StopPolicy, progress: Progress) -> str | None:
    """Return why a resumed run had ended already: continuing would give other weights than it ended with. Pure."""
    if progress.step == 0:
        return None
    if progress.metrics is not None and progress.evaluated_at == progress.step:
        reason = policy.stop_reason(progress.metrics.get)
        if reason is not None:
            return reason
    return policy.after_step(progress.step, is_time_up=policy.is_time_up(progress.elapsed_s))


def take_up(components: Components, progress: Progress) -> None:
    """Let the schedule and the scale of the loss continue from where the progress has them. Local."""
    if isinstance(schedule := components.recipe.schedule, PlateauSchedule):
        schedule.load(progress.plateau)
    if (scale := components.computation.scale) is not None:
        scale.load(progress.loss_scale)


def measure(
    components: Components,
    model: nn.Module,
    test: Loader,
    should_stop: Callable[[], bool] = lambda: False,
    take_part: Callable[[], object] = lambda: None,
) -> Metrics | None:
    """Return what the model does on the test set; None if `should_stop` said so before the end.

    Collective. Raises TrainingError that names a metric which raises, gives no number, or differs between members.
    """
    team, shards = components.team, components.test_shards
    with contextlib.closing(test.batches(0)) as batches:
        metrics = evaluate(
            model,
            batches,
            components.computation,
            num_classes=components.splits.num_classes,
            metrics=components.metrics,
            should_stop=should_stop,
            num_parts=shards.num_held,
            combine=lambda values: sum_shards(values, shards, team.sum),
            share_rows=lambda own: _share_rows(own, team),
            take_part=take_part,
        )
    if metrics is None or not metrics.named or team.num_workers == 1:
        return metrics
    return replace(metrics, named=_agree(metrics.named, team))


@contextlib.contextmanager
def ready(components: Components, callbacks: RunCallbacks) -> Iterator[Evaluated]:
    """Inside, the strategy's model is what is to be measured: with `training.ema`, the average. Collective.

    It is there as a whole where callbacks may look at it. Whatever fails inside, this worker has its weights back
    afterwards.
    """
    strategy, is_whole = components.strategy, callbacks.has("on_evaluation")
    if not components.job.training.ema:
        with _evaluated(strategy, is_whole) as evaluated:
            yield evaluated
        return
    strategy.swap_averages()
    try:
        with _evaluated(strategy, is_whole) as evaluated:
            yield evaluated
    finally:
        strategy.swap_averages()
    if is_whole or not isinstance(strategy, EvaluatesTogether):
        strategy.consolidate()  # a stage may compute with the parameters of the model itself


@contextlib.contextmanager
def _evaluated(strategy: Strategy, is_whole: bool) -> Iterator[Evaluated]:
    with contextlib.ExitStack() as stack:
        evaluated = None
        if isinstance(strategy, EvaluatesTogether) and not is_whole:
            evaluated = stack.enter_context(strategy.evaluation())
        if evaluated is None:
            strategy.consolidate()
            evaluated = Evaluated(strategy.model, lambda: None)
        yield evaluated


def finish(components: Components, callbacks: RunCallbacks) -> str | None:
    """Make the model what the team has learnt, or return the hash of its weights if nobody looks at it. Collective."""
    strategy = components.strategy
    if isinstance(strategy, EvaluatesTogether) and not callbacks.has("on_end"):
        weights_sha256 = strategy.weights_sha256()
        if weights_sha256 is not None:
            return weights_sha256
    strategy.consolidate()
    return None


def _share_rows(own: Rows, team: Team) -> list[Rows]:
    """Return the rows of all members, in their order. Collective."""
    if team.num_workers == 1:
        return [own]
    everybody = []
    for source in range(team.num_workers):
        state = State({"outputs": own.outputs, "targets": own.targets}, {"counts": own.counts})
        shared = checkpoint.share_state(state if source == team.worker_index else None, source)
        everybody.append(Rows(list(shared.values["counts"]), shared.tensors["outputs"], shared.tensors["targets"]))
    return everybody


def _agree(named: Mapping[str, float], team: Team) -> dict[str, float]:
    """Return the first member's values, which are everybody's. Collective."""
    rows = team.gather_rows([struct.unpack("<q", struct.pack("<d", value))[0] for value in named.values()])
    values = [[struct.unpack("<d", struct.pack("<q", bits))[0] for bits in row] for row in rows]
    for name, found in zip(named, zip(*values, strict=True), strict=True):
        _require_same(name, found, team)
    return dict(zip(named, values[0], strict=True))


def _require_same(name: str, found: Sequence[float], team: Team) -> None:
    for number, value in zip(team.numbers, found, strict=True):
        is_same = math.isclose(value, found[0], rel_tol=_CLOSE, abs_tol=1e-12) or value == found[0]
        if not is_same and not (math.isnan(value) and math.isnan(found[0])):
            raise TrainingError(
                f"metric '{name}' is {found[0]:.6g} on worker {team.numbers[0]} and {value:.6g} on worker {number}, of "
                "the same outputs and targets: it must not draw random numbers or depend on the process"
            )


class WithoutValue:
    """Which metrics gave no number, each told once: no rule that names them is met."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def find(self, metrics: Metrics, step: int) -> list[str]:
        """Return what to tell of an evaluation."""
        names = [name for name, value in metrics.named.items() if math.isnan(value) and name not in self._told]
        self._told.update(names)
        return [f"metric '{name}' has no value (NaN) at step {step}: it is left out of what follows" for name in names]
