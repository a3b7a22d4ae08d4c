"""What the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; every test has a timeout anyway.
settings.register_profile("cordee", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cordee")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where the other core is busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
