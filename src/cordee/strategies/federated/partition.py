"""How a training set is divided among clients. Pure: a function of the settings, the targets and the seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.errors import DataError, JobError
from cordee.core.seeds import derive_seed
from cordee.data import Source
from cordee.strategies.federated.settings import PartitionSettings

_ATTEMPTS = 100  # at a draw that leaves no client with too few samples
_GATHERED = 4096  # samples that are read at once


@dataclass(frozen=True)
class Partition:
    """The samples of each client. Two vectors, however many clients there are."""

    order: Tensor  # the numbers of all samples, client after client
    starts: Tensor  # where each client's begin in `order`, and the end of the last
    names: tuple[str, ...] = ()  # of the clients, where a key gives them some

    @property
    def num_clients(self) -> int:
        return len(self.starts) - 1

    def of(self, client: int) -> Tensor:
        """Return the numbers of a client's samples, in order."""
        return self.order[int(self.starts[client]) : int(self.starts[client + 1])]

    @property
    def sizes(self) -> Tensor:
        return self.starts[1:] - self.starts[:-1]

    def name(self, client: int) -> str:
        return self.names[client] if self.names else str(client)


def divide(settings: PartitionSettings, source: Source, num_classes: int | None, seed: int) -> Partition:
    """Divide a training set. Raises JobError for a partition that leaves a client with too few samples."""
    if source.num_samples is None:
        raise JobError("strategy.partition divides samples by their number, and a stream has none: use other data")
    count, clients = source.num_samples, settings.clients
    if settings.kind == "key":
        return _by_key(settings, read_key(source, settings.key))
    if clients * settings.min_samples > count:
        raise JobError(
            f"strategy.partition.clients = {clients} with {settings.min_samples} samples at least are more than the "
            f"training set has: {count}. Use fewer clients"
        )
    if settings.kind == "iid":
        order = torch.randperm(count, generator=_generator(seed, 0))
        return _joined(list(order.tensor_split(clients)))
    labels = read_key(source, "target")
    if num_classes is None or labels.dtype.is_floating_point or labels.dim() != 1:
        raise JobError(
            f"strategy.partition.kind = '{settings.kind}' divides by class, and the targets of this data are no "
            "classes: set kind = 'iid' or 'key'"
        )
    if settings.kind == "labels":
        return _checked(settings, _by_labels(settings, labels, num_classes, seed), "has too few samples of its classes")
    for attempt in range(_ATTEMPTS):
        parts = _dirichlet(settings, labels, num_classes, _generator(seed, attempt))
        if min(len(part) for part in parts) >= settings.min_samples:
            return _joined(parts)
    return _checked(settings, parts, f"was left with too few in each of {_ATTEMPTS} draws")


def read_key(source: Source, key: str) -> Tensor:
    """Return a value of every sample: its "target", or the input of this name. Raises JobError if there is none."""
    values = []
    assert source.num_samples is not None
    for start in range(0, source.num_samples, _GATHERED):
        batch = source.gather(torch.arange(start, min(start + _GATHERED, source.num_samples)))
        if key == "target":
            found = batch.targets
        else:
            named = dict(tree.named_leaves(batch.inputs, "")) if not isinstance(batch.inputs, Tensor) else {}
            found = named.get(f".{key}", named.get(key))
        if not isinstance(found, Tensor):
            raise JobError(f"strategy.partition.key = '{key}': no input of this data has this name")
        values.append(found)
    return torch.cat(values)


def _generator(seed: int, attempt: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, "partition", attempt))


def _joined(parts: list[Tensor], names: tuple[str, ...] = ()) -> Partition:
    sizes = torch.tensor([0, *(len(part) for part in parts)])
    return Partition(torch.cat(parts), sizes.cumsum(0), names)


def _checked(settings: PartitionSettings, parts: list[Tensor], why: str, names: tuple[str, ...] = ()) -> Partition:
    for client, part in enumerate(parts):
        if len(part) < settings.min_samples:
            what = "is empty" if not len(part) else f"has {len(part)} samples"
            raise JobError(
                f"strategy.partition: client {names[client] if names else client} {what} and {why}: use fewer clients, "
                f"a larger alpha or per_client, or a smaller min_samples (now {settings.min_samples})"
            )
    return _joined(parts, names)


