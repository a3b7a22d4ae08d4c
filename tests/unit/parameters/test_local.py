"""Servers as children: what is refused before any of them is started."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cordee.core.errors import StoreError
from cordee.parameters.local import LocalServers


@pytest.mark.parametrize("num_servers", [0, -1, 65, "two", 1.5])
def test_a_number_of_servers_that_makes_no_sense(num_servers: Any) -> None:
    message = f"num_servers = {num_servers!r} must be a whole number from 1 to 64: they are processes of this host"
    with pytest.raises(StoreError, match=re.escape(message)):
        LocalServers(num_servers, [], 5.0)
