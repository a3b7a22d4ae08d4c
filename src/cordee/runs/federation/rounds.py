"""One round of a federation: who is asked for what, what counts, and the sum. Decides without I/O.

A round is what its record says and what clients sent, in any order. So a server that was killed makes it again from its
disk: the same clients, and the same bits.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from cordee.communication.compression import Codec, make_codec
from cordee.core.errors import CordeeError, DataError, JobError
from cordee.runs.federation.messages import Agreement, Result, Task, TaskStage
from cordee.runs.federation.store import RoundRecord
from cordee.strategies.federated.aggregation import Contribution, SumTree, check_update, contribute
from cordee.strategies.federated.client import ClientTest, Update
from cordee.strategies.federated.fixed_point import FixedPoint
from cordee.strategies.federated.masking import PublicKeys
from cordee.strategies.federated.robust import aggregate
from cordee.strategies.federated.secure import (
    Revealed,
    SecureRound,
    SecureServer,
    SharesMessage,
    check_threshold,
    least_threshold,
)
from cordee.strategies.federated.settings import FederatedSettings, SecureSettings

# An update whose norm is so many times that of the parameters is taken for an error of the client.
MOST_TIMES_LARGER = 1e4


class ModelShape(NamedTuple):
    """What a server compares updates with."""

    parameters: Tensor
    buffers: Tensor
    shapes: Sequence[Sequence[int]]  # of the tensors that the parameters are made of
    summed: frozenset[str] = frozenset()  # names of the vectors that the algorithm sums besides


class Told(NamedTuple):
    """What a client said of its training, beside the update. Nothing in a secure round."""

    norm: float | None = None
    loss_sum: float = 0.0
    loss_count: float = 0.0
    num_trained: int = 0  # samples of all steps
    test: ClientTest | None = None
    num_bytes: int = 0  # of the update


class Round(abc.ABC):
    """What both kinds of rounds can do. A client that failed, or was refused, is not asked again in this attempt."""

    def __init__(self, record: RoundRecord) -> None:
        self.record = record
        self.failed: dict[str, str] = {}  # why, by name
        self.refused: set[str] = set()  # those of them whose update was wrong, or who could not train
        self.told: dict[str, Told] = {}  # of those whose updates came

    @property
    @abc.abstractmethod
    def stage(self) -> TaskStage: ...

    @property
    @abc.abstractmethod
    def missing(self) -> frozenset[str]:
        """Who was asked at this stage and has not answered."""

    @abc.abstractmethod
    def take(self, client: str, result: Result, arrays: Sequence[Tensor]) -> bool:
        """Take a result; return whether it counts. Raises a CordeeError for one that cannot be."""

    @abc.abstractmethod
    def end_stage(self) -> bool:
        """Continue without those who are missing; return whether the round is complete.

        Raises a CordeeError if too few answered: then the attempt is over.
        """

    @property
    @abc.abstractmethod
    def took_part(self) -> frozenset[str]:
        """Whose updates are in the sum, once the round is complete."""

    @abc.abstractmethod
    def result(self) -> tuple[Contribution | None, Tensor | None]:
        """Return the sum, and the robust mean where one is asked for. Raises a CordeeError if it cannot be made."""

    def task(self) -> Task:
        return Task(self.record.round, self.record.attempt, self.stage)

    def is_of(self, client: str, task: Task) -> bool:
        """Whether a client was given this task, at whatever stage, in this attempt."""
        return (task.round, task.attempt) == (self.record.round, self.record.attempt)

    def is_stage_over(self, *, is_late: bool, present: Collection[str]) -> bool:
        """Whether nobody is waited for at this stage: `is_late` says that the deadline has passed."""
        return is_late or not self.missing

    @property
    def is_full(self) -> bool:
        """Whether it can take no more results, and what comes next is for another round."""
        return False

    @property
    def late(self) -> list[str]:
        """Who has not answered, where the round ends without them."""
        return sorted(self.missing)

    def base_of(self, client: str) -> int:
        """Return how many updates the server had made before a client was asked."""
        return self.record.round

    def fail(self, client: str, reason: str, *, is_refused: bool = False) -> None:
        """Continue without a client: it was lost, or what it sent was refused."""
        self.failed[client] = reason
        if is_refused:
            self.refused.add(client)


class PlainRound(Round):
    """The server gets the update of each client, and sums them in the order of the clients' places."""

    def __init__(self, record: RoundRecord, settings: FederatedSettings, model: ModelShape) -> None:
        super().__init__(record)
        self._settings = settings
        self._parts = settings.parts
        self._model = model
        self._tree = SumTree(len(record.asked)) if record.asked else None
        self._places = {name: place for place, name in enumerate(record.asked)}
        self._robust: dict[int, Tensor] = {}  # differences by place, where all are needed at once

    @property
    def stage(self) -> TaskStage:
        return "train"

    @property
    def missing(self) -> frozenset[str]:
        return frozenset(self._places) - self.told.keys() - self.failed.keys()

    @property
    def took_part(self) -> frozenset[str]:
        return frozenset(self.told)

    def take(self, client: str, result: Result, arrays: Sequence[Tensor]) -> bool:
        if not self.is_of(client, result.task) or client not in self.missing:
            return False
        update = _read_update(result, arrays, client)
        difference = self._decode(update, client)
        check_update(update, difference, self._model.parameters, self._model.buffers, client)
        if update.summed.keys() != self._model.summed:
            raise DataError(
                f"client {client} sent the vectors {sorted(update.summed)} of the algorithm, not "
                f"{sorted(self._model.summed)}: it has another job"
            )
        if (self._parts.privacy or self._parts.robust) and update.scale != 1.0:
            raise DataError(f"client {client} sent a scale of {update.scale}, which this algorithm does not have")
        if not all(map(math.isfinite, (update.scale, update.loss_sum, update.loss_count))):
            raise DataError(f"client {client} sent a loss, or a scale, that is not a number")
        for vector in (difference * max(1.0, abs(update.scale)), *update.summed.values()):
            _refuse_huge(vector, self._model.parameters, client)
        bounded = difference.clone()
        contribution, norm = contribute(self._settings, update, bounded, self._discount(client))
        place = self._place_of(client)
        if self._parts.robust is not None:
            self._robust[place] = bounded
        assert self._tree is not None
        self._tree.take(place, contribution)
        self.told[client] = Told(
            norm, update.loss_sum, update.loss_count, update.num_trained, update.test, update.num_bytes
        )
        return True

    def end_stage(self) -> bool:
        if not self.told and self.record.asked:  # a draw may be of nobody
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(self.failed.items()))
            raise DataError("no client sent an update" + (f" ({reasons})" if reasons else ""))
        return True

    def result(self) -> tuple[Contribution | None, Tensor | None]:
        if self._tree is None:
            return None, None
        for name, place in self._places.items():
            if name not in self.told and not self._tree.is_complete:
                self._tree.take(place, None)
        total = self._tree.result()
        if self._parts.robust is None:
            return total, None
        rows = torch.stack([self._robust[place] for place in sorted(self._robust)])
        return total, aggregate(self._parts.robust, lambda start, stop: rows[:, start:stop], *rows.shape)

    def _place_of(self, client: str) -> int:
        return self._places[client]

    def _discount(self, client: str) -> float:
        return 1.0

    def _decode(self, update: Update, client: str) -> Tensor:
        compress, like = self._parts.compress, self._model.parameters
        codec: Codec = make_codec(
            compress.use, compress.share, like.numel(), like.dtype, self._model.shapes, compress.rank
        )
        try:
            return codec.decode(update.payload)
        except CordeeError as error:
            raise DataError(f"client {client} has another model: {error}") from None


