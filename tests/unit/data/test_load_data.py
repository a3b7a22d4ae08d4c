from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import user_data
from user_data import Numbered

from cordee.core.errors import DataError, JobError
from cordee.core.settings import Data
from cordee.data import ArraySource, Splits, load_data
from cordee.data.source import fingerprint

HERE = [str(Path(__file__).parent)]
X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def loaded(use, seed: int = 0, **settings):
    return load_data(Data(use=use, **settings), seed=seed, python_path=HERE)


def sizes(splits) -> tuple[int | None, int | None]:
    return splits.train.num_samples, splits.test and splits.test.num_samples


@pytest.mark.parametrize(
    ("use", "args", "expected"),
    [
        ("user_data:make_pair", {"size": 5}, (5, None)),
        ("user_data:make_both", {"size": 7, "test_size": 2}, (7, 2)),
        ("user_data:make_dataset", {}, (8, None)),
        ("user_data:make_splits", {}, (6, None)),
        ("user_data:Numbered", {"size": 11}, (11, None)),
        (user_data.make_both, {"size": 3}, (3, 4)),
        (Numbered, {"size": 4}, (4, None)),
        (Numbered(4), {}, (4, None)),
        ((X, Y), {}, (6, None)),
        (((X, Y), (X[:2], Y[:2])), {}, (6, 2)),
        (((X, Y), None), {}, (6, None)),
        ((Numbered(4), Numbered(3)), {}, (4, 3)),
        ((Numbered(4), None), {}, (4, None)),
        (([[1.0, 2.0], [3.0, 4.0]], [0, 1]), {}, (2, None)),
        ((torch.zeros(3, 4), torch.zeros(3)), {}, (3, None)),
        (user_data.make_splits(), {}, (6, None)),
    ],
)
def test_every_form_of_user_data(use, args, expected):
    assert sizes(loaded(use, args=args)) == expected


def test_what_a_callable_draws_follows_from_the_seed():
    def split_by_chance():
        order = random.sample(range(100), 100)
        x = np.stack([np.random.permutation(100), order, torch.randperm(100).numpy()], axis=1)
        return x.astype(np.float32), np.arange(100) % 2

    states = random.getstate(), torch.get_rng_state()
    one, same, other = (fingerprint(loaded(split_by_chance, seed=seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_arrays_become_what_a_model_takes():
    splits = loaded(((X, Y), (X[:2], np.array([0, 4]))))
    assert splits.num_classes == 5
    inputs, targets = splits.train.gather(torch.tensor([5, 0]))
    assert inputs.tolist() == [[10.0, 11.0], [0.0, 1.0]] and inputs.dtype == torch.float32
    assert targets.tolist() == [2, 0] and targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "y", "input_type", "target_type", "num_classes"),
    [
        (np.zeros((3, 2), np.float64), np.array([0.5, 1.0, 2.0]), torch.float32, torch.float32, None),
        (np.zeros((3, 2), ">f4"), np.array([0, 1, 1], ">i2"), torch.float32, torch.int64, 2),
        (np.zeros((3, 2), bool), [True, False, True], torch.float32, torch.int64, 2),
        (np.zeros((3, 2), np.int32), np.zeros(3, np.uint16), torch.int64, torch.int64, 1),
        (torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32), torch.float32, torch.int64, 1),
        (torch.zeros(3, 2, requires_grad=True), [[1], [0], [1]], torch.float32, torch.int64, 2),
        (np.zeros((6, 2))[::-2], np.broadcast_to(1, 3), torch.float32, torch.int64, 2),
    ],
)
def test_types(x, y, input_type, target_type, num_classes):
    splits = loaded((x, y))
    batch = splits.train.gather(torch.arange(3))
    assert (batch.inputs.dtype, batch.targets.dtype, splits.num_classes) == (input_type, target_type, num_classes)
    assert batch.targets.shape == (3,)


