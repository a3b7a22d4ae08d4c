"""Loaded by Python at its start: processes under this path cannot make a segment of shared memory."""

from __future__ import annotations

import sys

if "cordee.cluster.engines.fork_server" in sys.orig_argv:
    from cordee.communication.shared_memory import backend
    from cordee.core.errors import CommunicationError

    def refuse(*args: object, **kwargs: object) -> object:
        raise CommunicationError("no shared memory today")

    backend.create_segment = refuse  # type: ignore[assignment]
