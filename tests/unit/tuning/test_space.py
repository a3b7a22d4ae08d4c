"""What `--search` may say, and what is refused by name."""

from __future__ import annotations

import pytest

from cordee.core.errors import JobError
from cordee.tuning.space import Choice, Range, corners, describe, parse_search, place


def test_each_form() -> None:
    texts = [
        "optimizer.lr=log:1e-4..1e-1",
        "model.dropout=lin:0..0.5",
        "training.batch_size=int:16..64/16",
        "a.b=x|[1, 2]",
    ]
    lr, dropout, batch, choice = found = parse_search(texts)
    assert lr == Range(key="optimizer.lr", low=1e-4, high=0.1, is_log=True)
    assert dropout == Range(key="model.dropout", low=0.0, high=0.5)
    assert batch == Range(key="training.batch_size", low=16, high=64, is_whole=True, step=16)
    assert choice == Choice(key="a.b", texts=("x", "[1, 2]"))
    assert parse_search(describe(found)) == found


def test_corners_have_every_edge() -> None:
    space = parse_search(["a=lin:0..1", "b=x|y|z"])
    points = list(corners(space))
    assert {point["b"] for point in points} == {"x", "y", "z"}
    assert {point["a"] for point in points} == {0.0, 1.0}
    assert place(points[0]) == ["a=0.0", "b=x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.lr", "has no key or no values"),
        ("=log:1..2", "has no key or no values"),
        ("a..b=log:1..2", "has no key or no values"),
        ("optimizer.lr=log:0..1", "the lower bound must be above 0"),
        ("optimizer.lr=lin:1..1", "the lower bound 1 must be below the upper bound 1"),
        ("optimizer.lr=lin:2..1", "must be below"),
        ("optimizer.lr=lin:nan..1", "'nan' is not finite"),
        ("optimizer.lr=lin:0..x", "'x' is no number"),
        ("optimizer.lr=lin:0", "has no '..'"),
        ("optimizer.lr=logg:1..2", "there is no range 'logg'; did you mean 'log'?"),
        ("optimizer.lr=1..2", "say how the range is gone through"),
        ("training.batch_size=int:1.5..3", "int: takes whole numbers"),
        ("training.batch_size=int:1..3/5", "the step must be a whole number from 1 to 2"),
        ("training.batch_size=lin:1..3/1", "only int: has steps"),
        ("optimizer.lr=0.1", "one value is no search: use --set optimizer.lr=0.1"),
        ("optimizer.use=adam|adam", "a choice is there twice"),
        ("optimizer.use=adam|", "a choice is empty"),
        ("cluster.engine=local|ray", "does not change what is learnt"),
    ],
)
def test_nonsense_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_search([text])
    assert message in str(caught.value)
    assert "--search" in str(caught.value)


def test_a_key_is_searched_once_and_something_is_searched() -> None:
    with pytest.raises(JobError, match="--search a is given 2 times"):
        parse_search(["a=1|2", "a=lin:0..1"])
    with pytest.raises(JobError, match="nothing to search"):
        parse_search([])
