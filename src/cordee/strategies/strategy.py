"""What every way of training together has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cordee.checkpoint import Slices, State
from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes
from cordee.compute.outputs import describe
from cordee.core import Batch, Job, tree
from cordee.core.errors import JobError, ModelError


@dataclass(frozen=True)
class Requirements:
    """What a strategy needs before it is started."""

    num_workers: int
    num_data_shards: int  # parts a batch is cut into; workers that split a model between them share a part

    # Whether a batch may be computed in parts, by several workers or one after the other, accumulation aside.
    cuts_batches: bool = True

    num_steps: int | None = None  # of the job, where the strategy's own settings say how long it is

    def data_shard(self, worker_index: int) -> int:
        """Return which part of each batch a worker computes. Neighbours in number share one."""
        return worker_index * self.num_data_shards // self.num_workers

    def cut_by(self, job: Job) -> str | None:
        """Return what has batches computed in parts, in words; None if nothing does."""
        if job.training.accumulate > 1:
            return "training.accumulate"
        return f"strategy '{job.strategy.name}'" if self.cuts_batches else None


def require_samples(job: Job, number: int, kind: str = "workers") -> None:
    """Raise JobError if a batch has fewer samples than there are workers, or replicas of the model."""
    if job.training.batch_size < number:
        raise JobError(
            f"training.batch_size = {job.training.batch_size} has no sample for each of {number} {kind}: "
            f"set batch_size to at least {number}, or use fewer {kind}"
        )


def require_plain(model: nn.Module, example: Batch, computation: Computation, who: str) -> None:
    """Raise ModelError where a model does not take one tensor and return one, or computes its loss itself."""
    advice = "use 'data_parallel', 'sharded' or 'parameter_server', or a model of one tensor in and one out"
    if computation.loss.argument is not None:
        raise JobError(f"loss.use = 'model' has the model compute its loss, which {who} cannot have: {advice}")
    for part, value in (("inputs", example.inputs), ("targets", example.targets)):
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{who} needs a batch of one tensor of inputs and one of targets; the {part} of this data are "
                f"{tree.describe(value)}: {advice}"
            )
    device = next((p.device for p in model.parameters()), "cpu")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(example.inputs.to(device))
    finally:
        model.train(was_training)
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"{who} needs a model that returns one tensor, and this one returns {describe(outputs)}: {advice}"
        )


@dataclass(frozen=True)
class Update:
    """What an optimizer step did."""

    lr: float
    gradient_norm: float | None = None  # measured only where it is clipped
    warning: str | None = None  # what the user should know, said once


class Strategy(Protocol):
    """One row of the strategy table: who has which data and parameters, and when they agree.

    A launcher calls `requirements` and `check`; the trainer calls `setup` once, and again with each team that is
    formed again, then `forward_backward` and `update` in turn. From `setup` on all are collective: every member
    of the team calls them in the same order.
    """

    model: nn.Module  # as this worker evaluates it

    def requirements(self, job: Job) -> Requirements:
        """Return what the job needs; raises JobError if the strategy cannot run it. Pure."""

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        """Raise a CordeeError if the model or the optimizer cannot be trained this way. Local; before workers start."""

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        """Take the model over and make the optimizer. `example` is a batch of the data, of two samples at most."""

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        """Compute the gradient of the mean loss over the whole batch, of which this worker has a share.

        Returns the loss of the whole batch and the sum of all workers' votes, each asked for at the end of its
        own computing; `measure` asks for accuracy as well.
        """

    def update(self, step: int) -> Update:
        """Agree with the others and take optimizer step `step`."""

    def skip(self, step: int) -> Update:
        """Leave out optimizer step `step`, for which no worker had anything to count. Local.

        Weights and optimizer state, its counters included, stay as they are; gradients are dropped.
        """

    def consolidate(self) -> None:
        """Make `model` what the team as a whole has learnt, before it is evaluated or saved."""

    def swap_averages(self) -> None:
        """Exchange the weights that are here and their moving averages, until the next call. Local.

        For where `training.ema` is set: `consolidate` then makes `model` of the averages.
        """

    def state_dict(self) -> State:
        """Return everything that training continues from; independent of how many workers there are.

        Complete on the first worker; what the others get they must not use.
        """

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, which any strategy may have made."""


class TrainsAlone(ABC):
    """What a strategy has beside the above whose members take steps alone, and agree after some of them.

    The trainer calls `train_alone` for each batch and, after `sync_every` of them, at the end of the run, or with a
    team that was formed again, `agree` and then `update` or `skip`. Nothing is exchanged in between: what members do
    together (evaluate, save, stop, be compared) they do where they have agreed. The steps since then are the *window*.
    A window that could not be ended, because a member was lost, is taken along into the next team by those who are
    left. `state_dict` is always that of the last agreement, but for what each worker has its own of.
    """

    sync_every: int

    @property
    @abstractmethod
    def has_window(self) -> bool:
        """Whether this worker has taken steps since all agreed."""

    @abstractmethod
    def train_alone(self, microbatches: Sequence[Batch], *, step: int, measure: bool) -> None:
        """Take optimizer step `step` with this worker's share of the batch alone. Local."""

    @abstractmethod
    def agree(self, vote: Callable[[], Votes], *, is_end: bool) -> Loss:
        """Exchange what members did alone; return the loss of the window over all members, and the sum of the votes.

        Collective; a member without a window takes part. With `is_end` everything is agreed on, for no step follows.
        If it fails the window is as it was.
        """

    @abstractmethod
    def drop_window(self) -> None:
        """Forget the window, and continue from what members agreed on last. Local."""

    @abstractmethod
    def prepare_save(self) -> None:
        """Bring to the first worker what is saved of that which each worker has its own of. Collective."""

    @abstractmethod
    def agreed_state(self) -> State:
        """Return what all members have the same of."""

    @abstractmethod
    def update(self, step: int) -> Update:
        """Apply what was agreed on after `step`. Local."""

    @abstractmethod
    def skip(self, step: int) -> Update:
        """Apply nothing, where no member had anything to count in the whole window. Local."""


class SavesSlices(ABC):
    """What a strategy has beside the above that can save its state without putting it together."""

    @abstractmethod
    def slices(self) -> Slices | None:
        """Return what this worker has of the state; None where it has to be put together. Collective.

        Says None on every member, or on none.
        """


class Evaluated(NamedTuple):
    """A model that members compute with together: every member has as many passes, each of samples of its own."""

    model: nn.Module
    take_part: Callable[[], object]  # in a pass for which this member has no sample


class EvaluatesTogether(ABC):
    """What a strategy has beside the above whose model can be measured without putting it together."""

    @abstractmethod
    def evaluation(self) -> AbstractContextManager[Evaluated | None]:
        """Inside, the model is as it is to be measured; None where it has to be put together. Collective.

        Says None on every member, or on none.
        """

    @abstractmethod
    def weights_sha256(self) -> str | None:
        """Return `checkpoint.weights_sha256` of the whole model; None as above. Collective."""
