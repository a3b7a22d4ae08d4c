"""No setting is ignored: each changes what it says it changes, in every strategy that accepts it."""

from __future__ import annotations

import pytest

from differences.running import Runner
from differences.settings import (
    BASES,
    EFFECTS,
    IN_ROUNDS,
    ROUNDS,
    TESTS_FOLDER,
    Changes,
    Elsewhere,
    accepting,
    known_settings,
    look_of,
    tables,
)


def _is_long(key: str, strategy: str) -> bool:
    """`make test` tries every setting alone and every strategy's own settings, `make test-long` all pairs."""
    if strategy == ROUNDS:  # `make test` has test_federated_jobs.py
        return True
    return strategy != "single" and key.split(".")[0] != strategy


PAIRS = [
    pytest.param(key, strategy, marks=[pytest.mark.long] if _is_long(key, strategy) else [])
    for key, effect in EFFECTS.items()
    if isinstance(effect, Changes)
    for strategy in accepting(key, effect)
]


def test_every_setting_is_in_the_table() -> None:
    assert known_settings() - EFFECTS.keys() == set(), "say in differences/settings.py what these settings change"
    assert EFFECTS.keys() >= IN_ROUNDS
    parts = ("optimizer.", "loss.", "schedule.")
    assert {key for key in EFFECTS if not key.startswith(parts)} - known_settings() == set(), (
        "no such settings any more"
    )


def test_every_strategy_is_tried() -> None:
    from cordee.strategies.table import STRATEGIES

    assert set(BASES) == set(STRATEGIES)


@pytest.mark.parametrize("key", [key for key, effect in EFFECTS.items() if isinstance(effect, Elsewhere)])
def test_settings_that_are_tested_elsewhere_are(key: str) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Elsewhere)
    assert key.rpartition(".")[2] in (TESTS_FOLDER / effect.test).read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("key", "strategy"), PAIRS)
def test_setting_changes_what_it_says(key: str, strategy: str, runner: Runner) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Changes)
    base, changed = tables(key, effect, strategy)
    look, before, after = look_of(effect, strategy), runner.train_once(base), runner.train_once(changed)
    assert before.code == 0, before.message
    assert after.code == 0 or look.__name__ == "exit_code", after.message
    assert look(before) != look(after), f"{key} = {effect.value} changes nothing in {strategy}"
