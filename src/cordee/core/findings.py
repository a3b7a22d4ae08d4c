"""What a check has found: of a machine, a cluster, a run. `cordee doctor` prints it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `note` is worth knowing, `problem` keeps training from working."""

    subject: str
    state: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""
