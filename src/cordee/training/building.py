"""Models that will be split, built and tried with few of their pages in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import nn

from cordee.core.file_memory import FileMemory, Paging

_Result = TypeVar("_Result")


class Built(NamedTuple):
    """A model, and what the user should know of where it lies."""

    model: nn.Module
    warning: str | None = None


def build_in_files(build: Callable[[], nn.Module]) -> Built:
    """Return the very model that `build` returns, with its large tensors in temporary files."""
    memory = FileMemory()
    problem: Exception | None = None
    try:
        with Paging(memory):
            model = build()
        problem = memory.problem
    except Exception as error:  # noqa: BLE001 - what is wrong with the model itself is raised again
        model, problem = build(), error
    if problem is None:
        return Built(model)
    return Built(
        model, f"each worker has the whole model in memory until it has its part: it cannot lie in a file ({problem})"
    )


def compute_in_files(is_split: bool, action: Callable[[], _Result]) -> _Result:
    """Return what a local action does that computes the model; of one that is split with few pages in memory."""
    if is_split:
        with contextlib.suppress(Exception), Paging():  # what is wrong is wrong without the mode as well
            return action()
    return action()
