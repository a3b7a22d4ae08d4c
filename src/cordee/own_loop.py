"""One's own training loop on many workers: `with cordee.join() as team`.

The same script runs alone under `python`, and as a member under `cordee run` and `torchrun`. A batch of the
script is the global batch: each worker computes its share, and gradients are weighted by the share's size, so
the loop computes the same on any number of workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cordee.cluster import Team
from cordee.communication.exchange import GradientExchange, broadcast
from cordee.communication.shared_memory import register
from cordee.compute import share_threads
from cordee.core import env
from cordee.core.errors import JobError
from cordee.core.importing import stop_import
from cordee.data.shared_batches import SharedBatches

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class LoopTeam:
    """What a script sees of the others. Alone, everything works and costs nothing."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._exchange: GradientExchange | None = None
        self._batches: SharedBatches | None = None

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

    def prepare(
        self, model: ModelT, optimizer: OptimizerT, batches: Iterable[Any]
    ) -> tuple[ModelT, OptimizerT, Iterable[Any]]:
        """Give all workers the first one's weights, and each its share of every batch. Collective.

        `batches` may be a DataLoader, of which only the own share is read, in an order that torch's seed decides
        alike on any number of workers; or anything that yields the same batches on every worker. The model stays
        the same object: save and inspect it as always. Batch norms keep the statistics of each worker's shares.
        """
        known = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise JobError("team.prepare: the optimizer has parameters that are not the model's")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise JobError("team.prepare: the model has no parameters to train")
        seed = torch.tensor([torch.initial_seed() % 2**62])
        if self.num_workers > 1:
            broadcast([seed, *model.parameters(), *model.buffers()])
            self._exchange = GradientExchange(list(model.parameters()), num_extras=1)
        self._batches = SharedBatches(batches, self.worker_index, self.num_workers, int(seed))
        return model, optimizer, self._batches

    def backward(self, loss: Tensor, *, exchange: bool = True) -> None:
        """Add the gradients of the mean loss over everybody's samples of the present batch. Collective.

        `loss` is the mean over the worker's own. With `exchange=False` gradients stay this worker's until the
        next call: for all but the last part when accumulating, to communicate once.
        """
        if self.num_workers == 1:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if self._exchange is None or self._batches is None:
            raise JobError("team.backward: call team.prepare(model, optimizer, batches) before the loop")
        share = self._batches.share
        self._exchange.set_aside()
        (loss * (share.num_own / share.num_all)).backward()  # type: ignore[no-untyped-call]
        if exchange:
            self._exchange.reduce([float(share.num_own)], count_at=0, nominal_count=share.num_all)
            self._exchange.take_back()

    def gather(self, values: Tensor) -> Tensor:
        """Return the rows of all workers, in order, each sample once. Collective; gradients do not flow.

        A value without rows, a loss say, is one row of each worker.
        """
        values = values.detach()
        if values.ndim == 0:
            values = values.reshape(1)
        if self.num_workers == 1:
            return values
        if self._batches is not None and self._batches.is_standing_in:
            values = values[:0]  # a worker without samples has computed somebody else's
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_workers)]
        dist.all_gather(lengths, torch.tensor([len(values)]))
        longest = max(int(length) for length in lengths)
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.num_workers)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over the workers. Collective."""
        return self._team.sum(values)

    def print(self, *values: object) -> None:
        """Print on the first worker only."""
        if self.is_first:
            print(*values, flush=True)  # noqa: T201


@contextlib.contextmanager
def join() -> Iterator[LoopTeam]:
    """Join the processes this one was started with, or be alone; leave again at the end.

    Under `cordee run` and torchrun a `torch.distributed` group is formed unless the script has one already:
    over shared memory on CPUs, NCCL where every worker has a GPU. A lost worker is an error that names it.
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
    team = Team(
        worker_index=place.rank,
        num_workers=place.world_size,
        num_local_workers=place.local_world_size,
        local_rank=place.local_rank,
    )
    try:
        yield LoopTeam(team)
    except BaseException:
        if is_ours:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                dist.destroy_process_group()
        raise
    if is_ours:
        dist.destroy_process_group()
