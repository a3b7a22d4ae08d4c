"""What runs of a job took before, and what that says of the next one. Pure.

The cache has a file for each job: what is trained, how, and on which machine. In it is each way that the job was run,
a strategy with its workers and settings, with the newest runs (`recording` reads and writes it).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from cordee.core.job import read_section
from cordee.planner.pipelines import usual_microbatches
from cordee.planner.prediction import Candidate, Prediction, mesh_of
from cordee.strategies.table import STRATEGIES, CostModel, strategies_on

MOST_RUNS = 5  # of a way that are kept, the newest
MOST_WAYS = 64  # of a job, those that were run last
LONGEST_AGE_S = 90 * 86_400.0  # of a run that is counted: a machine changes
FAR_OFF = 3.0  # times the model's prediction: a single run so far off is not believed until a second one agrees

# Deviations of the logarithms of step times, of the model's predictions by cost model, and of runs. With these, nine of
# ten runs of the 49 cases in benchmarks/results/planner-2026-11-16.json are in the intervals of plans of other rounds.
MODEL_SPREADS: Mapping[CostModel, float] = {"stages": 0.19, "slices": 0.24, "mesh": 0.24}
MODEL_SPREAD = 0.12
RUN_SPREAD = 0.16
LEAST_RUN_SPREAD = 0.02
NINE_TENTHS = 1.645  # deviations to both sides that nine of ten cases are within
# How much of the difference between runs and predictions other strategies on as many workers are taken to share: as
# much as one run moves its own prediction, so that their order stays. In those cases a quarter of the difference to
# a half takes one or two points off the errors, and all of it adds some.
SHARED = 0.35

Seconds = Annotated[float, Meta(gt=0, le=1e7)]
Share = Annotated[float, Meta(ge=0, le=1)]


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took, in the time in which nothing else used the machine."""

    step_s: Seconds  # the median of its windows
    ended: Annotated[float, Meta(gt=0, le=1e11)]  # unix seconds
    steps: Annotated[int, Meta(ge=1)]  # that were counted
    peak_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0  # of the worker that took most; 0: not known
    # Shares of the workers' time in steps; all 0 where they are not known.
    compute: Share = 0.0
    exchange: Share = 0.0
    wait: Share = 0.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way that a job was run, and its newest runs."""

    strategy: str
    workers: Annotated[int, Meta(ge=1)]
    settings: dict[str, Any] = {}  # as `plain_settings` has them
    runs: tuple[PastRun, ...] = ()

    @property
    def candidate(self) -> Candidate:
        return Candidate(strategy=self.strategy, workers=self.workers, settings=self.settings)

    def is_of(self, other: Candidate | Way) -> bool:
        return (self.strategy, self.workers, self.settings) == (other.strategy, other.workers, other.settings)


class PastRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The ways that a job was run, the one that was run last at the end."""

    ways: tuple[Way, ...] = ()

    def find(self, candidate: Candidate) -> Way | None:
        return next((way for way in self.ways if way.is_of(candidate)), None)


class Estimate(NamedTuple):
    """A step time, and the deviation of its logarithm from that of the next run."""

    step_s: float
    spread: float

    @property
    def interval(self) -> tuple[float, float]:
        """Between these nine of ten runs are expected."""
        factor = math.exp(NINE_TENTHS * self.spread)
        return self.step_s / factor, self.step_s * factor


def add_run(known: PastRuns, way: Way, run: PastRun) -> PastRuns:
    """Return what is known with one more run of a way."""
    before = next((each for each in known.ways if each.is_of(way)), way)
    now = msgspec.structs.replace(before, runs=(*before.runs, run)[-MOST_RUNS:])
    others = tuple(each for each in known.ways if not each.is_of(way))
    return PastRuns(ways=(*others, now)[-MOST_WAYS:])


def usable(runs: Sequence[PastRun], modelled_s: float | None, now: float) -> tuple[PastRun, ...]:
    """Return the runs that count: none from long ago or from the future, and no single one that is far off.

    `modelled_s` is what the model says of them, None where it says nothing.
    """
    recent = tuple(run for run in runs if 0 <= now - run.ended <= LONGEST_AGE_S)
    if len(recent) == 1 and modelled_s and not 1 / FAR_OFF < recent[0].step_s / modelled_s < FAR_OFF:
        return ()
    return recent


