"""A picture of how the training set is divided: the classes of each client."""

from __future__ import annotations

from pathlib import Path

import torch

from cordee.data import Source
from cordee.strategies.federated.partition import Partition, read_key

_MOST_CLIENTS = 200  # that are drawn


def draw_partition(path: Path, partition: Partition, source: Source, num_classes: int | None) -> None:
    """Write a picture: a row for each client, a column for each class; the samples alone where there are no classes.

    Nothing is written where matplotlib (the extra `report`) is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return
    shown = min(partition.num_clients, _MOST_CLIENTS)
    if num_classes is not None:
        labels = read_key(source, "target")
        counts = torch.stack([torch.bincount(labels[partition.of(c)], minlength=num_classes) for c in range(shown)])
    else:
        counts = partition.sizes[:shown, None]
    figure = Figure(figsize=(6, 1.5 + min(12, 0.2 * shown)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(counts.numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, label="samples")
    axes.set_xlabel("class" if num_classes is not None else "")
    axes.set_ylabel("client")
    for axis in (axes.xaxis, axes.yaxis):  # there is no client 2.5
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    more = f", the first {shown}" if shown < partition.num_clients else ""
    axes.set_title(f"{partition.num_clients} clients{more}")
    figure.savefig(path, dpi=100)
