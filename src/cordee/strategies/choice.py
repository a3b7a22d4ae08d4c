"""Which strategy a job gets, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cordee.compute import Computation
from cordee.core import Job
from cordee.core.errors import JobError, nearest
from cordee.core.job import read_section
from cordee.strategies.strategy import Strategy
from cordee.strategies.table import STRATEGIES, Entry, quote_names, strategies_where, usual_strategy

# Imported here rather than when a job asks for one, so that a fork server has them all before it forks.
_MAKERS = {name: entry.make for name, entry in STRATEGIES.items()}


def choose_strategy(job: Job) -> str:
    """Return the name of the strategy the job asks for. Raises JobError for one that is not known.

    'auto' is the usual strategy for the number of workers.
    """
    name = job.strategy.name
    if name == "auto":
        return usual_strategy(job.strategy.workers)
    if name not in STRATEGIES:
        raise JobError(
            f"strategy.name = '{name}' is not known{nearest(name, [*STRATEGIES, 'auto'])} "
            f"(this version has: auto, {', '.join(sorted(STRATEGIES))})"
        )
    return name


def entry_of(job: Job) -> Entry:
    """Return the entry of the job's strategy, which may be 'auto'."""
    return STRATEGIES[choose_strategy(job)]


def make_strategy(job: Job, computation: Computation) -> Strategy:
    """Return the job's strategy, ready for `setup`. Raises JobError for settings it does not have."""
    name = choose_strategy(job)
    entry = STRATEGIES[name]
    refuse_others_settings(job)
    if job.training.reproducible and not entry.can_reproduce:
        able = strategies_where(lambda entry: entry.can_reproduce)
        raise JobError(
            f"training.reproducible = true is for {quote_names(able, 'and')}, the job's strategy is '{name}': "
            "set reproducible = false, or one of these strategies"
        )
    if job.training.compile is True and not entry.can_compile:
        able = strategies_where(lambda entry: entry.can_compile)
        raise JobError(
            f"training.compile = true is for {quote_names(able, 'and')}, the job's strategy is '{name}': remove it, or "
            "set one of these strategies"
        )
    borrowed = _borrowed_keys(name, job.strategy.settings)
    own = {key: value for key, value in job.strategy.settings.items() if key not in borrowed}
    strategy: Strategy = _MAKERS[name](job, read_section("strategy", own, entry.settings), computation)
    strategy.requirements(job)
    return strategy


def foreign_settings(name: str, given: Mapping[str, Any]) -> list[str]:
    """Return the settings among those given that other strategies have, and this one has not."""
    own = _own_keys(name, given)
    return [key for key in given if key not in own and _owners(key)]


def refuse_others_settings(job: Job) -> None:
    """Raise JobError for a setting that the job's strategy does not have, and say whose it is."""
    name, given = choose_strategy(job), job.strategy.settings
    is_auto = job.strategy.name == "auto"
    asked = f"'auto', which takes '{name}' here" if is_auto else f"'{name}'"
    own = _own_keys(name, given)
    for key in given:
        owners = _owners(key)
        if key not in own and owners:
            raise JobError(
                f"strategy.{key} is a setting of {quote_names(owners, 'and')}, the job's strategy is {asked}: "
                f"remove it, or set strategy.name = '{owners[0]}'"
            )
        if key not in own:
            raise JobError(f"[strategy] has no key '{key}'{nearest(key, own)} (it has: {', '.join(sorted(own))})")


def _own_keys(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    return (*STRATEGIES[name].settings.__struct_fields__, *_borrowed_keys(name, given))


def _borrowed_keys(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that a strategy hands on to those on its mesh."""
    mesh = given.get("mesh", {})
    if STRATEGIES[name].axis or not isinstance(mesh, Mapping):
        return ()
    others = [entry for entry in STRATEGIES.values() if entry.splits_model and entry.axis in mesh]
    return tuple(key for entry in others for key in entry.settings.__struct_fields__)


def _owners(key: str) -> list[str]:
    return strategies_where(lambda entry: key in entry.settings.__struct_fields__)
