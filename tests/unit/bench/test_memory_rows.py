"""What `cordee bench memory` compares: the share, activations, and the stall beside a step."""

from __future__ import annotations

import pytest

from cordee.bench.memory import PHASES, SIZES, STALL, activation_bytes, rows_of


def test_peaks_are_of_the_share_and_activations() -> None:
    raw = {f"{phase}, bytes above a tiny model": [220.0, 130.0, 120.0] for phase in PHASES}
    raw |= {"stall_s": [0.1, 0.2], "first_stall_s": [0.5, 0.5], "beside_s": [1.5, 2.5], "step_s": [1.0, 2.0]}
    rows = rows_of(raw, share=100.0, kept=30.0)
    assert len({tuple(row) for row in rows}) == 1, "a table has the same columns in all rows"
    for row in rows[: len(PHASES)]:
        assert (row["is_times"], row["without_gradients"]) == (1.0, pytest.approx(130 / 105))
    stall, first, beside = rows[len(PHASES) :]
    assert (stall["what"], stall["is_times"]) == (STALL, pytest.approx(0.1))
    assert (first["is_times"], beside["is_times"]) == (pytest.approx(0.375), pytest.approx(0.375))


def test_activations_are_counted_once_and_without_parameters() -> None:
    """At least what enters each of the 18 blocks' layers is kept, of 16 tokens; far less than all parameters."""
    layers, width = SIZES["large"]
    assert 16 * layers * width * 4 * 10 < activation_bytes() < 16 * layers * width * 4 * 30
