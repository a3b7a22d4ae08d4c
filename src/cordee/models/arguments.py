"""Checks of builder arguments; each raises `ModelError` naming the model, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cordee.core.errors import ModelError


def check_image_shape(model: str, input_shape: Sequence[int], min_side: int = 1) -> tuple[int, int, int]:
    """Return (channels, height, width), or say which samples the model takes."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ModelError(
            f"model '{model}' takes images of shape (channels, height, width), the data has samples of shape "
            f"{tuple(input_shape)}: choose another model or data"
        )
    channels, height, width = input_shape
    if min(height, width) < min_side:
        raise ModelError(
            f"model '{model}' takes images of at least {min_side}×{min_side} pixels, the data has "
            f"{height}×{width}: choose another model or enlarge the images"
        )
    return channels, height, width


def check_at_least(model: str, name: str, value: int, smallest: int = 1) -> None:
    if value < smallest:
        raise ModelError(f"model '{model}' cannot have {name} = {value}: it must be {smallest} or more")


def check_dropout(model: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ModelError(f"model '{model}' cannot have dropout = {value}: it must be at least 0 and less than 1")


def check_choice(model: str, name: str, value: object, allowed: Iterable[object]) -> None:
    choices = list(allowed)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ModelError(f"model '{model}' cannot have {name} = {value!r}: it must be one of {listed}")