class BufferedRound(PlainRound):
    """One update of the server of an asynchronous federation: it takes the next so many updates of clients.

    Clients train at their own pace. The update of a client that was asked before earlier updates of the server counts
    less. In one round a client is counted once: from the same parameters it would send the same again. Updates are
    summed in the order in which they came, which is the order of the results on the disk.
    """

    def __init__(
        self,
        record: RoundRecord,
        settings: FederatedSettings,
        model: ModelShape,
        discount: Callable[[int], float],
        concurrency: int,
    ) -> None:
        """At most `concurrency` clients train at the same time; 0 is twice as many as the round takes."""
        super().__init__(record, settings, model)
        self._tree = SumTree(record.num_wanted)
        self._discount_of = discount
        self._concurrency = concurrency or 2 * record.num_wanted
        self._places = {}

    @property
    def missing(self) -> frozenset[str]:
        return frozenset(self.record.requests) - self.told.keys() - self.failed.keys()

    @property
    def is_full(self) -> bool:
        return len(self.told) >= self.record.num_wanted

    @property
    def late(self) -> list[str]:
        return []  # who has not answered counts in a later round

    @property
    def outstanding(self) -> dict[str, tuple[int, int]]:
        """The tasks of clients that have not answered, for the round after this one."""
        return {client: self.record.requests[client] for client in sorted(self.missing)}

    def is_of(self, client: str, task: Task) -> bool:
        return self.record.requests.get(client) == (task.round, task.attempt)

    def is_stage_over(self, *, is_late: bool, present: Collection[str]) -> bool:
        """Whether enough updates came, or no more can come: all who are here have been counted, or have failed."""
        if self.is_full:
            return True
        return not self.missing and not any(self.may_ask(client) for client in present)

    def may_ask(self, client: str) -> bool:
        """Whether a client that has nothing to do is given a task. One that has forgotten its task gets another."""
        if client in self.told or client in self.failed or self.is_full:
            return False
        return len(self.missing - {client}) < self._concurrency

    def ask(self, client: str, attempt: int) -> Task:
        """Give a client a task, from the parameters as they are. `record` must be written down before it is sent."""
        requests = {**self.record.requests, client: (self.record.round, attempt)}
        asked = (*self.record.asked, *([] if client in self.record.asked else [client]))
        self.record = msgspec.structs.replace(self.record, requests=requests, asked=asked)
        return Task(self.record.round, attempt, self.stage)

    def base_of(self, client: str) -> int:
        return self.record.requests[client][0]

    def end_stage(self) -> bool:
        if not self.told:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(self.failed.items()))
            raise DataError("no client sent an update" + (f" ({reasons})" if reasons else ""))
        return True

    def result(self) -> tuple[Contribution | None, Tensor | None]:
        assert self._tree is not None
        for place in range(len(self.told), self.record.num_wanted):
            self._tree.take(place, None)
        return super().result()

    def _place_of(self, client: str) -> int:
        place = self._places[client] = len(self.told)
        return place

    def _discount(self, client: str) -> float:
        return self._discount_of(self.record.round - self.base_of(client))