def _dirichlet(
    settings: PartitionSettings, labels: Tensor, num_classes: int, generator: torch.Generator
) -> list[Tensor]:
    """Give each client of each class a share that is drawn from Dir(alpha)."""
    parts: list[list[Tensor]] = [[] for _ in range(settings.clients)]
    alphas = torch.full((settings.clients,), settings.alpha, dtype=torch.float64)
    for label in range(num_classes):
        members = (labels == label).nonzero()[:, 0]
        members = members[torch.randperm(len(members), generator=generator)]
        # torch's own Dirichlet takes no generator.
        drawn = torch._standard_gamma(alphas, generator=generator)
        ends = (drawn.cumsum(0) / drawn.sum().clamp_min(1e-300) * len(members)).round().long()
        for client, part in enumerate(torch.tensor_split(members, ends[:-1])):
            parts[client].append(part)
    _deal_classless(parts, labels, num_classes, generator)
    return [torch.cat(part) for part in parts]


def _deal_classless(parts: list[list[Tensor]], labels: Tensor, num_classes: int, generator: torch.Generator) -> None:
    """Give all clients equal parts, at random, of the samples whose label is no class: those that a loss ignores."""
    members = ((labels < 0) | (labels >= num_classes)).nonzero()[:, 0]
    members = members[torch.randperm(len(members), generator=generator)]
    for client, part in enumerate(members.tensor_split(len(parts))):
        parts[client].append(part)


def _by_labels(settings: PartitionSettings, labels: Tensor, num_classes: int, seed: int) -> list[Tensor]:
    """Give each client some classes, in turn and at random, and an equal share of each class to those that have it."""
    if settings.per_client > num_classes:
        raise JobError(
            f"strategy.partition.per_client = {settings.per_client} is more than there are classes: {num_classes}"
        )
    generator = _generator(seed, 0)
    owners: list[list[int]] = [[] for _ in range(num_classes)]
    for client in range(settings.clients):
        others = torch.randperm(num_classes, generator=generator).tolist()
        chosen = [client % num_classes, *(label for label in others if label != client % num_classes)]
        for label in chosen[: settings.per_client]:
            owners[label].append(client)
    _give_all_classes(settings, owners, labels)
    parts: list[list[Tensor]] = [[] for _ in range(settings.clients)]
    for label, clients in enumerate(owners):
        members = (labels == label).nonzero()[:, 0]
        members = members[torch.randperm(len(members), generator=generator)]
        if not clients:
            continue
        for client, part in zip(clients, members.tensor_split(len(clients)), strict=True):
            parts[client].append(part)
    _deal_classless(parts, labels, num_classes, generator)
    return [torch.cat(part) for part in parts]


def _give_all_classes(settings: PartitionSettings, owners: list[list[int]], labels: Tensor) -> None:
    """Have each class that has samples belong to a client, in place: in exchange for one that most clients have."""
    for label in sorted(set(labels.tolist()) & set(range(len(owners)))):
        if owners[label]:
            continue
        most = max(range(len(owners)), key=lambda other: len(owners[other]))
        if len(owners[most]) < 2:
            raise JobError(
                f"strategy.partition.kind = 'labels' would leave samples out: {settings.clients} clients with "
                f"{settings.per_client} classes each cannot have all classes. Set a larger "
                "strategy.partition.per_client, or more clients"
            )
        owners[label].append(owners[most].pop())


def _by_key(settings: PartitionSettings, values: Tensor) -> Partition:
    if values.dim() != 1 or values.dtype.is_floating_point:
        raise DataError(
            f"strategy.partition.key = '{settings.key}' must be one whole number of each sample, and it has the shape "
            f"{tuple(values.shape[1:])} and the type {values.dtype}"
        )
    found, inverse = torch.unique(values, return_inverse=True)
    order = torch.argsort(inverse, stable=True)
    parts = list(torch.split(order, torch.bincount(inverse).tolist()))
    return _checked(settings, parts, "that is what the data have", tuple(str(int(value)) for value in found))
