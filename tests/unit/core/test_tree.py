from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cordee.core import tree
from cordee.core.batch import Batch, Call, Pieces, choose_call, cut_parts, tensors_in
from cordee.core.errors import ModelError


@dataclass
class Parts:
    image: Tensor
    size: Any = None


class Both(NamedTuple):
    one: Tensor
    two: Tensor


def nested(rows: int = 4) -> dict[str, Any]:
    count = torch.arange(rows)
    return {"a": count, "b": (count.float(), [Parts(count.view(-1, 1))]), "c": Both(count, count + 1), "d": None}


def test_a_tree_keeps_its_build() -> None:
    made = tree.map_leaves(lambda leaf: leaf + 1, nested())
    assert isinstance(made["b"][1][0], Parts) and made["b"][1][0].size is None
    assert isinstance(made["c"], Both) and made["c"].two.tolist() == [2, 3, 4, 5]
    assert [name for name, _ in tree.named_leaves(made)] == ["a", "b.0", "b.1.0.image", "c.one", "c.two"]
    again = tree.from_names(made, "x", dict(tree.named_leaves(made, "x")))
    assert all(one is two for one, two in zip(tree.leaves(made), tree.leaves(again), strict=True))
    assert tree.shapes(made)["b"] == ((), [Parts((1,))])  # type: ignore[arg-type]
    assert tree.shape_leaves(tree.shapes(made)) == [(), (), (1,), (), ()]
    plain = torch.zeros(3, 2)
    assert tree.shapes(plain) == (2,) and tree.shape_leaves((2,)) == [(2,)] and tree.leaves(plain) == [plain]
    kept = tree.map_leaves(lambda leaf: leaf * 2, UserDict(a=torch.ones(1)))
    assert isinstance(kept, UserDict) and float(kept["a"]) == 2.0


def test_batches_are_cut_and_put_together() -> None:
    batch = Batch(nested(7), None)
    parts = batch.cut(3)
    assert [part.num_samples for part in parts] == [3, 2, 2] == [stop - start for start, stop in cut_parts(7, 3)]
    whole = Batch.concatenate(parts)
    assert all(torch.equal(*pair) for pair in zip(whole.leaves(), batch.leaves(), strict=True))
    assert batch.select(torch.tensor([6, 0])).inputs["a"].tolist() == [6, 0]
    assert Pieces(parts).num_samples == 7
    assert [part.num_samples for part in Batch(torch.zeros(1, 2), torch.zeros(1)).cut(3)] == [1, 0, 0]


class Named(nn.Module):
    def forward(self, a: Tensor, b: Tensor, labels: Any = None) -> Any:
        return a, b, labels


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


def test_models_are_called_as_their_inputs_are() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert choose_call(Named(), {"a": x, "b": y}, [], "m")(Named(), {"a": x, "b": y})[:2] == (x, y)
    assert choose_call(Named(), (x, y), ["labels"], "m")(Named(), (x, y), {"labels": 1}) == (x, y, 1)
    call = choose_call(Whole(), {"a": x, "b": y}, [], "m")
    assert call == Call(is_whole=True) and call(Whole(), {"a": x, "b": y}) == {"a": x, "b": y}
    assert choose_call(Whole(), Parts(x), [], "m") == Call()
    for inputs, keywords, message in (
        ({"a": x, "c": y}, [], r"takes \(a, b, labels=…\), and the batch has a, c: .*data.inputs"),
        ((x,), [], "the batch has 1 inputs without names"),
        ({"a": x, "b": y}, ["label"], "the batch has a, b, label"),
        ({"a": x, "b": y, "labels": y}, ["labels"], "inputs of the model m and its targets both have 'labels'"),
    ):
        with pytest.raises(ModelError, match=message):
            choose_call(Named(), inputs, keywords, "m")


def test_tensors_in_outputs() -> None:
    x = torch.zeros(2)
    assert tensors_in({"loss": x, "more": (None, [x], "text", 3)}) == [x, x]
    assert tensors_in(type("Outputs", (), {})()) == []
