from __future__ import annotations

import pytest
import torch

from cordee.core.errors import JobError
from cordee.core.settings import Data
from cordee.data import Loader, load_data


def made(**args):
    return load_data(Data(use="synthetic", args=args), seed=0)


def test_classes_have_the_shape_asked_for():
    splits = made(shape=[3, 16, 16], num_classes=7, size=500, test_size=50)
    assert (splits.train.num_samples, splits.test.num_samples) == (500, 50)
    assert (splits.input_shape, splits.num_classes) == ((3, 16, 16), 7)
    inputs, targets = splits.train.gather(torch.arange(500))
    assert inputs.shape == (500, 3, 16, 16) and inputs.dtype == torch.float32
    assert set(targets.tolist()) == set(range(7))
    assert abs(float(inputs.mean())) < 0.2 and 0.8 < float(inputs.std()) < 1.2


@pytest.mark.parametrize("kind", ["classes", "tokens"])
def test_a_sample_is_a_function_of_its_index(kind):
    splits = made(shape=[12], num_classes=5, size=100, kind=kind)
    whole, part = splits.train.gather(torch.arange(100)), splits.train.gather(torch.tensor([70, 3]))
    assert torch.equal(whole.inputs[[70, 3]], part.inputs) and torch.equal(whole.targets[[70, 3]], part.targets)
    again = made(shape=[12], num_classes=5, size=100, kind=kind)
    assert torch.equal(again.train.gather(torch.arange(100)).inputs, whole.inputs)


def test_training_and_test_samples_differ():
    splits = made(shape=[40], size=200, test_size=200)
    train, test = (source.gather(torch.arange(200)).inputs for source in (splits.train, splits.test))
    assert float(torch.cdist(train, test).min()) > 0


def test_classes_can_be_learnt():
    splits = made(shape=[32], num_classes=4, size=400, test_size=200)
    train, test = splits.train.gather(torch.arange(400)), splits.test.gather(torch.arange(200))
    means = torch.stack([train.inputs[train.targets == label].mean(0) for label in range(4)])
    guesses = torch.cdist(test.inputs, means).argmin(1)
    assert float((guesses == test.targets).float().mean()) > 0.9


def test_tokens_follow_their_rule():
    splits = made(shape=[20], num_classes=50, kind="tokens")
    inputs, targets = splits.train.gather(torch.arange(300))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (300, 20)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    steps = (targets - inputs) % 50
    assert float(((steps >= 1) & (steps <= 3)).float().mean()) > 0.85
    assert int(inputs.min()) >= 0 and int(inputs.max()) < 50 and splits.num_classes == 50


def test_any_size_costs_nothing():
    splits = made(shape=[3, 224, 224], num_classes=1000, size=10**12, test_size=0)
    assert splits.test is None
    loader = Loader(splits.train, batch_size=4, seed=0, shuffle=True, prefetch=0)
    assert loader.num_batches == 25 * 10**10
    first = next(loader.batches(0, first_batch=10**10))
    assert first.inputs.shape == (4, 3, 224, 224)


def test_limits_apply():
    splits = load_data(Data(use="synthetic", args={"shape": [8]}, train_limit=9, test_limit=4), seed=0)
    assert (splits.train.num_samples, splits.test.num_samples) == (9, 4)


def test_share_set_aside():
    data = Data(use="synthetic", args={"shape": [8], "size": 50, "test_size": 0}, test_fraction=0.2)
    splits = load_data(data, seed=0)
    assert (splits.train.num_samples, splits.test.num_samples) == (40, 10)
    inputs = torch.cat(
        [source.gather(torch.arange(source.num_samples)).inputs for source in (splits.train, splits.test)]
    )
    assert len(inputs.unique(dim=0)) == 50


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"shape": []}, "one or more lengths"),
        ({"shape": [3, 0]}, "one or more lengths"),
        ({"num_classes": 1}, "at least 2 classes"),
        ({"size": 0}, "1 sample"),
        ({"shape": [4, 4], "kind": "tokens"}, "give one length"),
        ({"kind": "words"}, "unknown value|does not fit"),
        ({"sizes": 3}, "did you mean 'size'"),
    ],
)
def test_wrong_settings(args, message):
    with pytest.raises(JobError, match=message):
        made(**args)
