"""What the pipeline benchmark makes of its figures."""

from __future__ import annotations

import pytest

from cordee.bench.loops import train_tensors
from cordee.bench.pipeline import MODELS, _rows, measure_cut, placement_of
from cordee.models.cutting import cut_by_hand, make_chain


def test_idle_shares_and_ratios() -> None:
    figures = {
        "cordee": [160.0, 176.0],
        "torch on gloo": [80.0, 80.0],
        "one worker": [110.0, 110.0],
        "two alone": [200.0, 200.0],
    }
    idle = {"cordee": [0.15, 0.17], "torch on gloo": [0.3, 0.3]}
    cordee, gloo, alone, both = _rows("gpt, 1f1b", figures, idle)
    assert cordee["idle_share"] == pytest.approx(0.16)
    assert cordee["idle_in_theory"] == pytest.approx(1 / 9)
    assert (cordee["outcome"], gloo["outcome"]) == ("reached", "reached")
    assert gloo["cordee_is_times"] == pytest.approx(2.1)
    assert alone["idle_share"] is None and both["idle_share"] is None
    slow = {**figures, "cordee": [70.0, 70.0]}
    idling = {**idle, "cordee": [0.22, 0.22]}
    assert [row["outcome"] for row in _rows("gpt, 1f1b", slow, idling)] == ["MISSED", "MISSED", "", ""]


def test_the_cut_has_all_blocks() -> None:
    assert MODELS["gpt"].batch_size % 8 == 0
    counts = measure_cut("gpt")
    assert len(counts) == 2 and sum(counts) == 6


@pytest.mark.parametrize("name", MODELS)
def test_the_measured_cut_is_one_that_the_strategy_takes_by_hand(name: str) -> None:
    inputs, _ = train_tensors(MODELS[name].data)
    chain = make_chain(MODELS[name].build(), inputs[:2])
    counts = [2, len(chain.blocks) - 2]
    assert cut_by_hand([block.names for block in chain.blocks], placement_of(chain, counts)) == counts
