"""What the launcher of a dispatched run finds out from the job's components, and whether there can be such a run."""

from __future__ import annotations

from typing import Any

import msgspec

from cordee.core.errors import JobError
from cordee.data.source import fingerprint
from cordee.monitoring.events import RunStarted
from cordee.strategies.table import elastic_teams
from cordee.training.callbacks import refuse_on_step
from cordee.training.components import Components


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher knows of the job's components, so that the coordinator need not build them."""

    num_samples: int
    total_steps: int
    counts_classes: bool
    has_test: bool
    groups: list[dict[str, Any]]  # settings of the optimizer's, before schedule and scale
    lr_factor: float
    lower_is_better: tuple[str, ...] = ()  # metrics of which less is better
    dtype: str = "float32"  # of the parameters
    data: str  # its fingerprint
    description: RunStarted  # without its place

    @classmethod
    def of(cls, components: Components) -> RunFacts:
        num_samples, total_steps = components.splits.train.num_samples, components.total_steps
        assert num_samples is not None and total_steps is not None
        trained = [parameter for parameter in components.model.parameters() if parameter.requires_grad]
        return cls(
            num_samples=num_samples,
            total_steps=total_steps,
            counts_classes=components.splits.num_classes is not None,
            has_test=components.test is not None,
            groups=[dict(group) for group in components.recipe.groups],
            lr_factor=components.recipe.lr_factor,
            lower_is_better=tuple(components.lower_is_better),
            dtype=str(trained[0].dtype).removeprefix("torch."),
            data=fingerprint(components.splits),
            description=components.describe(),
        )


def check_dispatched(components: Components) -> None:
    """Raise JobError for a job whose work cannot be handed out, before anything is started."""
    if components.splits.train.num_samples is None:
        raise JobError(
            f"strategy '{components.job.strategy.name}' hands out samples by their number, and a stream has none: "
            f"use a Dataset with a length, or strategy {elastic_teams()}"
        )
    refuse_on_step(components.callbacks, components.job.strategy.name)
