"""A picture of how the training set is divided: the classes of each client."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cordee.data import Source
from cordee.strategies.federated.partition import Partition, read_key

_MOST_CLIENTS = 200  # that are drawn


def draw_partition(path: Path, partition: Partition, source: Source, num_classes: int | None) -> None:
    """Write a picture: a row for each client, a column for each class; the samples alone where they have not one class.

    Nothing is written where matplotlib (the extra `report`) is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return
    shown = min(partition.num_clients, _MOST_CLIENTS)
    has_classes = num_classes is not None and _has_one_class(source)
    if num_classes is not None and has_classes:
        labels = read_key(source, "target")
        counts = torch.stack([_count(labels[partition.of(client)], num_classes) for client in range(shown)])
    else:
        counts = partition.sizes[:shown, None]
    figure = Figure(figsize=(6, 1.5 + min(12, 0.2 * shown)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(counts.numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, label="samples")
    axes.set_xlabel("class" if has_classes else "")
    axes.set_ylabel("client")
    for axis in (axes.xaxis, axes.yaxis):  # there is no client 2.5
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    more = f", the first {shown}" if shown < partition.num_clients else ""
    axes.set_title(f"{partition.num_clients} clients{more}")
    figure.savefig(path, dpi=100)


def _has_one_class(source: Source) -> bool:
    """Whether a sample has one label, and not one for each token, say."""
    targets = source.gather(torch.zeros(1, dtype=torch.int64)).targets
    return isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()


def _count(labels: Tensor, num_classes: int) -> Tensor:
    """Return how many labels there are of each class; those that a loss ignores are of none."""
    return torch.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)
