"""One's own training loop on many workers: `with cordee.join() as team`.

The same script runs alone under `python`, and as a member under `cordee run` and `torchrun`. A batch of the
script is the global batch: each worker computes its share, and gradients are weighted by the share's size, so
the loop computes the same on any number of workers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cordee.cluster import Team
from cordee.communication.exchange import AccumulatingExchange, broadcast, find_differences
from cordee.communication.shared_memory import register
from cordee.compute import share_threads
from cordee.compute.loop_parts import LoopParts
from cordee.core import env
from cordee.core.errors import DataError, JobError, TrainingError
from cordee.core.importing import stop_import
from cordee.core.seeds import derive_seed
from cordee.data.shared_batches import Pass, Progress, Share, SharedBatches

COMPARED_EVERY = 100  # exchanges; a comparison reads the weights once, an exchange and a step read them ten times
COMPARED_FIRST = 2  # the exchange by which a mistake of the script shows: one step has been taken
FLOAT32_BITS = 24  # up to which whole numbers, and so their sums, are exact
NUM_EXTRAS = 2  # numbers that travel with the gradients


class LoopTeam:
    """What a script sees of the others. Alone, everything works and costs nothing."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._parts = LoopParts()
        self._exchanges: list[AccumulatingExchange] = []
        self._progress = Progress()
        self._loaders: list[SharedBatches] = []
        self._num_exchanges = 0

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
        models = [thing for thing in things if isinstance(thing, nn.Module)]
        seed = self._agree_on_start([model for model in models if self._parts.add_model(model)])
        prepared: list[Any] = []
        for thing in things:
            if isinstance(thing, Optimizer):
                self._parts.add_optimizer(thing)
            if isinstance(thing, nn.Module | Optimizer | LRScheduler):
                prepared.append(thing)
            elif isinstance(thing, Iterable) and not isinstance(thing, str | bytes | Tensor | dict):
                prepared.append(self._share(thing, seed))
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
        if self.num_workers == 1:
            self._parts.check_optimizers()
            if own_count != 0:
                loss.backward()  # type: ignore[no-untyped-call]
            return
        if not self._parts.has_models:
            raise JobError("team.backward: call team.prepare(model, optimizer, batches) before the loop")
        self._parts.check_optimizers()
        is_check_due = exchange and self._is_check_due()
        if is_check_due or self._num_exchanges == 0:
            self._parts.check_loss(loss)
        if is_check_due:
            self._compare()
        weight = self._weight(batches, own_count, reduction)
        self._add_exchange(self._parts.unexchanged())
        is_kept = weight > 0
        leftover = sum(each.begin_pass(is_kept=is_kept) for each in self._exchanges)
        try:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        finally:
            for each in self._exchanges:
                each.end_pass(is_kept=is_kept)
        if exchange:
            self._exchange(leftover)

    def gather(self, values: Tensor, *, batches: Iterable[Any] | None = None) -> Tensor:
        """Return the rows of all workers, in order, each sample once. Collective; gradients do not flow.

        A value without rows, a loss say, is one row of each worker. `batches` says which loader the rows belong
        to, where loops over several are open.
        """
        values = values.detach()
        if values.ndim == 0:
            values = values.reshape(1)
        if self.num_workers == 1:
            return values
        if (loader := self._standing_in(batches)) is not None:
            values = values[:0]  # a worker without samples has computed somebody else's
            loader.notice()
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
        unnoticed, self._progress.num_unnoticed = self._progress.num_unnoticed, 0
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

    # Preparing ----------------------------------------------------------------------------------------------

    def _agree_on_start(self, models: Sequence[nn.Module]) -> int:
        """Give everybody the first worker's seed, and its values of these models."""
        seed = torch.tensor([torch.initial_seed() % 2**62])
        if self.num_workers == 1:
            return int(seed)
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
        return int(seed)

    def _add_exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exchange these gradients as well, but for those that are exchanged already."""
        known = {id(parameter) for each in self._exchanges for parameter in each.parameters} if parameters else set()
        new = [parameter for parameter in parameters if id(parameter) not in known]
        if new:
            self._exchanges.append(AccumulatingExchange(new, NUM_EXTRAS, is_first=self.is_first))
            self._parts.record_exchanged(new)

    def _share(self, batches: Iterable[Any], seed: int) -> SharedBatches:
        known = [each for each in self._loaders if batches is each or batches is each.source]
        if known:
            return known[0]
        number = len(self._loaders)
        shared = SharedBatches(
            batches, self.worker_index, self.num_workers, seed, number=number, progress=self._progress
        )
        self._loaders.append(shared)
        return shared

    # Weighing -----------------------------------------------------------------------------------------------

    def _weight(self, batches: Iterable[Any] | None, count: float | None, reduction: str) -> float:
        """Return what this worker's loss counts for. Collective with a count."""
        if count is not None:
            own = count if self._standing_in(batches) is None else 0.0
            total, digest_sum = self._team.sum([own, self._short_digest()])
            self._check_digest(digest_sum)
            return own / total if total else 0.0
        share = self._present(batches)
        if reduction == "sum":
            return float(share.num_own > 0)
        return share.num_own / share.num_all

    def _present(self, batches: Iterable[Any] | None) -> Share:
        """Return the share of the batch that the script computes with, or refuse to guess."""
        if batches is not None:
            return self._find(batches).share
        passes = self._progress.open
        if not passes:
            raise JobError(
                "team.backward: the loss is of which batch? There is no open loop over prepared batches: prepare the "
                "loader and call team.backward inside of its loop, or write team.backward(loss, batches=loader) for "
                "the batch that it gave last"
            )
        if any(not self._weigh_alike(passes[0], other) for other in passes[1:]):
            raise JobError(
                "team.backward: the loss is of which batch? Loops over several loaders are open, and their batches are "
                f"of {' and '.join(str(one.share.num_all) for one in passes)} samples: write "
                "team.backward(loss, batches=loader)"
            )
        return passes[0].share

    def _weigh_alike(self, one: Pass, other: Pass) -> bool:
        """Whether two batches have the same weights on all workers, so that all of them come to this conclusion."""
        sizes = (one.share.num_all, other.share.num_all)
        return sizes[0] == sizes[1] or not any(size % self.num_workers for size in sizes)

    def _standing_in(self, batches: Iterable[Any] | None) -> SharedBatches | None:
        """Return the loader of whose present batch this worker has no sample, so that it computes somebody else's."""
        if batches is not None:
            found = self._find(batches)
            return None if found.share.num_own else found
        if not self._progress.open:
            return None
        innermost = max(self._progress.open, key=lambda one: one.given_at)
        for other in self._progress.open:
            is_outer = innermost.begun_at >= other.given_at
            sizes = {min(one.share.num_all, self.num_workers) for one in (innermost, other)}
            if other is not innermost and not is_outer and len(sizes) > 1:
                raise JobError(
                    "team: rows of which batch? Loops over several loaders are open, and one has given a batch that is "
                    f"smaller than the team ({innermost.share.num_all} and {other.share.num_all} samples): say "
                    "which with batches=loader"
                )
        return None if innermost.share.num_own else innermost.batches

    def _find(self, batches: Iterable[Any]) -> SharedBatches:
        known = [each for each in self._loaders if batches is each or batches is each.source]
        if not known:
            raise JobError("batches=: this loader has not been prepared: give what team.prepare returned")
        return known[0]

    # Exchanging and comparing -------------------------------------------------------------------------------

    def _exchange(self, leftover: float) -> None:
        """Sum what is local over the workers, in one call where there is one model."""
        self._num_exchanges += 1
        extras = [self._short_digest(), leftover]
        if len(self._exchanges) == 1:
            digest_sum, leftover_sum = self._exchanges[0].reduce_local(extras)
        else:
            # Who has gradients of which model differs between losses, and may between workers: first agree.
            wanted = [float(each.has_local) for each in self._exchanges]
            *counts, digest_sum, leftover_sum = self._team.sum([*wanted, *extras])
            for each, num_wanting in zip(self._exchanges, counts, strict=True):
                if num_wanting:
                    each.reduce_local([0.0] * NUM_EXTRAS)
        self._check_digest(digest_sum)
        mean = leftover_sum / self.num_workers
        if not math.isclose(leftover, mean, rel_tol=1e-3, abs_tol=1e-30) and math.isfinite(mean):
            raise TrainingError(
                f"worker {self.worker_index} has gradients from before this team.backward that other workers do not "
                "have: use team.backward for every loss that depends on the data, in place of loss.backward()"
            )

    def _is_check_due(self) -> bool:
        number = self._num_exchanges + 1
        return number == COMPARED_FIRST or number % COMPARED_EVERY == 0

    def _compare(self) -> None:
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


