"""What benchmarks of training share: the data, and a loader for peers that gathers whole batches as ours does."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import load_data
from cordee.models import lenet, mlp, resnet


def image_data() -> Data:
    """Return Fashion-MNIST where its files are on the machine, else made-up data of its shape."""
    data = Data("fashion-mnist")
    try:
        load_data(data, seed=0)
    except DataError:
        data = Data("synthetic", args={"shape": [1, 28, 28], "num_classes": 10, "size": 60_000})
    return data


def train_tensors(data: Data) -> tuple[Tensor, Tensor]:
    """Return the training set, normalised, as two tensors."""
    source = load_data(data, seed=0).train
    assert source.num_samples is not None
    batch = source.gather(torch.arange(source.num_samples))
    return batch.inputs, batch.targets


def build(name: str) -> nn.Module:
    """Return a model by name, with the same weights each time."""
    torch.manual_seed(0)
    if name == "lenet":
        return lenet(input_shape=(1, 28, 28), num_classes=10)
    if name == "resnet18":
        return resnet(input_shape=(3, 32, 32), num_classes=10, depth=18)
    assert name == "mlp"
    return mlp(input_shape=(784,), num_classes=10, hidden=(3072,) * 5)  # 40 million parameters


class WholeBatches(Dataset[Any]):
    """Gives a DataLoader a whole batch at once, gathered from tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._inputs[chosen], self._targets[chosen]


def whole_batches(inputs: Tensor, targets: Tensor, batch_size: int) -> DataLoader[Any]:
    """Return a shuffled loader. The usual one, sample by sample, would be several times slower."""
    dataset = WholeBatches(inputs, targets)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep Lightning's advice about its own defaults off the screen."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
