"""One client in one round: from what the server sent, what the client keeps and its samples to an update.

The same in a simulation and between real sites, and the same bits for the same seed, client and round, in whatever
process: nothing is left over from the client that the process trained before.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cordee.communication.compression import CompressionSettings
from cordee.compute import Computation, OptimizerRecipe, split_batch
from cordee.compute.computation import clip_gradients
from cordee.core import Batch, Job
from cordee.core.errors import DataError, JobError, TrainingError
from cordee.core.seeds import derive_seed
from cordee.data import ArraySource, Source
from cordee.data.augment import Augmentation
from cordee.data.datasets import DatasetSource
from cordee.strategies.federated.algorithms import Algorithm, LocalTraining, Vectors
from cordee.strategies.federated.client_team import ClientTeam
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.privacy import add_noise, clip
from cordee.strategies.federated.settings import FederatedSettings

# What a client keeps beside the vectors of its algorithm.
PERSONAL, PERSONAL_BUFFERS, RESIDUAL = "personal", "personal_buffers", "residual"
_TEST_BATCH = 1000  # samples that are measured at once


class Sent(NamedTuple):
    """What a client is sent."""

    round: int  # updates that the server had made
    parameters: Tensor  # that clients share, flat
    buffers: Tensor  # that clients share, flat, in double precision
    own: Vectors  # what the algorithm sends besides

    @property
    def vectors(self) -> Vectors:
        """All of it, by names that `of` reads."""
        own = {f"own.{name}": vector for name, vector in self.own.items()}
        return {"parameters": self.parameters, "buffers": self.buffers, **own}

    @classmethod
    def of(cls, number: int, vectors: Vectors) -> Sent:
        """Return what was sent after so many updates."""
        own = {name.removeprefix("own."): vector for name, vector in vectors.items() if name.startswith("own.")}
        return cls(number, vectors["parameters"], vectors["buffers"], own)


class ClientTest(NamedTuple):
    """How a client did on the samples that it had set aside: with what it was sent, and after it trained."""

    num_samples: int
    num_correct_before: int
    num_correct_after: int


@dataclass(frozen=True)
class Update:
    """What comes of a client's round. All but `state` is sent to the server."""

    payload: list[Tensor]  # the difference, as `strategy.compress` makes it
    buffers: Tensor
    num_samples: int
    num_steps: int
    num_trained: int = 0  # samples of all steps
    summed: Vectors = field(default_factory=dict)  # that the algorithm sums besides
    scale: float = 1.0  # of which the server gets the weighted sum
    loss_sum: float = 0.0  # over all that the client computed
    loss_count: float = 0.0
    test: ClientTest | None = None
    state: Vectors = field(default_factory=dict)  # that the client keeps for its next round

    @property
    def num_bytes(self) -> int:
        """The bytes of the vectors that are sent."""
        return sum(t.numel() * t.itemsize for t in [*self.payload, self.buffers, *self.summed.values()])