@contextlib.contextmanager
def join() -> Iterator[LoopTeam]:
    """Join the processes this one was started with, or be alone; leave again at the end.

    Under `cordee run` and torchrun a `torch.distributed` group is formed unless the script has one already:
    over shared memory on CPUs, NCCL where every worker has a GPU. A lost worker is an error that names it.
    At the end the workers' models are compared: TrainingError if they are not the same.
    """
    stop_import("cordee.join")
    place = env.place()
    if place is None or place.world_size == 1:
        yield LoopTeam(Team())
        return
    is_ours = not dist.is_initialized()
    if is_ours:
        register()
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
        if has_gpus:
            torch.cuda.set_device(place.local_rank)
        share_threads(0, place.local_world_size)
        dist.init_process_group("cpu:cordee,cuda:nccl" if has_gpus else "cordee")
    team = LoopTeam(
        Team(
            worker_index=place.rank,
            num_workers=place.world_size,
            num_local_workers=place.local_world_size,
            local_rank=place.local_rank,
        )
    )
    watch = register_optimizer_step_pre_hook(team._check_step)
    try:
        yield team
        if dist.is_initialized():
            team._compare()
    except BaseException:
        if is_ours:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                dist.destroy_process_group()
        raise
    finally:
        watch.remove()
    if is_ours and dist.is_initialized():
        dist.destroy_process_group()