class SecurePlan(NamedTuple):
    """How updates are written as whole numbers and weighted, for a secure round of so many clients."""

    fixed: FixedPoint
    num_values: int
    most_weight: float  # an update is multiplied by weight / most_weight, which is at most 1
    largest_norm: float  # of an update; infinite: there is no bound

    @property
    def num_words(self) -> int:
        return self.num_values + 1

    def encode(self, difference: Tensor, weight: float, client: str) -> np.ndarray[Any, Any]:
        """Return the words of a client's update. Raises TrainingError for what cannot be sent."""
        norm = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
        scaled = difference.to(torch.float64) * (weight / self.most_weight)
        if norm > self.largest_norm:
            scaled *= self.largest_norm / norm
        words = self.fixed.encode(scaled.numpy(), f"the update of client {client}")
        return np.append(words, np.array([round(weight)], self.fixed.dtype))

    def decode(self, words: np.ndarray[Any, Any], num_clients: int, buffers: Tensor) -> Contribution:
        """Return the sum of the updates of so many clients."""
        weight = float(words[-1])
        difference = torch.from_numpy(self.fixed.decode(words[:-1])) * self.most_weight
        return Contribution(
            difference=difference,
            buffers=torch.zeros_like(buffers),
            summed={},
            weight=weight,
            weighted_scale=weight,
            num_samples=round(weight),
            num_clients=num_clients,
        )


def plan_secure(settings: FederatedSettings, secure: SecureSettings, num_values: int, num_clients: int) -> SecurePlan:
    """Return how a secure round of so many clients is computed. The same on the server and on clients."""
    privacy = settings.parts.privacy
    is_equal = settings.weights == "equal" or privacy is not None
    most_weight = 1.0 if is_equal else float(settings.most_samples or 1)
    bound = settings.max_norm
    fixed = FixedPoint(largest=secure.range, bits=secure.bits, num_clients=num_clients)
    if privacy is not None and privacy.where == "central":
        # Rounding lengthens an update by at most half a step in each place. What is summed must keep clip_norm.
        bound = privacy.clip_norm - math.sqrt(num_values) * fixed.step / 2
        if not bound > 0:
            raise JobError(
                f"strategy.privacy.clip_norm = {privacy.clip_norm} is less than what rounding {num_values:,} numbers "
                f"to strategy.secure.bits = {secure.bits} adds: set more bits, or a smaller strategy.secure.range"
            )
    if most_weight * num_clients >= 2 ** (fixed.word_bits - 1):
        raise JobError(
            f"strategy.most_samples = {settings.most_samples} of {num_clients} clients cannot be added in words of "
            f"{fixed.word_bits} bits: set a smaller one"
        )
    return SecurePlan(
        fixed,
        num_values,
        most_weight,
        bound or math.inf,
    )


