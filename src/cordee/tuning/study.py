"""A search in a folder: an Optuna study in SQLite, which says what was tried and what to try next.

Whoever is killed loses nothing: a trial is in the storage before its process starts, has the number of its directory,
and is told to the storage once. A trial that was under way is continued from its run directory.
"""

from __future__ import annotations

import contextlib
import math
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cordee.core import Job
from cordee.core.errors import JobError, MissingExtraError, RunDirectoryError
from cordee.core.job import changed_keys
from cordee.core.seeds import derive_seed
from cordee.tuning.space import Choice, Dimension, describe

try:
    import optuna
except ImportError:
    raise MissingExtraError("cordee tune", "tune") from None

STORAGE_FILE = "study.db"
_NAME = "tune"
_JOB, _SEARCH, _METRIC, _ERROR = "job", "search", "metric", "error"
# What may differ from call to call: it does not change what is learnt.
_CHANGEABLE = ("python_path", "cluster.", "checkpoint.", "monitoring.")
_STARTUP_TRIALS = 4  # that are drawn at random, and that are never pruned
State = optuna.trial.TrialState
Direction = Literal["maximize", "minimize"]
_STATES = {State.COMPLETE: "completed", State.PRUNED: "pruned", State.FAIL: "failed"}


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One trial that has ended."""

    number: int
    state: str  # completed, pruned, failed
    value: float | None  # what the last evaluation measured
    point: dict[str, Any]  # the values of the searched keys
    evaluations: int
    seconds: float | None
    error: str = ""


class Study:
    """The study of one folder. Made by `open_study`."""

    def __init__(self, study: optuna.Study, space: Sequence[Dimension], seed: int) -> None:
        self._study = study
        self._distributions = {each.key: _distribution(each) for each in space}
        # Another stream for each time that the study is opened: else a resumed search would repeat its first points.
        stream = derive_seed(seed, "tune", len(study.trials)) % 2**32
        with _quiet():
            study.sampler = optuna.samplers.TPESampler(
                seed=stream, n_startup_trials=_STARTUP_TRIALS, constant_liar=True
            )

    @property
    def is_maximized(self) -> bool:
        return bool(self._study.direction == optuna.study.StudyDirection.MAXIMIZE)

    def prune_by_median(self, is_wanted: bool) -> None:
        """Have trials end early that are worse than the median of the others after as many evaluations, or none."""
        self._study.pruner = (
            optuna.pruners.MedianPruner(
                n_startup_trials=_STARTUP_TRIALS, n_warmup_steps=2
            )  # not by the first evaluation
            if is_wanted
            else optuna.pruners.NopPruner()
        )

    def unfinished(self) -> list[int]:
        """Return the trials that were begun and not told: those of a search that was killed or interrupted."""
        return [trial.number for trial in self._study.get_trials(deepcopy=False, states=(State.RUNNING,))]

    def count(self) -> int:
        """Return how many trials there are, those under way included."""
        return len(self._study.get_trials(deepcopy=False))

    def begin(self) -> int:
        """Draw another trial; return its number."""
        with _quiet():
            return int(self._study.ask(self._distributions).number)

    def point(self, number: int) -> dict[str, Any]:
        """Return the values of a trial, drawn now where a search was killed in between."""
        trial = self._trial(number)
        with _quiet():
            return {key: trial._suggest(key, distribution) for key, distribution in self._distributions.items()}

    def report(self, number: int, place: int, value: float) -> bool:
        """Record an evaluation; return whether the trial should end here."""
        trial = self._trial(number)
        with _quiet():
            if place not in self._study.get_trials(deepcopy=False)[number].intermediate_values:
                trial.report(value, place)
            return bool(trial.should_prune())

    def complete(self, number: int, value: float) -> None:
        self._study.tell(number, value)

    def prune(self, number: int) -> None:
        with _quiet():
            self._study.tell(number, state=State.PRUNED)

    def fail(self, number: int, error: str) -> None:
        self._trial(number).set_user_attr(_ERROR, error)
        with _quiet():
            self._study.tell(number, state=State.FAIL)

    def ended(self) -> list[Tried]:
        """Return the trials that have ended, in their order."""
        found = self._study.get_trials(deepcopy=False, states=tuple(_STATES))
        return [_tried(trial) for trial in found]

    def best(self) -> Tried | None:
        """Return the best trial that was completed."""
        completed = [trial for trial in self.ended() if trial.state == "completed" and trial.value is not None]
        if not completed:
            return None
        sign = -1 if self.is_maximized else 1
        return min(completed, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    def importances(self) -> dict[str, float]:
        """Return the share of the spread of the results that each key explains (fANOVA); none where too few are known.

        Only completed trials count.
        """
        completed = [trial for trial in self.ended() if trial.state == "completed"]
        if len(completed) < _STARTUP_TRIALS or len({trial.value for trial in completed}) < 2:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        with _quiet():
            found = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        return {key: float(share) for key, share in found.items()}

    def _trial(self, number: int) -> optuna.Trial:
        found = self._study.get_trials(deepcopy=False)[number]
        return optuna.Trial(self._study, found._trial_id)


def open_study(
    folder: Path, job: Job, space: Sequence[Dimension], metric: str, direction: Direction, seed: int
) -> Study:
    """Return the study in a folder, made if there is none.

    Raises JobError if the folder has the study of another job, search or metric, RunDirectoryError if it is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = folder / STORAGE_FILE
    asked = {_JOB: tomllib.loads(job.to_toml()), _SEARCH: describe(space), _METRIC: metric}
    try:
        # A killed process may leave the file locked for an instant.
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 30.0}})
        study = optuna.create_study(storage=storage, study_name=_NAME, direction=direction, load_if_exists=True)
        known = study.user_attrs
        _refuse_another(folder, known, asked)
        for key in asked.keys() - known.keys():
            study.set_user_attr(key, asked[key])
    except (JobError, KeyboardInterrupt):
        raise
    except Exception as error:  # SQLAlchemy, alembic and SQLite have errors of their own
        raise RunDirectoryError(f"{path} is not a study that can be read: {_first_line(error)}") from error
    return Study(study, space, seed)