def estimate(modelled_s: float, model_spread: float | None, runs: Sequence[PastRun]) -> Estimate:
    """Return the mean of the model's prediction and the median of runs, each weighted by how far it can be trusted.

    `model_spread` is None for a prediction that cannot be trusted at all.
    """
    times = [math.log(run.step_s) for run in runs]
    spread = RUN_SPREAD
    if len(times) >= 3:
        spread = max(LEAST_RUN_SPREAD, statistics.pstdev(times))
    model_weight = 0.0 if model_spread is None else model_spread**-2
    run_weight = len(times) * spread**-2
    if not model_weight + run_weight:
        return Estimate(modelled_s, math.inf)
    median = statistics.median(times) if times else 0.0
    mean = (model_weight * math.log(modelled_s) + run_weight * median) / (model_weight + run_weight)
    return Estimate(math.exp(mean), math.sqrt(1 / (model_weight + run_weight) + spread**2))


def shift_of(ratios: Sequence[float]) -> float:
    """Return by what predictions are multiplied, for runs that took `ratios` times what was predicted of them."""
    return math.exp(SHARED * statistics.median(map(math.log, ratios))) if ratios else 1.0


def refine(prediction: Prediction, runs: Sequence[PastRun], shift: float, *, is_reliable: bool) -> Prediction:
    """Return what the model predicts together with what runs of the same way took.

    `shift` is what other runs on as many workers say; it counts where there are none of this way. Without
    `is_reliable` the model was measured beside other work, and says nothing.
    """
    if not prediction.step_s:
        return prediction
    cost_model = STRATEGIES[prediction.strategy].cost_model
    model_spread = MODEL_SPREADS.get(cost_model, MODEL_SPREAD) if is_reliable else None
    modelled_s = prediction.step_s if runs else prediction.step_s * shift
    found = estimate(modelled_s, model_spread, runs)
    interval = found.interval if math.isfinite(found.spread) else None
    factor = found.step_s / prediction.step_s
    compute_s, exchange_s = prediction.compute_s * factor, prediction.communication_s * factor
    idle_share = prediction.idle_share
    if phased := [run for run in runs if run.compute + run.exchange + run.wait > 0]:
        compute_s = statistics.median(run.compute for run in phased) * found.step_s
        exchange_s = statistics.median(run.exchange for run in phased) * found.step_s
        idle_share = statistics.median(run.wait for run in phased)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes]
    return msgspec.structs.replace(
        prediction,
        step_s=found.step_s,
        compute_s=compute_s,
        communication_s=exchange_s,
        idle_share=idle_share,
        memory_bytes=float(statistics.median(peaks)) if peaks else prediction.memory_bytes,
        samples_per_second=prediction.samples_per_second / factor,
        interval=interval,
        num_runs=len(runs),
    )


def plain_settings(strategy: str, workers: int, settings: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the settings of a strategy without those that are its defaults, so that equal ones look alike.

    Micro-batches are those that the strategy takes where the job leaves them to it.
    """
    given = dict(settings)
    mesh = mesh_of(Candidate(strategy=strategy, workers=workers, settings=given))
    if not STRATEGIES[strategy].axis:
        given["mesh"] = {axis: size for axis, size in given["mesh"].items() if size > 1}
    if mesh.pipeline > 1 and not given.get("microbatches"):
        given["microbatches"] = usual_microbatches(mesh.pipeline, batch_size / mesh.num_shares)
    kept: dict[str, Any] = {}
    for name in (strategy, *strategies_on(mesh)):
        section = STRATEGIES[name].settings
        own = {key: given[key] for key in section.__struct_fields__ if key in given}
        made = msgspec.to_builtins(read_section("strategy", own, section))
        plain = msgspec.to_builtins(section())
        kept |= {key: value for key, value in made.items() if key in own and value != plain.get(key)}
    return kept
