"""Values are sent without pickle, and come back as they were."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.errors import JobError
from cordee.horovod.objects import decode, encode

keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(keys, inner), st.sets(keys)),
    max_leaves=20,
)


@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(encode(value, "it"))
    assert back == value and type(back) is type(value)


def test_tensors_arrays_and_others() -> None:
    tensors = [torch.arange(6).view(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2), torch.eye(2).T]
    for tensor in tensors:
        back = decode(encode(tensor, "it"))
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)
        back.zero_() if back.numel() else None  # its own memory
    array = decode(encode(np.arange(4.0).reshape(2, 2), "it"))
    assert array.tolist() == [[0, 1], [2, 3]] and array.dtype == np.float64
    number = decode(encode(np.float32(2.5), "it"))
    assert number == 2.5 and type(number) is np.float32
    for value in (OrderedDict(b=1, a=2), torch.float16, torch.Size([2]), datetime.datetime(2026, 1, 2), float("inf")):
        assert decode(encode(value, "it")) == value


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"model": [1, Thing()]}, r"it\['model'\]\[1\] is a .*test_objects.Thing: objects are sent without pickle"),
        (lambda: 1, "it is a builtins.function"),
        (np.array([Thing()]), "it is an array of object"),
        (torch.eye(2).to_sparse(), "it is a torch.sparse_coo tensor"),
    ],
)
def test_other_objects_are_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(JobError, match=where):
        encode(value, "it")