def _refuse_another(folder: Path, known: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for key in (_SEARCH, _METRIC):
        if known.get(key, asked[key]) != asked[key]:
            raise JobError(
                f"{folder} has a search with --{key} {known[key]!r}, not {asked[key]!r}: choose another --folder"
            )
    if changes := changed_keys(known.get(_JOB, asked[_JOB]), asked[_JOB], _CHANGEABLE):
        raise JobError(f"{folder} has a search of another job ({'; '.join(changes[:3])}): choose another --folder")


def _distribution(each: Dimension) -> optuna.distributions.BaseDistribution:
    if isinstance(each, Choice):
        return optuna.distributions.CategoricalDistribution(each.texts)
    if each.is_whole:
        # The upper bound is one that steps from the lower one reach, as Optuna wants it.
        high = int(each.low) + (int(each.high) - int(each.low)) // each.step * each.step
        return optuna.distributions.IntDistribution(int(each.low), high, step=each.step)
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.is_log)


def _tried(trial: optuna.trial.FrozenTrial) -> Tried:
    values = trial.intermediate_values
    last = values[max(values)] if values else None
    value = trial.value if trial.state == State.COMPLETE else last
    took = trial.duration.total_seconds() if trial.duration is not None else None
    return Tried(
        number=trial.number,
        state=_STATES[trial.state],
        value=value if value is not None and math.isfinite(value) else None,
        point=dict(trial.params),
        evaluations=len(values),
        seconds=took,
        error=str(trial.user_attrs.get(_ERROR, "")),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Optuna warns of: that parts of it are experimental, or that a value was reported before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
