"""Horovod's elastic mode for PyTorch: `hvd.elastic.TorchState`, `ElasticSampler` and `run`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from cordee.core.errors import JobError
from cordee.horovod.elastic import ObjectState, State, run
from cordee.horovod.errors import HostsUpdatedInterrupt
from cordee.horovod.torch.optimizer import _Reducing
from cordee.horovod.world import rank, size

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the samples that have not been processed in this epoch.

    Call `record_batch` after each batch and `set_epoch` at the end of an epoch, and give the sampler to the state: the
    rest of an epoch is then cut again for another team. Where the samples do not divide evenly, the first of the rest
    are repeated, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """`seed` must be the same on every rank."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch that all ranks together have processed
        self.num_before = 0  # samples of the epochs before
        self.num_replicas = self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with an order of its own. For the end of an epoch: what was processed is forgotten."""
        self.num_before += min(self.processed_num, len(self.dataset))
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples on every rank as processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num, "num_before": self.num_before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.num_before = state_dict.get("num_before", 0)
        self.reset()

    def reset(self) -> None:
        """Cut what is left of the epoch for the ranks that there are now."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        places = range(self.rank, self.total_size, self.num_replicas)
        return iter([left[place % len(left)] for place in places])

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """Models, optimizers, samplers, schedulers and values of a PyTorch script, by name."""

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def _samplers(self) -> list[ElasticSampler]:
        return [thing for thing in self._contents.stateful.values() if isinstance(thing, ElasticSampler)]

    def _num_samples(self) -> int:
        return sum(each.num_before + min(each.processed_num, len(each.dataset)) for each in self._samplers()[:1])

    def _follow_team(self) -> None:
        for sampler in self._samplers():
            sampler.reset()

    def _forget_gradients(self) -> None:
        for optimizer in self._contents.optimizers.values():
            if isinstance(optimizer, _Reducing):
                optimizer.forget_step()

    def _check_commit(self) -> None:
        """Raise JobError where gradients of this rank alone would be lost: a commit keeps none."""
        for name, optimizer in self._contents.optimizers.items():
            if isinstance(optimizer, _Reducing) and optimizer.has_gradients:
                raise JobError(
                    f"state.commit() between loss.backward() and {name}.step(): the gradients would be lost with a "
                    "rank. Commit after the step"
                )