class ClientTrainer:
    """Trains any client, one after the other, with one model, in place. Local."""

    def __init__(
        self,
        job: Job,
        settings: FederatedSettings,
        algorithm: Algorithm,
        flat: FlatModel,
        computation: Computation,
        recipe: OptimizerRecipe,
        *,
        noise_key: int | None = None,
    ) -> None:
        """`noise_key` is what noise of the client follows from: a secret; the seed of the job in a simulation."""
        self._job = job
        self._noise_key = job.seed if noise_key is None else noise_key
        self._settings = settings
        self._parts = settings.parts
        self._algorithm = algorithm
        self._flat = flat
        self._model = flat.model
        self._computation = computation
        self._recipe = recipe
        self._optimizer = recipe.make(self._model.named_parameters())
        self._first_personal = flat.personal.clone()
        self._first_personal_buffers = flat.read_buffers(personal=True)
        self.feedback_settings: CompressionSettings = self._parts.compress
        self.team = ClientTeam()  # may be replaced between two rounds, by the same on all its workers

    @property
    def is_stateful(self) -> bool:
        """Whether clients keep something from one round to the next."""
        keeps_residual = self._parts.compress.use != "none"
        return self._algorithm.is_stateful or bool(self._settings.personal) or keeps_residual

    def train(self, sent: Sent, state: Vectors, source: Source, indices: Tensor, *, client: str) -> Update:
        """Train a client on its samples, those of `source` at `indices`; return what comes of it.

        `state` is what the client kept from its last round; empty in its first. `client` is the name that its random
        streams are derived from. Raises DataError without samples, TrainingError where the loss is not finite.
        """
        flat, algorithm = self._flat, self._algorithm
        trained_on, tested_on = split_samples(indices, self._settings.client_test, self._job.seed, client)
        if not len(trained_on):
            raise DataError(f"client {client} has no samples to train on")
        self._begin(sent, state)
        own = {name: state[name] for name in algorithm.begin_client(sent.parameters)} if state else {}
        own = own or algorithm.begin_client(sent.parameters)
        local = LocalTraining(sent.parameters, flat.shared, flat.shared_gradient, sent.own, own, client=client)
        before = self._count_correct(source, tested_on)
        loss_sum, loss_count, num_trained = self._take_steps(local, source, trained_on, sent.round, client)
        if self.team.num_workers > 1:
            for personal in (False, True):
                flat.write_buffers(self.team.mean(flat.read_buffers(personal=personal)), personal=personal)
        finished = algorithm.finish(local)
        parts = self._parts
        if (parts.privacy or parts.robust or parts.secure) and (finished.summed or finished.scale != 1.0):
            raise JobError(
                f"strategy.algorithm = '{self._settings.use.use}' sends more than a difference, which "
                "strategy.privacy, robust and secure do not cover: use another algorithm"
            )
        after = self._count_correct(source, tested_on)
        kept = dict(finished.own)
        if self._settings.personal:
            kept[PERSONAL], kept[PERSONAL_BUFFERS] = flat.personal.clone(), flat.read_buffers(personal=True)
        payload = self._encode(finished.difference, state, kept, sent, client)
        return Update(
            payload=payload,
            buffers=flat.read_buffers(),
            num_samples=len(trained_on),
            num_steps=local.num_steps,
            num_trained=num_trained,
            summed=finished.summed,
            scale=finished.scale,
            loss_sum=loss_sum,
            loss_count=loss_count,
            test=ClientTest(len(tested_on), before, after) if len(tested_on) else None,
            state=kept,
        )

    @torch.no_grad()
    def _begin(self, sent: Sent, state: Vectors) -> None:
        flat = self._flat
        flat.shared.copy_(sent.parameters)
        flat.write_buffers(sent.buffers)
        flat.personal.copy_(state.get(PERSONAL, self._first_personal))
        flat.write_buffers(state.get(PERSONAL_BUFFERS, self._first_personal_buffers), personal=True)
        self._optimizer.state.clear()

    def _take_steps(
        self, local: LocalTraining, source: Source, indices: Tensor, round_number: int, client: str
    ) -> tuple[float, float, int]:
        """Train; return the sum of the loss, over what, and the samples of all steps."""
        flat, optimizer, training, team = self._flat, self._optimizer, self._job.training, self.team
        local.rate = self._recipe.set_rate(optimizer, round_number)
        loss_sum, loss_count, num_trained = 0.0, 0.0, 0
        needs_vector = self._algorithm.correct is not None or team.num_workers > 1
        self._model.train()
        place = (self._job.seed, "client", client, "round", round_number)
        for number, batch in enumerate(self._batches(source, indices, place)):
            torch.default_generator.manual_seed(derive_seed(*place, "step", number, *team.seed_parts))
            flat.clear_gradients() if needs_vector else flat.forget_gradients()
            total = self._computation.loss.count_batch(batch)
            parts = [part for part in split_batch(team.share(batch), training.accumulate) if part.num_samples]
            loss = self._computation.forward_backward(self._model, parts, total_count=total, measure=False)
            loss = team.sum_step(flat, loss)
            if not math.isfinite(loss.mean):
                raise TrainingError(
                    f"the loss of client {client} is {loss.mean} in step {number + 1} of round {round_number + 1}: "
                    "lower optimizer.lr, or look at the client's samples"
                )
            num_trained += loss.num_samples
            if not loss.count:  # every label is ignored: no step, as everywhere; optimizers would decay weights
                continue
            if training.clip_norm:
                clip_gradients(self._model.parameters(), training.clip_norm)
            if self._algorithm.correct is not None:
                self._algorithm.correct(local)
            if needs_vector:
                flat.drop_unused()
            optimizer.step()
            local.num_steps += 1
            loss_sum += loss.mean * loss.count
            loss_count += loss.count
        if self._algorithm.needs_sgd:
            local.unit_steps = unit_displacement(optimizer, local.num_steps)
        return loss_sum, loss_count, num_trained

    def _batches(self, source: Source, indices: Tensor, place: Sequence[int | str]) -> Iterator[Batch]:
        settings, size = self._settings, self._job.training.batch_size
        names = self._job.data.augment
        augmentation = Augmentation(names, source.input_shape) if names else None
        num_epochs = settings.local_epochs or (1 if settings.local_steps is None else None)
        left = settings.local_steps if settings.local_steps is not None else -1
        for epoch in itertools.count() if num_epochs is None else range(num_epochs):
            generator = torch.Generator().manual_seed(derive_seed(*place, "epoch", epoch))
            order = indices[torch.randperm(len(indices), generator=generator)]
            for start in range(0, len(order), size):
                if left == 0:
                    return
                left -= 1
                chosen = order[start : start + size]
                if augmentation is None and not isinstance(source, DatasetSource):
                    yield source.gather(chosen)
                    continue
                positions = torch.arange(start, start + len(chosen))
                seed = derive_seed(*place, "augment", epoch)
                if augmentation is not None and isinstance(source, ArraySource):
                    raw, targets = source.rows(chosen)
                    yield Batch(source.finish(augmentation.apply(raw, positions, seed)), targets)
                    continue
                if isinstance(source, DatasetSource):  # its random transforms draw anew in each epoch
                    batch = source.read(chosen, positions, derive_seed(*place, "transform", epoch))
                else:
                    batch = source.gather(chosen)
                if augmentation is not None:
                    batch = Batch(augmentation.apply(batch.inputs, positions, seed), batch.targets)
                yield batch

    def _encode(self, difference: Tensor, state: Vectors, kept: Vectors, sent: Sent, client: str) -> list[Tensor]:
        """Return the difference as it is sent; what compression leaves out is added to what the client keeps."""
        privacy = self._parts.privacy
        if privacy is not None:
            clip(difference, privacy.clip_norm)
            if privacy.where == "local":
                # Other noise for other parameters: two updates with the same noise would differ by none.
                trained_from = hashlib.sha256(sent.parameters.numpy().tobytes()).hexdigest()
                deviation = privacy.clip_norm * privacy.noise
                add_noise(difference, deviation, self._noise_key, "noise", client, sent.round, trained_from)
        if self.feedback_settings.use == "none":
            return [difference]
        feedback = self.feedback_settings.feedback(self._flat.shapes, difference.dtype)
        feedback.left = state.get(RESIDUAL)
        payload = feedback.compress(difference)
        kept[RESIDUAL] = feedback.left if feedback.left is not None else torch.zeros_like(difference)
        return payload

    @torch.no_grad()
    def _count_correct(self, source: Source, indices: Tensor) -> int:
        """Return how many of the samples the model as it is now is right about."""
        if not len(indices):
            return 0
        self._model.eval()
        num_correct = 0
        for start in range(0, len(indices), _TEST_BATCH):
            batch = source.gather(indices[start : start + _TEST_BATCH])
            with self._computation.autocast():
                outputs = self._computation.outputs(self._model, batch)
            num_correct += self._computation.count_right(outputs, batch.targets)
        return num_correct


