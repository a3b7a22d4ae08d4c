"""What one's own loop sees of the others: preparing, weighing, exchanging, comparing.

A batch of the script is the global batch: each worker computes its share, and gradients are weighted by the share's
size, so the loop computes the same on any number of workers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, SupportsFloat, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cordee.cluster import Team
from cordee.communication.exchange import AccumulatingExchange, broadcast, find_differences
from cordee.compute import share_threads
from cordee.compute.loop_parts import LoopParts
from cordee.core.errors import DataError, JobError, TrainingError
from cordee.core.fault_points import reach
from cordee.core.seeds import derive_seed
from cordee.loop.continuation import Continuation
from cordee.loop.loaders import LoopLoaders
from cordee.runs.script.member import ScriptMember
from cordee.training.commits import check_same_commits
from cordee.training.loop_state import LoopContents, LoopState

COMPARED_EVERY = 100  # exchanges; a comparison reads the weights once, an exchange and a step read them ten times
COMPARED_FIRST = 2  # the exchange by which a mistake of the script shows: one step has been taken
FLOAT32_BITS = 24  # up to which whole numbers, and so their sums, are exact
NUM_EXTRAS = 6  # numbers that travel with the gradients
COMMITS_TOLD = 64  # commits are counted modulo this number in an exchange, which is exact in all types of gradients

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LoopTeam:
    """What a script sees of the others. Alone, everything works and costs nothing."""

    def __init__(self, team: Team, member: ScriptMember | None = None) -> None:
        """`member` is this process as a worker of an elastic run, whose team is formed where the loop begins."""
        self._team = team
        self._parts = LoopParts()
        self._exchanges: list[AccumulatingExchange] = []
        self._loaders = LoopLoaders(is_place_kept=member is not None)
        self._progress = self._loaders.progress
        self._num_exchanges = 0
        self._seed = torch.initial_seed() % 2**62
        self._continuation = Continuation(self, member, self._progress)

    @property
    def worker_index(self) -> int:
        return self._team.worker_index

    @property
    def num_workers(self) -> int:
        return self._team.num_workers

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one to print, log and save."""
        return self._team.is_first

    def prepare(self, *things: Any) -> Any:
        """Give all workers the first one's weights, and each its share of every batch. Collective.

        Takes models, optimizers, schedulers and batches, any number in any order, in one call or several, and
        returns them in this order; one by itself is returned by itself. Batches may be a DataLoader, of which
        only the own share is read, or anything that yields the same batches on every worker. A model stays the
        same object: save and inspect it as always. Batch norms keep the statistics of each worker's shares.
        """
        if not things:
            raise JobError("team.prepare: give it models, optimizers and batches")
        self._continuation.check_preparing()
        models = [thing for thing in things if isinstance(thing, nn.Module)]
        seed = self._agree_on_start([model for model in models if self._parts.add_model(model)])
        prepared: list[Any] = []
        for thing in things:
            if isinstance(thing, Optimizer):
                self._parts.add_optimizer(thing)
            if isinstance(thing, LRScheduler):
                self._parts.add_scheduler(thing)
            if isinstance(thing, nn.Module | Optimizer | LRScheduler):
                prepared.append(thing)
            elif isinstance(thing, Iterable) and not isinstance(thing, str | bytes | Tensor | dict):
                prepared.append(self._loaders.share(thing, self.worker_index, self.num_workers, seed))
            else:
                raise JobError(
                    f"team.prepare: a {type(thing).__name__} is no model, no optimizer and no batches to iterate over"
                )
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(
        self,
        loss: Tensor,
        *,
        exchange: bool = True,
        batches: Iterable[Any] | None = None,
        count: SupportsFloat | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        """Add the gradients of the loss over everybody's samples of the present batch. Collective.

        `loss` is the mean over the worker's own samples of the batch that the loop over prepared batches has given
        last; `batches` says of which loader, where loops over several are open. A mean over something else, tokens
        or weights, comes with `count`: how many of them the worker's own loss is the mean of. With `reduction="sum"`
        losses are added up instead. With `exchange=False` gradients stay this worker's until the next call: for
        all but the last part when accumulating, to communicate once.
        """
        if reduction not in ("mean", "sum") or (reduction == "sum" and count is not None):
            raise JobError(f"team.backward: reduction = {reduction!r} must be 'mean', or 'sum' without a count")
        own_count = _checked(count)
        self._continuation.begin_exchange("team.backward", has_gradients=exchange)
        if self.num_workers == 1:
            self._parts.check_optimizers()
            self._loaders.count_samples(batches)
            if own_count != 0:
                loss.backward()  # type: ignore[no-untyped-call]
            reach("loop.computed")
            self._continuation.take_votes(0.0, float(loss.detach()) if exchange and loss.device.type == "cpu" else None)
            return
        if not self._parts.has_models:
            raise JobError("team.backward: call team.prepare(model, optimizer, batches) before the loop")
        self._parts.check_optimizers()
        with self._continuation.exchanging():
            self._add_up(loss, batches, own_count, reduction, exchange=exchange)

    def gather(self, values: Tensor, *, batches: Iterable[Any] | None = None) -> Tensor:
        """Return the rows of all workers, in order, each sample once. Collective; gradients do not flow.

        A value without rows, a loss say, is one row of each worker. `batches` says which loader the rows belong
        to, where loops over several are open.
        """
        self._continuation.begin_exchange("team.gather")
        values = values.detach()
        if values.ndim == 0:
            values = values.reshape(1)
        if self.num_workers == 1:
            return values
        if (loader := self._loaders.standing_in(batches, self.num_workers)) is not None:
            values = values[:0]  # a worker without samples has computed somebody else's
            loader.notice()
        with self._continuation.exchanging():
            return self._gather(values)

    def _gather(self, values: Tensor) -> Tensor:
        lengths = [torch.zeros(2, dtype=torch.int64) for _ in range(self.num_workers)]
        dist.all_gather(lengths, torch.tensor([len(values), self._progress.digest]))
        self._refuse_other_batches(index for index, each in enumerate(lengths) if each[1] != lengths[0][1])
        longest = max(int(length) for length, _ in lengths)
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.num_workers)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(length)] for part, (length, _) in zip(parts, lengths, strict=True)])

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over the workers. Collective.

        Raises DataError if a worker may have counted a sample that it computed in another's place: in the loop before,
        it had none of a batch, and the script did not ask whether (`batches.is_standing_in`).
        """
        self._continuation.begin_exchange("team.sum")
        unnoticed, self._progress.num_unnoticed = self._progress.num_unnoticed, 0
        with self._continuation.exchanging():
            *totals, digest_sum, num_unnoticed = self._team.sum([*values, self._short_digest(), float(unnoticed)])
        self._check_digest(digest_sum)
        if num_unnoticed:
            raise DataError(
                "team.sum: a batch was smaller than the team, and workers without a sample of it have computed its "
                "first one, which a sum over the loop counts again: add to it only if not batches.is_standing_in, or "
                "gather the rows with team.gather, which leaves them out"
            )
        return totals

    def print(self, *values: object) -> None:
        """Print on the first worker only."""
        if self.is_first:
            print(*values, flush=True)  # noqa: T201

    # Continuing -----------------------------------------------------------------------------------------------

    def state(self, **things: Any) -> LoopState:
        """Return what the loop continues from, by name: models, optimizers, schedulers, tensors, plain values. Local.

        `state.epoch` and the like are read and set as attributes. Call it once, with all that is prepared.
        """
        return self._continuation.make_state(things)

    def elastic(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Make `function` the loop that is continued: called again from the last commit when a worker is lost or joins.

        Collective. It calls `team.commit()` after each step. Where a run is not elastic, a loss ends it.
        """
        return self._continuation.wrap(function)

    def commit(self) -> None:
        """Have the loop continue from here when a worker is lost. Collective: all workers commit the same steps.

        Workers that join or leave do so here. Raises JobError outside of a function with `@team.elastic`.
        """
        self._continuation.commit()

    # Preparing ----------------------------------------------------------------------------------------------

    def _agree_on_start(self, models: Sequence[nn.Module]) -> int:
        """Give everybody the first worker's seed, and its values of these models."""
        self._seed = torch.initial_seed() % 2**62
        seed = torch.tensor([self._seed])
        if self.num_workers == 1 or self.is_waiting:
            return self._seed  # in an elastic run all get the state of one where the loop begins
        described = [(name, tuple(value.shape), str(value.dtype)) for m in models for name, value in _values(m)]
        everybody = self._team.gather(derive_seed(str(described)) % 2**62)
        odd = [index for index, other in enumerate(everybody) if other != everybody[0]]
        if odd:
            raise JobError(
                f"team.prepare: worker {odd[0]} has other models than worker 0: every worker must prepare the same, "
                "in the same order"
            )
        broadcast([seed, *(value.detach() for model in models for _, value in _values(model))])
        for model in models:
            self._add_exchange([parameter for parameter in model.parameters() if parameter.requires_grad])
        self._seed = int(seed)
        return self._seed

    def _add_exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exchange these gradients as well, but for those that are exchanged already."""
        known = {id(parameter) for each in self._exchanges for parameter in each.parameters} if parameters else set()
        new = [parameter for parameter in parameters if id(parameter) not in known]
        if new:
            self._exchanges.append(AccumulatingExchange(new, NUM_EXTRAS, is_first=self.is_first))
            self._parts.record_exchanged(new)

    # The place in the data, and another team ------------------------------------------------------------------

    def mark_progress(self) -> Callable[[], dict[str, Any]]:
        """Note where the loop is; return what gives it in plain values and places."""
        return self._loaders.mark_progress(self._seed)

    def continue_from(self, team: Team, progress: dict[str, Any]) -> None:
        """Continue as a member of `team` from what `mark_progress` has given somewhere. Local."""
        places = self._loaders.read_places(progress)
        if team is not self._team and team.generation:
            share_threads(team.threads, team.num_local_workers)
        self._team, self._seed = team, progress["seed"]
        self._loaders.continue_from(progress, places, self.worker_index, self.num_workers, self._seed)
        self._num_exchanges, self._exchanges = 0, []
        self._parts.forget_exchanged()
        if self.num_workers > 1:
            for model in self._parts.models:
                self._add_exchange([parameter for parameter in model.parameters() if parameter.requires_grad])

    def keep_place(self) -> None:
        """Have the place in the data be part of a state."""
        self._loaders.keep_place()

    def check_kept(self, contents: LoopContents) -> None:
        """Raise JobError for what was prepared and is not in the state."""
        self._parts.check_kept(contents.modules.values(), [*contents.optimizers.values(), *contents.stateful.values()])

    # Weighing -----------------------------------------------------------------------------------------------

    def _weight(self, batches: Iterable[Any] | None, count: float | None, reduction: str) -> float:
        """Return what this worker's loss counts for. Collective with a count."""
        if count is not None:
            own = count if self._loaders.standing_in(batches, self.num_workers) is None else 0.0
            total, digest_sum = self._team.sum([own, self._short_digest()])
            self._check_digest(digest_sum)
            return own / total if total else 0.0
        share = self._loaders.present_share(batches, self.num_workers)
        if reduction == "sum":
            return float(share.num_own > 0)
        return share.num_own / share.num_all

    # Exchanging and comparing -------------------------------------------------------------------------------

    def _add_up(
        self, loss: Tensor, batches: Iterable[Any] | None, count: float | None, reduction: str, *, exchange: bool
    ) -> None:
        """Add the weighted gradients of the loss to those that there are, and exchange them. Collective."""
        is_check_due = exchange and self._is_check_due()
        if is_check_due or self._num_exchanges == 0:
            self._parts.check_loss(loss)
        if is_check_due:
            self.compare()
        weight = self._weight(batches, count, reduction)
        self._loaders.count_samples(batches)
        self._add_exchange(self._parts.unexchanged())
        is_kept = weight > 0
        leftover = sum(each.begin_pass(is_kept=is_kept) for each in self._exchanges)
        try:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        finally:
            for each in self._exchanges:
                each.end_pass(is_kept=is_kept)
        reach("loop.computed")
        if exchange:
            is_told = loss.device.type == "cpu" and math.isfinite(weighted := float(loss.detach()) * weight)
            self._exchange(leftover, weighted if is_told else 0.0)
            reach("loop.exchanged")

    def _exchange(self, leftover: float, loss: float) -> None:
        """Sum what is local over the workers, in one call where there is one model."""
        self._num_exchanges += 1
        commits = self._continuation.num_commits % COMMITS_TOLD
        extras = [self._short_digest(), leftover, float(self._continuation.wants_halt), loss, commits, commits**2]
        if len(self._exchanges) == 1:
            digest_sum, leftover_sum, votes, loss, *told = self._exchanges[0].reduce_local(extras)
        else:
            # Who has gradients of which model differs between losses, and may between workers: first agree.
            wanted = [float(each.has_local) for each in self._exchanges]
            *counts, digest_sum, leftover_sum, votes, loss, one, other = self._team.sum([*wanted, *extras])
            told = [one, other]
            for each, num_wanting in zip(self._exchanges, counts, strict=True):
                if num_wanting:
                    each.reduce_local([0.0] * NUM_EXTRAS)
        self._check_commits(*told)
        self._check_digest(digest_sum)
        mean = leftover_sum / self.num_workers
        if not math.isclose(leftover, mean, rel_tol=1e-3, abs_tol=1e-30) and math.isfinite(mean):
            raise TrainingError(
                f"worker {self.worker_index} has gradients from before this team.backward that other workers do not "
                "have: use team.backward for every loss that depends on the data, in place of loss.backward()"
            )
        self._continuation.take_votes(votes, loss)

    def vote(self) -> None:
        """Agree on whether to halt where no exchange of gradients has done so. Collective."""
        commits = self._continuation.num_commits % COMMITS_TOLD
        votes, *told = self._team.sum([float(self._continuation.wants_halt), commits, commits**2])
        self._check_commits(*told)
        self._continuation.take_votes(votes, None)

    def _check_commits(self, total: float, total_of_squares: float) -> None:
        commits = self._continuation.num_commits
        check_same_commits(self._team, commits, total, total_of_squares, call="team.commit()")

    @property
    def team(self) -> Team:
        return self._team

    @property
    def is_waiting(self) -> bool:
        """Whether this is a worker of an elastic run whose loop has not begun."""
        return self._continuation.is_waiting

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Inside, the group of an elastic run may be formed; afterwards it is given up."""
        with self._continuation.closing():
            yield

    def _is_check_due(self) -> bool:
        number = self._num_exchanges + 1
        return number == COMPARED_FIRST or number % COMPARED_EVERY == 0

    def compare(self) -> None:
        """Raise TrainingError if the workers' copies are not the same. Collective."""
        if self.num_workers == 1 or not self._parts.has_models:
            return
        found = find_differences(self._parts.replicated())
        if found:
            name, members = next(iter(found.items()))
            others = f" and {len(found) - 1} more" if len(found) > 1 else ""
            workers = ", ".join(map(str, members))
            raise TrainingError(
                f"the workers' models are not the same any more: {name}{others} of worker{'s' * (len(members) > 1)} "
                f"{workers} differ{'s' * (len(found) == 1)} from that of worker 0. Every worker must compute every "
                "loss with team.backward, take the same steps with the same learning rate, and change nothing by itself"
            )

    def _short_digest(self) -> float:
        return float(self._progress.digest % 2 ** (FLOAT32_BITS - self.num_workers.bit_length()))

    def _check_digest(self, digest_sum: float) -> None:
        if digest_sum != self._short_digest() * self.num_workers:
            self._refuse_other_batches([self.worker_index])

    def _refuse_other_batches(self, workers: Iterable[int]) -> None:
        for index in workers:
            raise DataError(
                f"worker {index} has been given other batches than the others. A sampler, data set or iterable of your "
                "own must give the same to every worker: let it draw from a torch.Generator with the same seed on all "
                "of them. And every worker must iterate over the same loaders, equally far"
            )

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step of any optimizer."""
        self._continuation.note_step(optimizer)
        if self.num_workers == 1:
            return
        self._parts.check_step(optimizer)
        local = {id(parameter) for each in self._exchanges for parameter in each.local_parameters()}
        if local and any(id(p) in local for group in optimizer.param_groups for p in group["params"]):
            raise TrainingError(
                f"{type(optimizer).__name__}.step() with gradients that have not been exchanged: call team.backward "
                "without exchange=False for the last part before a step"
            )


def _values(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _checked(count: SupportsFloat | None) -> float | None:
    if count is None:
        return None
    value = float(count)
    if not (math.isfinite(value) and value >= 0):
        raise JobError(f"team.backward: count = {value!r} must be a number of at least 0")
    return value
