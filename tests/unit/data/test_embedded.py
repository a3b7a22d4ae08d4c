from __future__ import annotations

import pytest
import torch

from cordee.core.settings import Data
from cordee.data import load_data
from cordee.data.load import is_test_sample


@pytest.mark.parametrize(
    ("use", "shape", "num_classes", "sizes"), [("iris", (4,), 3, (120, 30)), ("digits", (1, 8, 8), 10, (1442, 355))]
)
def test_embedded_sets(use, shape, num_classes, sizes):
    splits = load_data(Data(use=use), seed=0)
    assert (splits.input_shape, splits.num_classes, splits.name) == (shape, num_classes, use)
    assert (splits.train.num_samples, splits.test.num_samples) == sizes
    inputs, targets = splits.train.gather(torch.arange(sizes[0]))
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    torch.testing.assert_close(inputs.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std(correction=0), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_iris_is_standardised_by_feature_on_the_training_set():
    inputs = load_data(Data(use="iris"), seed=0).train.gather(torch.arange(120)).inputs
    torch.testing.assert_close(inputs.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(4), atol=1e-4, rtol=0)


def test_without_normalisation():
    iris = load_data(Data(use="iris", normalize=False), seed=0)
    torch.testing.assert_close(iris.train.gather(torch.tensor([0])).inputs, torch.tensor([[5.1, 3.5, 1.4, 0.2]]))
    digits = load_data(Data(use="digits", normalize=False), seed=0).train.gather(torch.arange(100)).inputs
    assert float(digits.min()) == 0.0 and float(digits.max()) == 1.0


def test_split_is_stratified_and_independent_of_the_seed():
    one, other = (load_data(Data(use="iris"), seed=seed) for seed in (0, 1))
    everything = torch.arange(30)
    assert torch.equal(one.test.gather(everything).inputs, other.test.gather(everything).inputs)
    assert torch.bincount(one.test.gather(everything).targets).tolist() == [10, 10, 10]


def test_every_fifth_of_a_class_is_test():
    targets = torch.tensor([0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    assert is_test_sample(targets).nonzero().flatten().tolist() == [5, 9]