def test_bytes_are_kept_and_given_from_0_to_1():
    splits = loaded((np.full((2, 1, 4, 4), 255, np.uint8), [0, 1]))
    assert splits.train.inputs.dtype == torch.uint8
    torch.testing.assert_close(splits.train.gather(torch.arange(2)).inputs, torch.ones(2, 1, 4, 4))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ((X, Y[:4]), "the training set has 6 inputs but 4 targets"),
        ((X[:0], Y[:0]), "the training set has no samples"),
        ((X, [0, 1, -1, 0, 1, 2]), "label at position 2 is -1"),
        ((X, Y.astype(str)), "targets of the training set have the type <U"),
        (([[1, 2], [3]], [0, 1]), "inputs of the training set cannot be read as an array"),
        ((X[:, 0], Y), r"have the shape \(6,\), one number per sample: .*reshape\(-1, 1\)"),
        ((np.where(X == 7, np.nan, X), Y), "input of the training set: sample 3 has a value that is infinite"),
        ((X, np.array([0.0, 1, np.inf, 0, 0, 0])), "target of the training set: sample 2"),
        ((X + 1j, Y), "the type complex128, which is not numbers"),
        ((torch.zeros(3, 2, dtype=torch.complex64), [0, 1, 0]), "give a plain one"),
        (((X, Y), (X[:, :1], Y)), r"inputs of the test set have the shape \(1,\), .* should have \(2,\)"),
        (((X, Y), (X, Y + 0.5)), "targets of training and test set differ"),
        (((X, Y), (X[:0], Y[:0])), "the test set has no samples"),
        ((X, Y, X), "the training set was given as a tuple of 3"),
        ({"y": X, "label": Y[:3]}, "the targets of the training set have 3 rows, and the inputs 'y' of"),
        (lambda: 5, "the training set was given as a value of type int"),
        (lambda: None, "the training set was given as None"),
        ("user_data:make_broken", r"raised RuntimeError: the disk is not mounted \(at .*user_data.py:\d+\)"),
    ],
)
def test_data_that_does_not_fit(use, message):
    with pytest.raises(DataError, match=message):
        loaded(use)


@pytest.mark.parametrize(
    ("use", "settings", "message"),
    [
        ("mnits", {}, "did you mean 'mnist'"),
        ("iris", {"args": {"rot": "x"}}, "data has no setting 'rot'"),
        ("mnist", {"args": {"rot": "x"}}, "did you mean 'root'"),
        ("user_data:make_pair", {"args": {"size": "big"}}, r"data.size = 'big' does not fit"),
        ((X, Y), {"args": {"size": 3}}, "data has no setting 'size': data.use is a tuple"),
        ("iris", {"test_fraction": 0.2}, "iris has a test set: remove the setting"),
        ((X, Y), {"test_limit": 3}, "has no test set: set data.test_fraction"),
        ((X, Y), {"test_fraction": 0.01}, "leaves nothing on one side"),
    ],
)
def test_settings_that_do_not_fit(use, settings, message):
    with pytest.raises(JobError, match=message):
        loaded(use, **settings)


def test_declared_classes_are_checked():
    source = ArraySource(torch.zeros(4, 2), torch.tensor([0, 1, 7, 2]))
    with pytest.raises(DataError, match=r"the training set of mine: the label at position 2 is 7, .*0 to 2"):
        loaded(Splits(train=source, test=None, input_shape=(2,), num_classes=3, name="mine"))


def test_splits_may_hold_datasets():
    splits = loaded(Splits(train=Numbered(4), test=Numbered(2), input_shape=(3,), num_classes=50, name="mine"))
    assert (sizes(splits), splits.num_classes, splits.name) == ((4, 2), 50, "mine")


def test_callable_gets_seed_and_normalize_if_it_wants_them():
    splits = loaded("user_data:make_seeded", seed=40, normalize=True)
    assert splits.train.gather(torch.tensor([0])).inputs.tolist() == [[41.0, 41.0]]


def test_share_set_aside_is_disjoint_and_follows_the_seed():
    x = np.arange(40.0).reshape(40, 1)
    one, same, other = (loaded((x, x[:, 0]), seed=seed, test_fraction=0.25) for seed in (0, 0, 1))

    def test_inputs(splits):
        return splits.test.gather(torch.arange(10)).inputs.flatten().tolist()

    assert sizes(one) == (30, 10)
    assert test_inputs(one) == test_inputs(same) != test_inputs(other)
    train = one.train.gather(torch.arange(30)).inputs.flatten().tolist()
    assert sorted(train + test_inputs(one)) == x.flatten().tolist()


def test_limits_take_the_first():
    splits = loaded(((X, Y), (X, Y)), train_limit=4, test_limit=100)
    assert sizes(splits) == (4, 6)
    assert splits.train.gather(torch.arange(4)).inputs[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