def split_samples(indices: Tensor, test_share: float, seed: int, client: str) -> tuple[Tensor, Tensor]:
    """Return which of a client's samples it trains on, and which it sets aside. The same in every round."""
    if not test_share:
        return indices, indices[:0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "client", client, "test"))
    order = indices[torch.randperm(len(indices), generator=generator)]
    num_test = num_set_aside(len(indices), test_share)
    return order[num_test:], order[:num_test]


def num_set_aside(num_samples: int, test_share: float) -> int:
    """Return how many of a client's samples are set aside. Pure."""
    return min(num_samples - 1, max(1, round(test_share * num_samples))) if test_share else 0


def unit_displacement(optimizer: Optimizer, num_steps: int) -> float:
    """Return how far SGD at a rate of 1 goes in so many steps with gradients of 1. Pure; the first group's settings."""
    group = optimizer.param_groups[0]
    momentum, dampening = group.get("momentum", 0.0), group.get("dampening", 0.0)
    if not momentum:
        return float(num_steps)
    velocity = moved = 0.0
    for step in range(num_steps):
        velocity = 1.0 if step == 0 else momentum * velocity + 1 - dampening
        moved += 1 + momentum * velocity if group.get("nesterov") else velocity
    return moved


def check_sgd(recipe: OptimizerRecipe, model: nn.Module) -> bool:
    """Return whether the clients' optimizer is SGD, with the same settings for all parameters."""
    optimizer = recipe.make(model.named_parameters())
    return isinstance(optimizer, torch.optim.SGD) and len(optimizer.param_groups) == 1