def secure_threshold(secure: SecureSettings, num_clients: int) -> int:
    """Return how many of so many clients must answer to the end: at least the share of the job, more than half."""
    threshold = max(math.ceil(secure.threshold * num_clients - 1e-9), least_threshold(num_clients))
    check_threshold(threshold, num_clients)
    return threshold


class MaskedRound(Round):
    """The server gets the sum of the updates only."""

    def __init__(self, record: RoundRecord, plan: SecurePlan, threshold: int, context: str, buffers: Tensor) -> None:
        super().__init__(record)
        self._plan, self._buffers = plan, buffers
        self.agreement = Agreement(context, threshold, len(record.asked))
        agreed = SecureRound(
            context=context, threshold=threshold, num_words=plan.num_words, word_bits=plan.fixed.word_bits
        )
        self._server = SecureServer(agreed, record.asked)

    @property
    def stage(self) -> TaskStage:
        assert self._server.stage != "done"
        return self._server.stage

    @property
    def missing(self) -> frozenset[str]:
        return self._server.missing - self.failed.keys()

    @property
    def took_part(self) -> frozenset[str]:
        return self._server.survivors

    @property
    def heard(self) -> frozenset[str]:
        """Who has answered at this stage."""
        return self._server.heard

    @property
    def directory(self) -> dict[str, tuple[bytes, bytes]]:
        return {name: (keys.encryption, keys.masking) for name, keys in self._server.directory().items()}

    def sealed_for(self, client: str) -> dict[str, bytes]:
        return self._server.sealed_for(client)

    def take(self, client: str, result: Result, arrays: Sequence[Tensor]) -> bool:
        if self._server.stage == "done" or result.task != self.task() or client not in self.missing:
            return False
        server = self._server
        match result.task.stage:
            case "keys":
                if result.keys is None:
                    raise DataError(f"client {client} sent no keys")
                return server.take_keys(client, PublicKeys(*result.keys))
            case "shares":
                return server.take_shares(client, SharesMessage(dict(result.sealed), result.commitment))
            case "masked":
                if len(arrays) != 1:
                    raise DataError(f"client {client} sent {len(arrays)} vectors as its masked update")
                counts = server.take_masked(client, arrays[0].numpy())
                self.told[client] = Told(num_bytes=arrays[0].numel() * arrays[0].itemsize)
                return counts
            case "revealed":
                revealed = Revealed(result.share_number, dict(result.self_seeds), dict(result.mask_secrets))
                return server.take_revealed(client, revealed)
            case "train":
                raise DataError(f"client {client} sent its update in the clear, in a secure round")

    def end_stage(self) -> bool:
        self._server.advance()
        return self._server.stage == "done"

    def result(self) -> tuple[Contribution | None, Tensor | None]:
        return self._plan.decode(self._server.result(), len(self.took_part), self._buffers), None


def _read_update(result: Result, arrays: Sequence[Tensor], client: str) -> Update:
    if len(arrays) != result.num_payload + 1 + len(result.summed) or not result.num_payload:
        raise DataError(
            f"client {client} sent {len(arrays)} vectors, and says that they are {result.num_payload} of the update, "
            f"one of buffers and {len(result.summed)} besides"
        )
    payload, rest = list(arrays[: result.num_payload]), arrays[result.num_payload :]
    summed: Mapping[str, Tensor] = dict(zip(result.summed, rest[1:], strict=True))
    return Update(
        payload=payload,
        buffers=rest[0],
        num_samples=result.num_samples,
        num_steps=result.num_steps,
        num_trained=result.num_trained,
        summed=dict(summed),
        scale=result.scale,
        loss_sum=result.loss_sum,
        loss_count=result.loss_count,
        test=ClientTest(*result.test) if result.test is not None else None,
    )


def _refuse_huge(difference: Tensor, parameters: Tensor, client: str) -> None:
    """Raise DataError for an update that no training makes: finite, but far larger than the parameters."""
    norm = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
    like = float(torch.linalg.vector_norm(parameters, dtype=torch.float64))
    if not norm <= MOST_TIMES_LARGER * (like + 1.0):
        raise DataError(
            f"client {client} sent an update of norm {norm:.3g}, and the parameters have {like:.3g}: it diverged, or "
            "is wrong. strategy.max_norm bounds what one client can do"
        )
