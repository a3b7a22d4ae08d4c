"""Update functions that servers of the tests are started with."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor


def keep_largest(value: Tensor, pushed: Tensor, state: dict[str, Any], scale: float = 1.0) -> None:
    value.copy_(value.maximum(pushed * scale))


def take_time(value: Tensor, pushed: Tensor, state: dict[str, Any], seconds: float) -> None:
    time.sleep(seconds)
    value.add_(pushed)
