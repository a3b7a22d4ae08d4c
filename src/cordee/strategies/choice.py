"""Which strategy a job gets, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cordee.compute import Computation
from cordee.core import Job
from cordee.core.errors import JobError, nearest
from cordee.core.job import read_section
from cordee.core.settings import Section
from cordee.strategies.data_parallel import DataParallel, DataParallelSettings
from cordee.strategies.hybrid import HybridSettings, borrowed_keys, make_hybrid
from cordee.strategies.parameter_server import ParameterServer, ParameterServerSettings
from cordee.strategies.pipeline import Pipeline, PipelineSettings
from cordee.strategies.sharded import Sharded, ShardedSettings
from cordee.strategies.single import Single, SingleSettings
from cordee.strategies.strategy import Strategy
from cordee.strategies.tensor import TensorParallel, TensorSettings


class Entry(NamedTuple):
    """A strategy, and the keys of [strategy] that are its own."""

    make: Callable[[Job, Any, Computation], Any]  # a Strategy, unless it is served
    settings: type[Section]
    can_reproduce: bool = False  # knows training.reproducible
    is_served: bool = False  # its workers take work from a dispatcher, each at its own pace
    borrowed_keys: Callable[[Mapping[str, Any]], Sequence[str]] = lambda given: ()  # keys it hands on to others


STRATEGIES: Mapping[str, Entry] = {
    "data_parallel": Entry(DataParallel, DataParallelSettings, can_reproduce=True),
    "hybrid": Entry(make_hybrid, HybridSettings, borrowed_keys=borrowed_keys),
    "parameter_server": Entry(ParameterServer, ParameterServerSettings, can_reproduce=True, is_served=True),
    "pipeline": Entry(Pipeline, PipelineSettings),
    "sharded": Entry(Sharded, ShardedSettings),
    "single": Entry(Single, SingleSettings, can_reproduce=True),
    "tensor": Entry(TensorParallel, TensorSettings),
}


def choose_strategy(job: Job) -> str:
    """Return the name of the strategy the job asks for. Raises JobError for one that is not known.

    'auto' is `single` for one worker and `data_parallel` for more.
    """
    name = job.strategy.name
    if name == "auto":
        return "single" if job.strategy.workers == 1 else "data_parallel"
    if name not in STRATEGIES:
        raise JobError(
            f"strategy.name = '{name}' is not known{nearest(name, [*STRATEGIES, 'auto'])} "
            f"(this version has: auto, {', '.join(sorted(STRATEGIES))})"
        )
    return name


def make_strategy(job: Job, computation: Computation) -> Strategy:
    """Return the job's strategy, ready for `setup`. Raises JobError for settings it does not have."""
    name = choose_strategy(job)
    entry = STRATEGIES[name]
    refuse_others_settings(job)
    if job.training.reproducible and not entry.can_reproduce:
        able = [other for other, known in STRATEGIES.items() if known.can_reproduce]
        raise JobError(
            f"training.reproducible = true is for {_listed(able)}, the job's strategy is '{name}': "
            "set reproducible = false, or one of these strategies"
        )
    borrowed = entry.borrowed_keys(job.strategy.settings)
    own = {key: value for key, value in job.strategy.settings.items() if key not in borrowed}
    strategy: Strategy = entry.make(job, read_section("strategy", own, entry.settings), computation)
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
                f"strategy.{key} is a setting of {_listed(owners)}, the job's strategy is {asked}: "
                f"remove it, or set strategy.name = '{owners[0]}'"
            )
        if key not in own:
            raise JobError(f"[strategy] has no key '{key}'{nearest(key, own)} (it has: {', '.join(sorted(own))})")


def _own_keys(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    return (*STRATEGIES[name].settings.__struct_fields__, *STRATEGIES[name].borrowed_keys(given))


def _owners(key: str) -> list[str]:
    return [name for name, entry in STRATEGIES.items() if key in entry.settings.__struct_fields__]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
