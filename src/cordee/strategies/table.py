"""The table of strategies: all that the rest of the code knows of each. Pure; nothing here imports torch.

A new strategy is a module or folder beside this file, an entry here, and a test that compares it with `single`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cordee.core.mesh import Mesh
from cordee.core.settings import Section

RunKind = Literal["team", "dispatched", "rounds"]
# Which of the planner's formulas say what a strategy takes.
CostModel = Literal["alone", "replicas", "windows", "shards", "stages", "slices", "mesh", "servers", "clients"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A strategy."""

    maker: str  # "module:callable" of (job, settings, computation); returns the Strategy
    settings_class: str  # "module:class" of the keys of [strategy] that are its own
    cost_model: CostModel
    # In lockstep, with work from a dispatcher at each worker's own pace, or in rounds of clients.
    run_kind: RunKind = "team"
    axis: str = "data"  # of a mesh, that all its workers are along; "": the setting `mesh` says
    # What the time that it takes itself grows with, beside computing and exchanging: fields of the planner's Overhead.
    overhead_grows_with: tuple[str, ...] = ()
    can_reproduce: bool = False  # knows training.reproducible
    # Every worker has all that is needed to continue, so that a team may lose and gain members. Teams of other
    # strategies start again from the last checkpoint, with as many workers.
    is_elastic: bool = False
    can_balance: bool = False  # its workers may have shares of the batch of different sizes (cluster.balance)
    can_compile: bool = False  # its workers call the model as a whole, so that training.compile can compile it
    is_automatic: bool = True  # 'auto' may choose it; others have to be asked for by name

    @property
    def make(self) -> Callable[..., Any]:
        made: Callable[..., Any] = _load(self.maker)
        return made

    @property
    def settings(self) -> type[Section]:
        found: type[Section] = _load(self.settings_class)
        return found

    @property
    def is_alone(self) -> bool:
        """Whether it has one worker only."""
        return self.cost_model == "alone"

    @property
    def splits_model(self) -> bool:
        """Whether a worker holds a part of the model only."""
        return self.axis != "data"

    def mesh(self, workers: int, settings: Mapping[str, Any]) -> Mesh:
        """Return how its workers are laid out."""
        return Mesh(**{self.axis: workers}) if self.axis else Mesh(**settings["mesh"])


# The plainest first: of strategies that are as fast as each other, the one with less that can go wrong is chosen.
STRATEGIES: Mapping[str, Entry] = {
    "single": Entry(
        maker="cordee.strategies.single:Single",
        settings_class="cordee.strategies.single:SingleSettings",
        cost_model="alone",
        can_compile=True,
        can_reproduce=True,
        is_elastic=True,
    ),
    "data_parallel": Entry(
        maker="cordee.strategies.data_parallel:DataParallel",
        settings_class="cordee.strategies.data_parallel:DataParallelSettings",
        cost_model="replicas",
        overhead_grows_with=("step_s", "byte_s"),
        can_compile=True,
        can_reproduce=True,
        is_elastic=True,
        can_balance=True,
    ),
    "local_sgd": Entry(
        maker="cordee.strategies.local_sgd:LocalSgd",
        settings_class="cordee.strategies.local_sgd:LocalSgdSettings",
        cost_model="windows",
        can_compile=True,
        is_elastic=True,
        is_automatic=False,  # it does not compute what one worker computes
    ),
    "sharded": Entry(
        maker="cordee.strategies.sharded:Sharded",
        settings_class="cordee.strategies.sharded:ShardedSettings",
        cost_model="shards",
        axis="sharded",
        overhead_grows_with=("step_s", "part_s", "tensor_s", "byte_s"),
    ),
    "pipeline": Entry(
        maker="cordee.strategies.pipeline:Pipeline",
        settings_class="cordee.strategies.pipeline:PipelineSettings",
        cost_model="stages",
        axis="pipeline",
        overhead_grows_with=("step_s", "part_s"),
    ),
    "tensor": Entry(
        maker="cordee.strategies.tensor:TensorParallel",
        settings_class="cordee.strategies.tensor:TensorSettings",
        cost_model="slices",
        axis="tensor",
        overhead_grows_with=("part_s", "byte_s"),
    ),
    "hybrid": Entry(
        maker="cordee.strategies.hybrid:make_hybrid",
        settings_class="cordee.strategies.hybrid:HybridSettings",
        cost_model="mesh",
        axis="",
    ),
    "parameter_server": Entry(
        maker="cordee.strategies.parameter_server:ParameterServer",
        settings_class="cordee.strategies.parameter_server:ParameterServerSettings",
        cost_model="servers",
        run_kind="dispatched",
        overhead_grows_with=("step_s", "byte_s"),
        can_reproduce=True,
        is_automatic=False,  # it takes other processes, and evaluates in another place
    ),
    "federated": Entry(
        maker="cordee.strategies.federated:Federated",
        settings_class="cordee.strategies.federated:FederatedSettings",
        cost_model="clients",
        run_kind="rounds",
        is_automatic=False,  # it does not compute what one worker computes
    ),
}


def usual_strategy(num_workers: int) -> str:
    """Return what a job with so many workers gets where nothing says otherwise."""
    return "single" if num_workers == 1 else "data_parallel"


def strategies_where(test: Callable[[Entry], bool]) -> list[str]:
    """Return the names of the strategies whose entries pass a test, the plainest first."""
    return [name for name, entry in STRATEGIES.items() if test(entry)]


def elastic_teams(*, exchanging: bool = False) -> str:
    """Return the strategies whose teams may lose and gain workers, for advice; `exchanging`: in every step."""
    left_out = ("alone", "windows") if exchanging else ("alone",)
    return quote_names(strategies_where(lambda entry: entry.is_elastic and entry.cost_model not in left_out))


def strategies_on(mesh: Mesh) -> list[str]:
    """Return the strategies that split a model along the axes of a mesh that have two workers or more."""
    return strategies_where(lambda entry: entry.splits_model and mesh.used.get(entry.axis, 1) > 1)


def quote_names(names: Iterable[str], last: str = "or") -> str:
    """Return "'a', 'b' or 'c'"."""
    *before, end = [f"'{name}'" for name in names]
    return f"{', '.join(before)} {last} {end}" if before else end


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
