"""The strategies: one module for each row of the strategy table."""

from __future__ import annotations

from cordee.strategies.choice import (
    STRATEGIES,
    choose_strategy,
    foreign_settings,
    make_strategy,
    refuse_others_settings,
)
from cordee.strategies.strategy import Requirements, Strategy, Update

__all__ = [
    "STRATEGIES",
    "Requirements",
    "Strategy",
    "Update",
    "choose_strategy",
    "foreign_settings",
    "make_strategy",
    "refuse_others_settings",
]
